"""A Gated DeltaNet layer verified by `solve`, for studies: the kernel of `ops.verify_layer` steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec import ops
from specdec.ops import ConvPending, ConvPrefix, Factors, Pending, Prefix


def solve_layer(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    neg_eigval: bool,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    parents: Tensor | None,
    lengths: Tensor | None,
    pending: Pending | None,
    pending_mixed: Tensor | None,
    prefix: Prefix | None,
    prefix_mixed: Tensor | None,
    scale: float,
) -> tuple[Tensor, Factors]:
    """`ops.verify_layer` (see there) from the operators that it stands for, one of which solves.

    A prefix, which solve does not take, is stepped: these are the steps of a drafter, not verification.
    """
    rows: dict[str, Any] = {"slots": slots, "parents": parents, "lengths": lengths}
    activated = ops.conv_verify(
        mixed,
        conv_weight,
        conv_bias,
        conv_state=conv_state,
        pending=None
        if pending is None or pending_mixed is None
        else ConvPending(pending_mixed, *pending[1:]),
        prefix=None if prefix is None or prefix_mixed is None else ConvPrefix(prefix_mixed, prefix.parents),
        **rows,
    )
    channels = activated.shape[-1]
    HV, DV, DK = state.shape[1:]
    keys = (channels - HV * DV) // 2  # HK * DK
    q, k, v = activated[..., :keys], activated[..., keys : 2 * keys], activated[..., 2 * keys :]
    g, beta = ops.gated_delta_gates(a, b, A_log, dt_bias, neg_eigval)
    return ops.verify(
        q.view(*q.shape[:-1], -1, DK),
        k.view(*k.shape[:-1], -1, DK),
        v.view(*v.shape[:-1], HV, DV),
        g,
        beta,
        state=state,
        pending=pending,
        prefix=prefix,
        scale=scale,
        qk_l2norm=True,
        strategy="solve" if prefix is None else "exact",
        **rows,
    )
