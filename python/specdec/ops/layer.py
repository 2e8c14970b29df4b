"""A Gated DeltaNet layer between its projections, in one call (Yang et al., 2024, arXiv:2412.06464).

What `conv_verify`, `gated_delta_gates`, `verify` and `rms_norm` do one after the other, with the same bits. A
thin wrapper: every check of an argument is in C++. Letters as in `specdec.ops.recurrence` and
`specdec.ops.convolution`.
"""

from __future__ import annotations

from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._earlier import NO_PREFIX, pending_operands, prefix_operands, want_earlier
from specdec.ops._load import cpu_isa
from specdec.ops._operator import code_of, operator, want_tensor
from specdec.ops.strategy import resolve_shapes
from specdec.ops.types import Factors, Pending, Prefix

_verify_layer = operator("verify_layer")
_verify_layer_deferred = operator("verify_layer_deferred")

_STRATEGY_CODES = {"serial": 0, "hybrid": 1, "exact": -1}  # specdec::Strategy; -1: from the measured table
_ISA = cpu_isa()


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
) -> tuple[Tensor, Factors]:
    """Verifies a chain or a tree from a layer's raw projections: short convolution with SiLU, gates,
    normalised q and k, the gated delta rule and, where `norm_weight` is given, the norm of every head.

    The same bits as this, with one pass over the work and nothing between the parts but what they share:

        y = conv_verify(mixed, conv_weight, conv_bias, conv_state=conv_state, ...)      # q, k, v by channels
        g, beta = gated_delta_gates(a, b, A_log, dt_bias, neg_eigval)
        out, factors = verify(q, k, v, g, beta, state=state, qk_l2norm=True, ...)
        out = rms_norm(out, norm_weight, norm_eps, norm_gate)

    On a GPU, DK is 64, 128 or 256 and W at most 4; gates and norm are float32 arithmetic of its own.

    Args:
        mixed: [B, N, C] raw projections, float32, bfloat16 or float16, channels contiguous: all heads of q,
            then of k, then of v, so C = 2 HK DK + HV DV. HV, DV and DK are those of `state`, HK is what is
            left. They are the factors of the convolution.
        a: [B, N, HV], dtype of mixed, last dimension contiguous: makes g, `gated_delta_gates`.
        b: [B, N, HV], as a: makes beta.
        conv_weight: float32 [C, W] contiguous, the newest input last.
        conv_bias: float32 [C], or None.
        A_log: float32 [HV].
        dt_bias: float32 [HV].
        neg_eigval: doubles beta.
        conv_state: [S, W-1, C], oldest row first, dtype of mixed or float32, each slot contiguous. Written
            only where `pending` is given.
        state: [S, HV, DV, DK] float32 or bfloat16, each slot contiguous. Written only where `pending` is
            given.
        slots, parents, lengths: as in `verify`.
        pending: accepted path of the previous round, as in `verify`: it moves state and window, once.
        pending_mixed: [B, NP, C] that round's raw projections, in this call's dtype; with `pending` alone.
        prefix: nodes verified already and not committed, as in `verify`; not together with `pending`.
        prefix_mixed: [B, NP, C] their raw projections; with `prefix` alone.
        norm_weight: float32 [DV], or None for outputs as `verify` gives them.
        norm_eps: added to the mean square.
        norm_gate: [B, N, HV, DV], dtype of mixed, last dimension contiguous, or None; with `norm_weight`
            alone.
        scale: multiplies q; None for DK ** -0.5.
        strategy: "serial", "hybrid" or "exact", the faster of the two. A GPU has one kernel for all of them.

    Returns:
        `out` [B, N, HV, DV] in the dtype of mixed, and the `Factors` of the new nodes; their g is float32 [B,
        N, HV]. Rows beyond `lengths` and of negative slots are zero in all of them.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, a tensor that is written
            shares memory with one that is read, or an input requires grad in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.

    Example:
        >>> state, window = torch.zeros(1, 2, 32, 32), torch.zeros(1, 3, 128)  # HK = 1: C = 2 * 32 + 2 * 32
        >>> mixed, a, b = torch.randn(1, 5, 128), torch.randn(1, 5, 2), torch.randn(1, 5, 2)
        >>> layer = {"conv_weight": torch.randn(128, 4), "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
        >>> out, factors = verify_layer(mixed, a, b, **layer, conv_state=window, state=state)
        >>> accepted = Pending(factors, None, torch.tensor([3], dtype=torch.int32))
        >>> out, factors = verify_layer(
        ...     mixed, a, b, **layer, conv_state=window, state=state, pending=accepted, pending_mixed=mixed
        ... )
    """
    code = strategy_code(strategy, mixed, state, parents is not None, prefix is not None)
    tokens = (mixed, a, b, conv_weight, conv_bias, A_log, dt_bias, neg_eigval)
    head = (*tokens, conv_state, state, slots, parents, lengths)
    tail = (norm_weight, norm_eps, norm_gate, scale, code)
    want_earlier(pending, pending_mixed, prefix, prefix_mixed)
    if pending is not None:
        earlier = pending_operands(pending, prefix)
        want_tensor("pending_mixed", pending_mixed)
        out, fk, fu, fg = _verify_layer_deferred(*head, *earlier, pending_mixed, *tail)
    else:
        earlier_nodes = NO_PREFIX if prefix is None else prefix_operands(prefix)
        out, fk, fu, fg = _verify_layer(*head, *earlier_nodes, prefix_mixed, *tail)
    return out, Factors(fk, fu, fg)


def strategy_code(strategy: str, rows: Tensor, state: Tensor, tree: bool, prefix: bool) -> int:
    """The operator's number of a strategy, "exact" looked up in the measured table.

    Args:
        strategy: "serial", "hybrid" or "exact".
        rows: [B, N, ...].
        state: [S, HV, DV, DK].
        tree: whether the nodes are no chains.
        prefix: whether they continue others.

    Raises:
        ValueError: there is no such strategy.
    """
    code = code_of("strategy", strategy, _STRATEGY_CODES)
    if code >= 0:
        return code
    # Anything for a GPU and for shapes that the operator refuses.
    if not isinstance(rows, Tensor) or not isinstance(state, Tensor) or rows.dim() < 2 or state.dim() != 4:
        return 0
    if rows.is_cuda or rows.shape[1] <= 1:  # a single node is a step with every strategy
        return 0
    (B, N), (_, HV, DV, DK) = rows.shape[:2], state.shape
    return _STRATEGY_CODES[resolve_shapes("exact", _ISA, (B, N, 1, DK), (B, N, HV, DV), tree, prefix)]
