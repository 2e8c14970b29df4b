"""Consecutive Gated DeltaNet blocks in one call.

With a few rows the way from one block to the next through Python takes as long as half a block. A thin
wrapper, as `specdec.ops.block` is; letters as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._operator import operator, want_tensor, want_type
from specdec.ops.block import BlockWeights
from specdec.ops.convolution import conv_commit
from specdec.ops.layer import strategy_code
from specdec.ops.recurrence import commit
from specdec.ops.types import MIXER_TENSORS, MLP_TENSORS, Factors

_verify_stack = operator("verify_stack")
_verify_stack_deferred = operator("verify_stack_deferred")


class BlockEntries(NamedTuple):
    """What a block's mixer leaves behind of verified nodes, enough to commit any path of them.

    Attributes:
        factors: of the recurrence.
        mixed: [B, N, C] raw projections of q, k, v: the factors of the convolution.
    """

    factors: Factors
    mixed: Tensor


class StackPrefix(NamedTuple):
    """Nodes 0..NP-1 that were verified already and are not committed.

    Attributes:
        entries: of each mixer.
        parents: int32 [B, NP], -1 for a root; None for a chain.
    """

    entries: Sequence[BlockEntries]
    parents: Tensor | None = None


class StackPending(NamedTuple):
    """The accepted path of the previous round.

    Attributes:
        entries: of each mixer.
        path: int32 [B, P] node indices from root to leaf; None for 0, 1, 2, ...
        path_lengths: int32 [B]; None for all.
    """

    entries: Sequence[BlockEntries]
    path: Tensor | None = None
    path_lengths: Tensor | None = None


class BlockStack:
    """The weights of consecutive blocks, each a `BlockWeights` or a part of one.

    Args:
        blocks: at least one; all with the same `gated`, `eps` and `neg_eigval`, and all with a bias of the
            convolution or none.

    Attributes:
        mixers: how many of them have a token mixer, and so a state.
        eps: of all norms.

    Raises:
        ValueError: there is no block, or they disagree.
        TypeError: a block is of another type.
    """

    __slots__ = ("eps", "mixers", "operands")

    def __init__(self, blocks: Sequence[BlockWeights]) -> None:
        if not blocks:
            raise ValueError("blocks: got none, want at least one")
        for i, block in enumerate(blocks):
            want_type(f"blocks[{i}]", block, BlockWeights)
        first = blocks[0]
        mixers = [block for block in blocks if block.has_mixer]
        for i, block in enumerate(blocks):
            for name in ("gated", "eps", "neg_eigval"):
                got, want = getattr(block, name), getattr(first, name)
                if got != want:
                    raise ValueError(f"blocks[{i}]: got {name} {got}, want {want} as in blocks[0]")
        _want_alike("mixer", [block.tensors[:MIXER_TENSORS] for block in mixers], (0, 2, 3, 5))
        _want_alike("MLP", [block.tensors[-MLP_TENSORS:] for block in blocks if block.has_mlp], (0,))
        if len({len(block.tensors[0]) for block in blocks}) > 1:
            raise ValueError("blocks: got residual streams of several widths, want one")
        biases = [block.conv_bias for block in mixers if block.conv_bias is not None]
        if biases and len(biases) < len(mixers):
            raise ValueError(f"blocks: got {len(biases)} with a conv_bias of {len(mixers)}, want all or none")
        self.mixers = len(mixers)
        self.eps = first.eps
        # As the operators take them.
        self.operands = (
            [tensor for block in blocks for tensor in block.tensors],
            [len(block.tensors) for block in blocks],
            biases,
            first.gated,
            first.eps,
            first.neg_eigval,
        )


def _want_alike(name: str, parts: Sequence[Sequence[Tensor]], vectors: Sequence[int]) -> None:
    """Refuses sub-layers of other sizes than the first one's, which its norms, taps and gates tell."""
    sizes = [[list(part[i].shape) for i in vectors] for part in parts]
    for i, got in enumerate(sizes):
        if got != sizes[0]:
            raise ValueError(f"blocks: {name} {i} has vectors of shapes {got}, want {sizes[0]} of the first")


class StackOutputs(NamedTuple):
    """What `verify_stack` gives back.

    Attributes:
        hidden: of each block the residual stream after it, [B, N, D].
        read: of each mixer the recurrence's output, [B, N, HV, DV].
        entries: of each mixer.
    """

    hidden: list[Tensor]
    read: list[Tensor]
    entries: list[BlockEntries]


def verify_stack(
    x: Tensor,
    weights: BlockStack,
    *,
    conv_states: Sequence[Tensor],
    states: Sequence[Tensor],
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    pending: StackPending | None = None,
    prefix: StackPrefix | None = None,
    scale: float | None = None,
    strategy: str = "exact",
) -> StackOutputs:
    """Verifies a chain or a tree through consecutive blocks, on a CPU: the same bits as `verify_block` for
    one after the other, with their MLPs alone where a block has no mixer.

    Args:
        x: [B, N, D] residual stream, float32, bfloat16 or float16.
        weights: the blocks'.
        conv_states, states: of each mixer, as in `verify_layer`. With `pending` all of one shape.
        slots, parents, lengths, scale: as in `verify_layer`.
        pending: is folded into the states; not together with `prefix`.
        prefix: nodes that these continue.
        strategy: "serial", "hybrid" or "exact", the faster of the two.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, or an input requires grad
            in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.
    """
    want_type("weights", weights, BlockStack)
    want_tensor("x", x)
    code = 0
    if states:
        code = strategy_code(strategy, x, states[0], parents is not None, prefix is not None)
    head = (x, *weights.operands, list(conv_states), list(states), slots, parents, lengths)
    if pending is not None:
        want_type("pending", pending, StackPending)
        if prefix is not None:
            raise ValueError(
                "prefix: got both pending and prefix, want one: a prefix starts at a committed state"
            )
        if torch.compiler.is_compiling():  # it traces no operator that writes and gives back lists
            _fold(pending, conv_states, states, slots)
            pending = None
    if pending is not None:
        found = _verify_stack_deferred(
            *head, entry_operands(pending.entries), pending.path, pending.path_lengths, scale, code
        )
    else:
        found = _verify_stack(*head, *stack_prefix_operands(prefix), scale, code)
    hidden, read, entries = found
    return StackOutputs(hidden, read, entries_of(entries))


def _fold(
    pending: StackPending, conv_states: Sequence[Tensor], states: Sequence[Tensor], slots: Tensor | None
) -> None:
    """Commits what is pending, to the same bits as the deferred operator."""
    entries, *path = pending
    for (factors, mixed), window, state in zip(entries, conv_states, states, strict=True):
        commit(state, factors, *path, slots=slots)
        conv_commit(window, mixed, *path, slots=slots)


def stack_prefix_operands(prefix: StackPrefix | None) -> tuple[list[Tensor], Tensor | None]:
    """Entries and parents of a prefix as the operators take them."""
    if prefix is None:
        return [], None
    want_type("prefix", prefix, StackPrefix)
    return entry_operands(prefix.entries), prefix.parents


def entry_operands(entries: Sequence[BlockEntries]) -> list[Tensor]:
    """k, u, g and the raw projections of each mixer.

    Raises:
        ValueError: an entry has no g: these blocks have one decay a head.
    """
    flat: list[Tensor] = []
    for i, ((k, u, g), mixed) in enumerate(entries):
        if g is None:
            raise ValueError(f"entries[{i}].factors.g: got None, want a tensor")
        flat += (k, u, g, mixed)
    return flat


def entries_of(flat: Sequence[Tensor]) -> list[BlockEntries]:
    """Undoes `entry_operands`."""
    return [
        BlockEntries(Factors(flat[i], flat[i + 1], flat[i + 2]), flat[i + 3]) for i in range(0, len(flat), 4)
    ]
