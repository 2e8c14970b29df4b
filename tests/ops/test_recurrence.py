"""verify, commit and prefill against the float64 reference, for every backend and strategy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.backends import BACKENDS, PAIRS, PRECISIONS, Backend
from ops.cases import (
    NAN,
    RECURRENCES,
    Case,
    assert_close,
    bits,
    int32,
    random_case,
    random_factors,
    random_parents,
    random_path,
    tolerance,
)
from specdec.ops import Factors, Pending, Prefix, reference

pairs = pytest.mark.parametrize(("backend", "strategy"), PAIRS)
backends = pytest.mark.parametrize("backend", BACKENDS)
recurrences = pytest.mark.parametrize(("gate", "update"), RECURRENCES)
# Of the factors of a product on tensor cores: 10 and 7 bits behind the point. tf32x3 splits them: no loss.
FACTOR_EPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}


def check_verify(
    backend: Backend,
    case: Case,
    strategy: str = "serial",
    *,
    pending: Pending | None = None,
    prefix: Prefix | None = None,
    precision: str = "auto",
) -> tuple[Tensor, Factors]:
    """One call against the reference: out, factors, and the state, which only `pending` may move."""
    state, expected_state = case.state.clone(), case.state.clone()
    out, factors = backend.verify(
        *case.tokens,
        state=state,
        pending=pending,
        prefix=prefix,
        strategy=strategy,
        precision=precision,
        **case.kwargs(),
    )
    want, want_factors = reference.verify(
        *case.tokens,
        state=expected_state,
        pending=pending,
        prefix=prefix,
        dtype=torch.float64,
        **case.kwargs(),
    )
    steps = case.q.shape[1]
    if pending is not None:
        steps += pending.factors.k.shape[1]
    if prefix is not None:
        steps += prefix.factors.k.shape[1]
    DK = case.q.shape[-1]
    scale = 1.0 if case.scale is None else abs(case.scale)
    products = FACTOR_EPS.get(precision, 0.0)
    out_atol = tolerance(case.v.dtype, steps, DK, want, case.state, products) * max(1.0, scale)
    assert out.dtype == case.v.dtype
    assert out.is_contiguous()
    assert_close(out, want, out_atol, "out")
    assert factors.k.dtype == factors.u.dtype == torch.float32
    assert_close(factors.k, want_factors.k, tolerance(torch.float32, 1, DK, want_factors.k), "factors.k")
    u_atol = tolerance(torch.float32, steps, DK, want_factors.u, case.state, products)
    assert_close(factors.u, want_factors.u, u_atol, "factors.u")
    if case.g is None:
        assert factors.g is None
    else:
        assert factors.g is not None
        assert want_factors.g is not None
        assert torch.equal(factors.g, want_factors.g.float())
    if pending is None:
        assert torch.equal(state.nan_to_num(7.0), case.state.nan_to_num(7.0)), "state: written"
    else:
        check_state(state, expected_state, steps, DK)
    return out, factors


def check_state(actual: Tensor, expected: Tensor, steps: int, DK: int, factor_eps: float = 0.0) -> None:
    """Slots that no row names keep their NaN; the others agree."""
    assert torch.equal(actual.isnan(), expected.isnan()), "state: NaN where there was none, or the reverse"
    atol = tolerance(actual.dtype, steps, DK, expected, expected, factor_eps)
    assert_close(actual.nan_to_num(0.0), expected.nan_to_num(0.0), atol, "state")


def test_fresh_memory_is_poisoned() -> None:
    assert (torch.empty(64, 64) != 0).all(), "outputs that are never written would pass as zeros"


@pairs
@recurrences
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_verify(backend: Backend, strategy: str, gate, update, tree: bool) -> None:
    check_verify(backend, random_case(1, B=4, N=11, gate=gate, update=update, tree=tree), strategy)


@pytest.mark.parametrize(("backend", "precision"), PRECISIONS)
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_precisions(backend: Backend, precision: str, gate) -> None:
    """Of tensor cores: solve with and without a pending path, and prefill."""
    case = random_case(35, B=2, N=21, gate=gate, padding=False)
    factors = random_factors(torch.Generator().manual_seed(36), 2, 3, 2, 4, 32, 64, gate)
    for pending in (None, Pending(factors)):
        check_verify(backend, case, "solve", pending=pending, precision=precision)
    check_prefill(backend, case, precision, lengths=case.lengths)


@pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(backend: Backend, strategy: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    check_verify(backend, random_case(2, N=7, dtype=dtype, state_dtype=state_dtype), strategy)


@pairs
@pytest.mark.parametrize(
    ("DK", "DV"), [(32, 32), (64, 512), (96, 160), (128, 128), (192, 96), (256, 256), (32, 448)]
)
def test_widths(backend: Backend, strategy: str, DK: int, DV: int) -> None:
    check_verify(backend, random_case(3, B=2, N=5, HK=1, HV=2, DK=DK, DV=DV), strategy)


@pairs
@pytest.mark.parametrize(("HK", "HV"), [(1, 1), (1, 5), (3, 3), (2, 6)])
def test_grouped_heads(backend: Backend, strategy: str, HK: int, HV: int) -> None:
    check_verify(backend, random_case(4, HK=HK, HV=HV, gate="channel"), strategy)


@pairs
@pytest.mark.parametrize("N", [1, 2, 17, 64])
def test_lengths_of_calls(backend: Backend, strategy: str, N: int) -> None:
    check_verify(backend, random_case(5, N=N), strategy)


@pairs
@pytest.mark.parametrize("shape", ["star", "forest", "comb"])
def test_tree_shapes(backend: Backend, strategy: str, shape: str) -> None:
    N = 13
    rows = {
        "star": [-1] + [0] * (N - 1),
        "forest": [-1] * N,
        "comb": [i - 1 if i % 2 == 0 else max(i - 2, 0) if i > 1 else 0 for i in range(N)],
    }[shape]
    rows[0] = -1
    case = random_case(6, B=2, N=N, tree=False, ragged=False, padding=False)
    check_verify(backend, case.changed(parents=int32([rows, rows])), strategy)


@pairs
def test_scale_and_no_norm(backend: Backend, strategy: str) -> None:
    case = random_case(7)
    check_verify(backend, case.changed(scale=1.7, qk_l2norm=False), strategy)
    check_verify(backend, case.changed(scale=1.0, qk_l2norm=True), strategy)


@pairs
def test_defaults(backend: Backend, strategy: str) -> None:
    """No slots, no lengths, no parents: row b is slot b, all nodes, a chain."""
    case = random_case(8, B=2, ragged=False, padding=False, tree=False, poison=False)
    check_verify(backend, case.changed(slots=None, state=case.state[:2]), strategy)


@pairs
def test_empty_calls(backend: Backend, strategy: str) -> None:
    case = random_case(9, B=2, ragged=False, padding=False)
    state = case.state.clone()
    for rows, nodes in ((0, 9), (2, 0)):
        out, factors = backend.verify(
            *case.pick(slice(rows), slice(nodes)), state=state, slots=case.slots[:rows], strategy=strategy
        )
        assert out.shape == (rows, nodes, 4, 64)
        assert factors.u.shape == out.shape
    all_padding = case.changed(slots=int32([-1, -7]))
    out, _ = check_verify(backend, all_padding, strategy)
    assert (out == 0).all()
    check_verify(backend, case.changed(lengths=int32([-5, 99])), strategy)  # clamped to [0, N]


@pairs
@recurrences
def test_pending(backend: Backend, strategy: str, gate, update) -> None:
    case = random_case(10, B=4, N=6, gate=gate, update=update)
    rng = torch.Generator().manual_seed(11)
    factors = random_factors(rng, 4, 5, 2, 4, 32, 64, gate)
    path, path_lengths = random_path(rng, 4, 5)
    path_lengths[2] = 0
    path[0] = 1 << 30  # the padding row
    check_verify(backend, case, strategy, pending=Pending(factors, path, path_lengths))
    check_verify(backend, case, strategy, pending=Pending(factors, None, path_lengths))
    check_verify(backend, case, strategy, pending=Pending(factors))


@pairs
def test_pending_before_no_tokens(backend: Backend, strategy: str) -> None:
    """A round without nodes still folds the pending path."""
    case = random_case(12, B=2, N=3, padding=False).changed(lengths=int32([0, 0]))
    factors = random_factors(torch.Generator().manual_seed(13), 2, 4, 2, 4, 32, 64, "head")
    check_verify(backend, case, strategy, pending=Pending(factors))


@pairs
def test_no_new_nodes_still_settle_what_is_pending(backend: Backend, strategy: str) -> None:
    """Row 0 has a pending path and no new nodes, row 1 neither, row 2 new nodes and nothing pending."""
    rng = torch.Generator().manual_seed(5)
    rows, N, HK, HV, DK, DV, slots = 3, 3, 1, 2, 32, 64, int32([2, 0, 3])
    state = torch.randn(4, HV, DV, DK, generator=rng)
    state[0] = NAN  # neither read nor written
    made = random_factors(rng, rows, N, HK, HV, DK, DV, "head")
    counts, lengths = int32([2, 0, 0]), int32([0, 0, N])
    q, k, v = (torch.randn(rows, N, h, d, generator=rng) for h, d in ((HK, DK), (HK, DK), (HV, DV)))
    g, beta = -torch.rand(rows, N, HV, generator=rng), torch.rand(rows, N, HV, generator=rng)
    for t in (q, k, v, g, beta):
        t[:2] = NAN

    want = state.clone()
    backend.commit(want, made, None, counts, slots=slots)
    out, fresh = backend.verify(
        q, k, v, g, beta, state=state, slots=slots, lengths=lengths, strategy=strategy,
        pending=Pending(made, None, counts),
    )  # fmt: skip
    assert torch.equal(bits(state), bits(want))
    assert not torch.equal(state[2], torch.zeros_like(state[2]))
    assert all((t[:2] == 0).all() and (t[2] != 0).any() for t in (out, *fresh))


@pairs
@recurrences
def test_prefix(backend: Backend, strategy: str, gate, update) -> None:
    if strategy == "solve":
        pytest.skip("solve takes no prefix")
    rng = torch.Generator().manual_seed(14)
    case = random_case(15, B=3, N=6, gate=gate, update=update, tree=False)
    factors = random_factors(rng, 3, 5, 2, 4, 32, 64, gate)
    factors.u.mul_(0.1)
    check_verify(backend, case, strategy, prefix=Prefix(factors))
    parents = random_parents(rng, 3, 6, first=5)
    tree = Prefix(factors, random_parents(rng, 3, 5))
    check_verify(backend, case.changed(parents=parents), strategy, prefix=tree)
    check_verify(backend, case, strategy, prefix=tree)


@pairs
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("update", ["additive", "delta"])
def test_saturated(backend: Backend, strategy: str, gate, update) -> None:
    """Gates that erase, write strengths at both ends, keys and queries of zero: finite and right."""
    case = random_case(16, B=2, N=8, gate=gate, update=update, padding=False, ragged=False)
    assert case.g is not None
    for node, value in ((0, -80.0), (2, -1e4), (4, -math.inf), (5, 0.0)):
        case.g[:, node] = value
    if case.beta is not None:
        case.beta[:, 1] = 0.0
        case.beta[:, 2] = 1.0
    case.k[:, 3] = 0.0
    case.q[:, 6] = 0.0
    out, _ = check_verify(backend, case, strategy)
    assert out.isfinite().all()
    assert (out[:, 6] == 0).all()


@backends
@recurrences
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_commit(backend: Backend, gate, update, mode: str) -> None:
    case = random_case(17, B=4, N=1, gate=gate, update=update)
    rng = torch.Generator().manual_seed(18)
    factors = random_factors(rng, 4, 13, 2, 4, 32, 64, gate)
    path, lengths = random_path(rng, 4, 13)
    lengths[1], lengths[2] = 13, 0
    path[1] = torch.arange(13)
    path[0] = 1 << 30
    for how in ((path, lengths), (None, lengths), (path[:, :0], None), (None, None)):
        state, want = case.state.clone(), case.state.clone()
        backend.commit(state, factors, *how, slots=case.slots, mode=mode)
        reference.commit(want, factors, *how, slots=case.slots, dtype=torch.float64)
        check_state(state, want, 13, 32)
    state = case.state.clone()
    backend.commit(state, factors, None, torch.zeros(4, dtype=torch.int32), slots=case.slots, mode=mode)
    assert torch.equal(state.nan_to_num(7.0), case.state.nan_to_num(7.0)), (
        "a path of length 0 changed the state"
    )


@backends
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("DK", "DV"), [(32, 32), (96, 160), (192, 96), (256, 512)])
def test_commit_widths(backend: Backend, mode: str, state_dtype: torch.dtype, DK: int, DV: int) -> None:
    case = random_case(19, B=2, N=1, HK=1, HV=3, DK=DK, DV=DV, state_dtype=state_dtype, padding=False)
    factors = random_factors(torch.Generator().manual_seed(20), 2, 6, 1, 3, DK, DV, "head")
    state, want = case.state.clone(), case.state.double()
    backend.commit(state, factors, slots=case.slots, mode=mode)
    reference.commit(want, factors, slots=case.slots, dtype=torch.float64)
    check_state(state, want, 6, DK)


@backends
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_commit_saturated(backend: Backend, mode: str) -> None:
    case = random_case(21, B=1, N=1, padding=False)
    factors = random_factors(torch.Generator().manual_seed(22), 1, 5, 2, 4, 32, 64, "head")
    assert factors.g is not None
    factors.g[0, 1], factors.g[0, 3] = -1e4, -math.inf
    state, want = case.state.clone(), case.state.clone()
    backend.commit(state, factors, slots=case.slots, mode=mode)
    reference.commit(want, factors, slots=case.slots, dtype=torch.float64)
    check_state(state, want, 5, 32)


@backends
def test_strided_state(backend: Backend) -> None:
    """Only the slot stride is free: a layer's state as a slice of a pool of all layers."""
    case = random_case(23, B=2, padding=False)
    pool = torch.full((case.state.shape[0], 3, *case.state.shape[1:]), NAN)
    pool[:, 1] = case.state
    factors = random_factors(torch.Generator().manual_seed(24), 2, 4, 2, 4, 32, 64, "head")
    want = case.state.clone()
    backend.commit(pool[:, 1], factors, slots=case.slots)
    reference.commit(want, factors, slots=case.slots, dtype=torch.float64)
    check_state(pool[:, 1], want, 4, 32)
    assert pool[:, 0].isnan().all()
    assert pool[:, 2].isnan().all()


def check_prefill(backend: Backend, case: Case, precision: str | None = None, **how: Tensor | None) -> None:
    state, want_state = case.state.clone(), case.state.clone()
    common = {**case.kwargs("slots", "qk_l2norm", "scale"), **how}
    rounding = {} if precision is None else {"precision": precision}
    products = FACTOR_EPS.get(precision or "", 0.0)
    out = backend.prefill(*case.tokens, state=state, **rounding, **common)
    want = reference.prefill(*case.tokens, state=want_state, dtype=torch.float64, **common)
    T, DK = case.q.shape[1], case.q.shape[3]
    assert out.dtype == case.v.dtype
    assert_close(out, want, tolerance(case.v.dtype, T, DK, want, case.state, products), "out")
    check_state(state, want_state, T, DK, products)


@backends
@recurrences
@pytest.mark.parametrize("T", [1, 63, 130])
def test_prefill_padded(backend: Backend, gate, update, T: int) -> None:
    case = random_case(25, N=T, HK=1, HV=2, DV=32, gate=gate, update=update, tree=False)
    check_prefill(backend, case, lengths=case.lengths)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_dtypes(backend: Backend, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    case = random_case(26, N=70, HK=1, HV=2, tree=False, dtype=dtype, state_dtype=state_dtype)
    check_prefill(backend, case, lengths=case.lengths)


@backends
@recurrences
def test_prefill_packed(backend: Backend, gate, update) -> None:
    ends = int32([0, 5, 5, 70, 71, 100])
    rng_case = random_case(
        27, B=1, N=100, HK=1, HV=2, DV=32, gate=gate, update=update, tree=False, ragged=False, poison=False
    )
    state = torch.randn(7, 2, 32, 32, generator=torch.Generator().manual_seed(28))
    state[5] = NAN
    case = rng_case.changed(slots=int32([3, 0, 6, -1, 1]), state=state)
    for t in case.tokens:
        if t is not None:
            t[:, 70:71] = NAN  # the packed sequence of a padding slot
    check_prefill(backend, case, cu_seqlens=ends)


@backends
@pytest.mark.parametrize(("DK", "DV"), [(64, 512), (96, 160), (128, 128), (192, 64), (256, 256)])
def test_prefill_widths(backend: Backend, DK: int, DV: int) -> None:
    case = random_case(29, B=2, N=66, HK=1, HV=2, DK=DK, DV=DV, tree=False, padding=False)
    check_prefill(backend, case, lengths=case.lengths)


@backends
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_prefill_saturated(backend: Backend, gate) -> None:
    case = random_case(30, B=1, N=80, HK=1, HV=2, gate=gate, tree=False, ragged=False, padding=False)
    assert case.g is not None
    assert case.beta is not None
    for token, value in ((3, -80.0), (20, -1e4), (41, -math.inf), (42, -math.inf), (65, -80.0)):
        case.g[:, token] = value
    case.beta[:, 7], case.beta[:, 8] = 0.0, 1.0
    case.k[:, 9] = 0.0
    check_prefill(backend, case)


@backends
def test_prefill_empty(backend: Backend) -> None:
    case = random_case(31, B=2, N=4, tree=False, ragged=False, padding=False)
    state = case.state.clone()
    out = backend.prefill(*case.pick(slice(None), slice(0)), state=state, slots=case.slots)
    assert out.shape == (2, 0, 4, 64)
    out = backend.prefill(*case.tokens, state=state, slots=case.slots, lengths=int32([-1, 0]))
    assert (out == 0).all()
    assert torch.equal(state.nan_to_num(7.0), case.state.nan_to_num(7.0))
