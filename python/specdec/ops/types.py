"""Tuples that group tensors which travel together. Plain NamedTuples: cheap to build in a hot loop and
understood by `torch.compile`. Letters as in `docs/architecture.md`: B rows, N nodes, HK key heads, HV value
heads, DK, DV widths, P path entries, C channels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MIXER_TENSORS, MLP_TENSORS = 7, 3  # of the list of a block's weights


class Factors(NamedTuple):
    """What `verify` leaves behind instead of states: enough to advance a state to any of the verified nodes.

    A node's step is `S <- a S + u k^T` with `a = exp(g)`. Rows beyond `lengths` and of negative slots are
    zero.
    """

    k: Tensor
    """float32 [B, N, HK, DK], as the recurrence used it (normalised where `qk_l2norm`)."""
    u: Tensor
    """float32 [B, N, HV, DV], the corrected write `beta (v - a S k)` of the delta rule, `v` of the additive
    one."""
    g: Tensor | None = None
    """float32 [B, N, HV] or [B, N, HV, DK] log-decay, or None."""


class Pending(NamedTuple):
    """The accepted path of the previous round, to be folded into the state by the next `verify`."""

    factors: Factors
    path: Tensor | None = None
    """int32 [B, P] node indices from root to leaf; None for 0, 1, 2, ..."""
    path_lengths: Tensor | None = None
    """int32 [B]; None for all P (all N without a path)."""


class Prefix(NamedTuple):
    """Nodes 0..NP-1 that were verified already from the same committed state and are not committed."""

    factors: Factors
    parents: Tensor | None = None
    """int32 [B, NP], -1 for a root; None for a chain."""


class ConvPending(NamedTuple):
    """`Pending` of the short convolution, whose factors are its raw inputs."""

    x: Tensor
    """[B, N, C] raw inputs of the previous round."""
    path: Tensor | None = None
    """int32 [B, P]; None for 0, 1, 2, ..."""
    path_lengths: Tensor | None = None
    """int32 [B]; None for all."""


class ConvPrefix(NamedTuple):
    """`Prefix` of the short convolution."""

    x: Tensor
    """[B, NP, C] raw inputs of the prefix nodes."""
    parents: Tensor | None = None
    """int32 [B, NP], -1 for a root; None for a chain."""
