"""The operators in plain PyTorch: the sequential recurrence on a tree, one node after the other, in float64.

Same names and arguments as `specdec.ops`, and no code shared with the fast forms. One argument more:
`dtype=None` computes in float64 and returns what the operator returns (v's dtype, float32 factors); a dtype
computes in it and returns everything in it, unrounded. Arguments are not checked. With `S` [HV, DV, DK], `a =
exp(g)` and `p` the parent of node `i`:

    S_i = a_i S_p + u_i k_i^T    u_i = beta_i (v_i - a_i S_p k_i)  (additive: v_i)    o_i = S_i q_i
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.dense import gated_delta_gates_reference, rms_norm_reference
from specdec.ops.types import ConvPending, ConvPrefix, Factors, Pending, Prefix


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    pending: Pending | None = None,
    prefix: Prefix | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    strategy: str = "auto",
    precision: str = "auto",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Factors]:
    """`specdec.ops.verify`. `strategy` and `precision` are accepted and mean nothing here."""
    del strategy, precision
    real = dtype or torch.float64
    B, N, HK, DK = k.shape
    HV, DV = v.shape[2:]
    out = v.new_zeros(B, N, HV, DV, dtype=real)
    factor_k = v.new_zeros(B, N, HK, DK, dtype=real)
    factor_u = v.new_zeros(B, N, HV, DV, dtype=real)
    factor_g = None if g is None else g.new_zeros(g.shape, dtype=real)

    if pending is not None:
        commit(state, pending.factors, pending.path, pending.path_lengths, slots=slots, dtype=real)
    for b, slot in _rows(slots, B):
        root = state[slot].to(real)  # [HV, DV, DK]
        nodes: list[Tensor] = []  # the state after every node, prefix first
        if prefix is not None:
            for i in range(prefix.factors.k.shape[1]):
                before = _parent_state(nodes, root, prefix.parents, b, i, 0)
                nodes.append(_advance(before, prefix.factors, b, i, real))
        first = len(nodes)
        for i in range(_length(lengths, b, N)):
            before = _parent_state(nodes, root, parents, b, i, first)
            query, key = q[b, i].to(real), k[b, i].to(real)  # [HK, DK]
            if qk_l2norm:
                query, key = _normalise(query), _normalise(key)
            query = query * (DK**-0.5 if scale is None else scale)
            decayed = before if g is None else _decay(before, g[b, i].to(real))
            u = v[b, i].to(real)  # [HV, DV]
            if beta is not None:
                read = _read(decayed, _per_value_head(key, HV))
                u = beta[b, i].to(real)[:, None] * (u - read)
            after = decayed + _outer(u, _per_value_head(key, HV))
            out[b, i] = _read(after, _per_value_head(query, HV))
            factor_k[b, i], factor_u[b, i] = key, u
            if g is not None and factor_g is not None:
                factor_g[b, i] = g[b, i].to(real)
            nodes.append(after)

    if dtype is None:
        out, factor_k, factor_u = out.to(v.dtype), factor_k.float(), factor_u.float()
        factor_g = None if factor_g is None else factor_g.float()
    return out, Factors(factor_k, factor_u, factor_g)


def commit(
    state: Tensor,
    factors: Factors,
    path: Tensor | None = None,
    path_lengths: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    mode: str = "exact",
    dtype: torch.dtype | None = None,
) -> None:
    """`specdec.ops.commit`, in place. `mode` is accepted and means nothing here."""
    del mode
    real = dtype or torch.float64
    B, N = factors.k.shape[:2]
    for b, slot in _rows(slots, B):
        S = state[slot].to(real)
        for i in _path(path, path_lengths, b, N):
            S = _advance(S, factors, b, i, real)
        state[slot] = S.to(state.dtype)


def conv_verify(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_state: Tensor,
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    pending: ConvPending | None = None,
    prefix: ConvPrefix | None = None,
    activation: str | None = "silu",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`specdec.ops.conv_verify`."""
    real = dtype or torch.float64
    B, N, C = x.shape
    W = weight.shape[1]
    y = x.new_zeros(B, N, C, dtype=real)
    if pending is not None:
        conv_commit(conv_state, pending.x, pending.path, pending.path_lengths, slots=slots)
    for b, slot in _rows(slots, B):
        root = list(conv_state[slot].to(real))  # W-1 rows [C], oldest first
        nodes: list[list[Tensor]] = []  # the inputs on the way to every node, prefix first
        if prefix is not None:
            for i in range(prefix.x.shape[1]):
                before = _parent_inputs(nodes, root, prefix.parents, b, i, 0)
                nodes.append([*before, prefix.x[b, i].to(real)])
        first = len(nodes)
        for i in range(_length(lengths, b, N)):
            inputs = [*_parent_inputs(nodes, root, parents, b, i, first), x[b, i].to(real)]
            window = torch.stack(inputs[len(inputs) - W :], dim=1)  # [C, W]
            row = (weight.to(real) * window).sum(dim=1)
            if bias is not None:
                row = row + bias.to(real)
            y[b, i] = row * torch.sigmoid(row) if activation == "silu" else row
            nodes.append(inputs)
    return y.to(x.dtype) if dtype is None else y


def conv_commit(
    conv_state: Tensor,
    x: Tensor,
    path: Tensor | None = None,
    path_lengths: Tensor | None = None,
    *,
    slots: Tensor | None = None,
) -> None:
    """`specdec.ops.conv_commit`, in place. A copy, so it takes no `dtype`."""
    B, N, _ = x.shape
    window = conv_state.shape[1]
    for b, slot in _rows(slots, B):
        accepted = [x[b, i].to(conv_state.dtype) for i in _path(path, path_lengths, b, N)]
        rows = [*conv_state[slot].clone(), *accepted]
        for w in range(window):
            conv_state[slot, w] = rows[len(rows) - window + w]


def verify_layer(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    A_log: Tensor,
    dt_bias: Tensor,
    neg_eigval: bool = False,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    pending: Pending | None = None,
    pending_mixed: Tensor | None = None,
    prefix: Prefix | None = None,
    prefix_mixed: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_gate: Tensor | None = None,
    scale: float | None = None,
    strategy: str = "exact",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Factors]:
    """`specdec.ops.verify_layer`: the references of its parts, one after the other."""
    del strategy
    real = dtype or torch.float64
    B, N, C = mixed.shape
    _, HV, DV, DK = state.shape
    conv_pending = conv_prefix = None
    if pending is not None and pending_mixed is not None:
        conv_pending = ConvPending(pending_mixed, pending.path, pending.path_lengths)
    if prefix is not None and prefix_mixed is not None:
        conv_prefix = ConvPrefix(prefix_mixed, prefix.parents)
    y = conv_verify(
        mixed,
        conv_weight,
        conv_bias,
        conv_state=conv_state,
        pending=conv_pending,
        prefix=conv_prefix,
        slots=slots,
        parents=parents,
        lengths=lengths,
        dtype=real,
    )
    keys = (C - HV * DV) // 2
    q, k = (part.reshape(B, N, -1, DK) for part in (y[..., :keys], y[..., keys : 2 * keys]))  # [B, N, HK, DK]
    v = y[..., 2 * keys :].reshape(B, N, HV, DV)
    g, beta = gated_delta_gates_reference(a, b, A_log, dt_bias, neg_eigval)
    out, factors = verify(
        q,
        k,
        v,
        g.to(real),
        beta.to(real),
        state=state,
        pending=pending,
        prefix=prefix,
        scale=scale,
        qk_l2norm=True,
        slots=slots,
        parents=parents,
        lengths=lengths,
        dtype=real,
    )
    if norm_weight is not None:
        for row, _ in _rows(slots, B):  # padding stays zero
            nodes = slice(0, _length(lengths, row, N))
            gate = None if norm_gate is None else norm_gate[row, nodes]
            out[row, nodes] = rms_norm_reference(out[row, nodes], norm_weight, norm_eps, gate).to(real)
    if dtype is None:
        out, factors = out.to(mixed.dtype), Factors(*(t.float() for t in factors if t is not None))
    return out, factors


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    state: Tensor,
    slots: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`specdec.ops.prefill`: a chain that is verified and committed whole, one sequence at a time."""
    real = dtype or torch.float64
    B = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    out = torch.zeros(v.shape, dtype=real, device=v.device)
    for b, slot in _rows(slots, B):
        if cu_seqlens is None:
            row, begin, end = b, 0, _length(lengths, b, q.shape[1])
        else:
            row, begin, end = 0, int(cu_seqlens[b]), int(cu_seqlens[b + 1])
        span = (slice(row, row + 1), slice(begin, end))
        only = state[slot : slot + 1]
        out[span], factors = verify(
            q[span],
            k[span],
            v[span],
            None if g is None else g[span],
            None if beta is None else beta[span],
            state=only,
            scale=scale,
            qk_l2norm=qk_l2norm,
            dtype=real,
        )
        commit(only, factors, dtype=real)
    return out.to(v.dtype) if dtype is None else out


def _rows(slots: Tensor | None, B: int) -> list[tuple[int, int]]:
    """(row, slot) of every row that is not padding."""
    pairs = enumerate(range(B) if slots is None else slots.tolist())
    return [(b, slot) for b, slot in pairs if slot >= 0]


def _length(lengths: Tensor | None, b: int, most: int) -> int:
    return most if lengths is None else min(max(int(lengths[b]), 0), most)


def _path(path: Tensor | None, path_lengths: Tensor | None, b: int, nodes: int) -> list[int]:
    whole = list(range(nodes)) if path is None else path[b].tolist()
    return whole[: _length(path_lengths, b, len(whole))]


def _parent(parents: Tensor | None, b: int, i: int, first: int) -> int:
    """Parent of new node `i`, where `first` nodes come before the new ones."""
    return first + i - 1 if parents is None else int(parents[b, i])


def _parent_state(
    nodes: list[Tensor], root: Tensor, parents: Tensor | None, b: int, i: int, first: int
) -> Tensor:
    p = _parent(parents, b, i, first)
    return root if p < 0 else nodes[p]


def _parent_inputs(
    nodes: list[list[Tensor]], root: list[Tensor], parents: Tensor | None, b: int, i: int, first: int
) -> list[Tensor]:
    p = _parent(parents, b, i, first)
    return root if p < 0 else nodes[p]


def _normalise(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6): the epsilon is inside the root, as public Gated DeltaNet code has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _per_value_head(x: Tensor, HV: int) -> Tensor:
    """[HK, DK] -> [HV, DK]: value head h reads key head h // (HV / HK)."""
    return x.repeat_interleave(HV // x.shape[0], dim=0)


def _read(S: Tensor, x: Tensor) -> Tensor:
    """S x for every value head: [HV, DV, DK] and [HV, DK] -> [HV, DV]."""
    return (S @ x[:, :, None])[:, :, 0]


def _outer(u: Tensor, k: Tensor) -> Tensor:
    """u k^T for every value head: [HV, DV] and [HV, DK] -> [HV, DV, DK]."""
    return u[:, :, None] * k[:, None, :]


def _decay(S: Tensor, g: Tensor) -> Tensor:
    """a S with the gate [HV] per head or [HV, DK] per key channel."""
    a = g.exp()
    return S * (a[:, None, None] if a.dim() == 1 else a[:, None, :])


def _advance(S: Tensor, factors: Factors, b: int, i: int, dtype: torch.dtype) -> Tensor:
    """One step from a node's factors."""
    if factors.g is not None:
        S = _decay(S, factors.g[b, i].to(dtype))
    key = _per_value_head(factors.k[b, i].to(dtype), S.shape[0])
    return S + _outer(factors.u[b, i].to(dtype), key)
