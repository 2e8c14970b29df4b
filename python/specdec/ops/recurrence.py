"""Verification, commits and prefill of the linear recurrences: thin wrappers, all argument checks are in C++.

Letters: B rows, N new nodes, HK key heads, HV value heads (HV % HK == 0, value head h reads key head
h // (HV / HK)), DK key width in {32, 64, 96, 128, 192, 256}, DV value width (a multiple of 32 up to 512), S
slots. The recurrence follows from what is given: `g` None, per head or per key channel, and `beta` None
(additive) or given (delta rule).

    S_i = a_i S_p + u_i k_i^T    u_i = beta_i (v_i - a_i S_p k_i)  (additive: v_i)    o_i = S_i q_i
"""

from __future__ import annotations

from torch import Tensor

from specdec._checks import shown
from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._earlier import NO_PREFIX, pending_operands, prefix_operands
from specdec.ops._load import cpu_isa
from specdec.ops._operator import code_of, operator, want_type
from specdec.ops.strategy import GPU, STRATEGIES, resolve, resolve_shapes
from specdec.ops.types import Factors, Pending, Prefix

_verify = operator("verify")
_verify_deferred = operator("verify_deferred")
_commit = operator("commit")
_prefill = operator("prefill")

_STRATEGY_CODES = {"serial": 0, "hybrid": 1, "solve": 2}  # specdec::Strategy
_ISA = cpu_isa()
_PRECISION_CODES = {"ieee": 0, "tf32x3": 1, "tf32": 2, "bf16": 3}  # specdec::Precision
_SOLVE = _STRATEGY_CODES["solve"]
_COMMIT_MODES = {"exact": 0, "fast": 1}  # specdec::CommitMode


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
) -> tuple[Tensor, Factors]:
    """Runs a chain or a tree of candidate tokens through the recurrence; the durable state is not touched.

    With `pending` the accepted path of the previous round is first folded into the state, which is written
    once (a deferred commit). With `prefix` the new nodes hang below nodes that were verified before. Serial
    and hybrid verification give every node the bits that decoding its path token by token gives, a float32
    state assumed (`docs/architecture.md`, "The step, to the bit").

    Args:
        q: [B, N, HK, DK], float32, bfloat16 or float16, last dimension contiguous.
        k: [B, N, HK, DK], dtype of q, last dimension contiguous.
        v: [B, N, HV, DV], dtype of q, last dimension contiguous.
        g: float32 log-decay [B, N, HV] or [B, N, HV, DK], or None for no decay.
        beta: float32 write strength [B, N, HV] (delta rule), or None (additive).
        state: [S, HV, DV, DK] float32 or bfloat16, each slot contiguous. Written only where `pending` is
            given.
        slots: int32 [B], the slot of every row, distinct; negative rows are padding. None: row b uses slot b,
            S == B.
        parents: int32 [B, N] with parents[i] < i and -1 for a root; None for a chain. With a prefix of NP
            nodes the ids are 0..NP-1 for the prefix and NP + i for new node i, and None is a chain that
            continues at NP-1.
        lengths: int32 [B], valid new nodes, clamped to [0, N]; None for all N. With 0 nothing is computed for
            the row and, without `pending`, nothing read.
        pending: accepted path of the previous round, same rows and slots as this call. It is folded in
            whatever `lengths` says, as its own `path_lengths` says: 0 there leaves the slot as it is.
        prefix: nodes verified already from the same committed state; not together with `pending` or "solve".
        scale: multiplies q; None for DK ** -0.5.
        qk_l2norm: q and k become x * rsqrt(sum x^2 + 1e-6) first.
        strategy: "serial", "hybrid", "solve", "exact" (the faster of the first two) or "auto" (the fastest).
        precision: "ieee", float32 arithmetic, is that of serial and hybrid, and the only one on a CPU. On a
            GPU, solve multiplies on tensor cores: "tf32x3" (as accurate as float32), "tf32" or "bf16"; with
            "ieee", "exact" and "auto" do not choose it. "auto" is "ieee", or "tf32x3" where a GPU solves.

    Returns:
        `out` [B, N, HV, DV] in v's dtype, and the `Factors` of the new nodes. Rows beyond `lengths` and of
        negative slots are zero in all of them.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, a tensor that is written
            shares memory with one that is read, or an input requires grad in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.

    Example:
        >>> state = torch.zeros(1, 2, 32, 32)
        >>> q, k, v = torch.randn(3, 1, 4, 2, 32)
        >>> out, factors = verify(q, k, v, beta=torch.full((1, 4, 2), 0.5), state=state, qk_l2norm=True)
        >>> commit(state, factors, path_lengths=torch.tensor([3], dtype=torch.int32))  # 3 accepted
    """
    gpu = on_gpu(q)
    exact = prefix is not None or (gpu and precision == "ieee")  # neither goes with solve there
    code = _strategy_code(strategy, q, v, gpu, tree=parents is not None, exact=exact)
    if precision == "auto":
        rounding = 1 if gpu and code == _SOLVE else 0
    else:
        rounding = _precision_code(precision, strategy, code, gpu)
    head = (q, k, v, g, beta, state, slots, parents, lengths)
    if pending is not None:
        earlier = pending_operands(pending, prefix)
        out, fk, fu, fg = _verify_deferred(*head, *earlier, scale, qk_l2norm, code, rounding)
    else:
        nodes = NO_PREFIX if prefix is None else prefix_operands(prefix)
        out, fk, fu, fg = _verify(*head, *nodes, scale, qk_l2norm, code, rounding)
    return out, Factors(fk, fu, None if g is None else fg)


def commit(
    state: Tensor,
    factors: Factors,
    path: Tensor | None = None,
    path_lengths: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    mode: str = "exact",
) -> None:
    """Advances the state, in place, along an accepted path: `S <- a S + u k^T` for every node of it.

    Args:
        state: [S, HV, DV, DK] float32 or bfloat16, each slot contiguous.
        factors: of N nodes, contiguous, as `verify` returned them.
        path: int32 [B, P], node indices from root to leaf; None for 0, 1, 2, ... That they exist and ascend
            is checked; that each is the parent of the next is up to the caller (`check_path`).
        path_lengths: int32 [B], clamped to [0, P]; None for all. 0 leaves the slot as it is, bit for bit.
        slots: int32 [B], distinct; negative rows are padding. None: row b uses slot b, S == B.
        mode: "exact" applies the factors in token order with the decode step's own operations, "fast" as one
            small matrix product (bounded drift).

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, a tensor that is written
            shares memory with one that is read, or an input requires grad in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.
    """
    code = code_of("mode", mode, _COMMIT_MODES)
    want_type("factors", factors, Factors)
    _commit(state, *factors, path, path_lengths, slots, code)


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
    precision: str = "auto",
) -> Tensor:
    """Runs whole sequences through the recurrence, chunk by chunk, and writes the state.

    The state of every slot is read (it may be non-zero), advanced and written. The rounding is not that of
    decoding token by token: the same mathematics in another order.

    Args:
        q, k, v, g, beta, scale, qk_l2norm: as in `verify`, with T tokens in place of N nodes: padded [B, T,
            ...], or packed [1, T, ...] with `cu_seqlens`.
        state: [S, HV, DV, DK] float32 or bfloat16, each slot contiguous.
        slots: int32 [B], distinct; negative rows are padding. None: sequence b uses slot b, S == B.
        lengths: int32 [B], padded form only, clamped to [0, T]; None for all T.
        cu_seqlens: int32 [B + 1], packed form: sequence b is tokens cu_seqlens[b] to cu_seqlens[b + 1].
        precision: of the matrix products, as that of solve in `verify`.

    Returns:
        [B, T, HV, DV] or [1, T, HV, DV] in v's dtype; padding is zero.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, a tensor that is written
            shares memory with one that is read, or an input requires grad in grad mode. Nothing was written.
        TypeError: an argument has the wrong type. Nothing was written.
    """
    gpu = on_gpu(q)
    rounding = int(gpu) if precision == "auto" else _precision_code(precision, "solve", _SOLVE, gpu)
    out: Tensor = _prefill(q, k, v, g, beta, state, slots, lengths, cu_seqlens, scale, qk_l2norm, rounding)
    return out


def on_gpu(q: Tensor) -> bool:
    """Do the kernels of a GPU run the call?"""
    return isinstance(q, Tensor) and q.is_cuda


def _precision_code(precision: str, strategy: str, code: int, gpu: bool) -> int:
    """The operator's number for a precision that the caller chose."""
    known = _PRECISION_CODES.get(precision) if isinstance(precision, str) else None
    if not gpu:
        if known != 0:
            raise ValueError(
                f"precision: got {shown(precision)}, want 'ieee' (the only one on a CPU) or 'auto'"
            )
        return 0
    if known is None:
        raise ValueError(
            f"precision: got {shown(precision)}, want 'ieee', 'tf32x3', 'tf32', 'bf16' or 'auto'"
        )
    if code == _SOLVE and known == 0:
        raise ValueError("precision: got 'ieee' with tensor cores, want 'tf32x3', 'tf32', 'bf16' or 'auto'")
    if code != _SOLVE and known != 0:
        if strategy != "auto":
            raise ValueError(
                f"precision: got {shown(precision)} with strategy {shown(strategy)}, want 'ieee' or 'auto'"
            )
        return 0  # `auto` would have solved in it
    return known


def _strategy_code(strategy: str, q: Tensor, v: Tensor, gpu: bool, *, tree: bool, exact: bool) -> int:
    """The operator's number for the strategy, which the measured table may have to choose for this call."""
    if strategy not in STRATEGIES:
        isa = GPU if gpu else _ISA
        if not isinstance(q, Tensor) or not isinstance(v, Tensor) or q.dim() != 4 or v.dim() != 4:
            strategy = resolve(strategy, isa, 0, 0, 0, 0, 0, tree, exact)  # the operator refuses q or v
        else:
            strategy = resolve_shapes(strategy, isa, q.shape, v.shape, tree, exact)
    return _STRATEGY_CODES[strategy]
