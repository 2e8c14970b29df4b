"""The operators as torch sees them: opcheck, and torch.compile without graph breaks equals eager."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.cases import int32, random_case, random_factors, random_parents
from specdec import ops
from specdec.ops import Factors, Pending, Prefix

OPS = torch.ops.specdec
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL = (*QUICK, "test_aot_dispatch_dynamic")  # traces each op: seconds a call, so for one gate only


def plain(**options: Any) -> tuple[Any, ...]:
    """Case with nothing poisoned: opcheck compares whole tensors."""
    case = random_case(1, B=2, N=4, padding=False, ragged=False, poison=False, **options)
    case.state.nan_to_num_(0.0)
    return case, [None if t is None else t.contiguous() for t in case.tokens]


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_opcheck_recurrence(gate) -> None:
    case, tokens = plain(gate=gate, dtype=torch.float32 if gate == "head" else torch.bfloat16)
    rng = torch.Generator().manual_seed(2)
    factors = random_factors(rng, 2, 3, 2, 4, 32, 64, gate)
    head = (*tokens, case.state, case.slots)
    lengths, tail = int32([4, 2]), (None, True, 0, 0)
    check, checks = torch.library.opcheck, ALL if gate == "head" else QUICK
    check(OPS.verify.default, (*head, None, None, None, None, None, None, *tail), test_utils=checks)
    check(
        OPS.verify.default,
        (*head, random_parents(rng, 2, 4, 3), lengths, *factors, random_parents(rng, 2, 3), 0.5, False, 1, 0),
        test_utils=checks,
    )
    check(OPS.verify_deferred.default, (*head, None, lengths, *factors, None, None, *tail), test_utils=checks)
    check(
        OPS.verify_deferred.default,
        (*head, case.parents, None, *factors, int32([[0, 2], [1, 2]]), int32([2, 1]), *tail),
        test_utils=checks,
    )
    check(OPS.commit.default, (case.state, *factors, None, None, case.slots, 0), test_utils=checks)
    path = (int32([[0, 2], [1, 2]]), int32([0, 2]))
    check(OPS.commit.default, (case.state, *factors, *path, case.slots, 1), test_utils=checks)
    check(OPS.prefill.default, (*head, lengths, None, None, True, 0), test_utils=checks)


@pytest.mark.parametrize(("dtype", "checks"), [(torch.float32, ALL), (torch.float16, QUICK)], ids=str)
def test_opcheck_convolution(dtype: torch.dtype, checks: tuple[str, ...]) -> None:
    x, state = torch.randn(2, 4, 8).to(dtype), torch.randn(3, 3, 8).to(dtype)
    weight, slots, lengths = torch.randn(8, 4), int32([2, 0]), int32([4, 1])
    parents = int32([[-1, 0, 0, 2]] * 2)
    check = torch.library.opcheck
    head = (x, weight, None, state, slots)
    check(OPS.conv_verify.default, (*head, parents, lengths, None, None, 1), test_utils=checks)
    below = int32([[1, 4, 0, 5]] * 2)
    check(OPS.conv_verify.default, (*head, below, None, x, parents, 0), test_utils=checks)
    path = int32([[0, 2, 3]] * 2)
    deferred = (x, weight, torch.randn(8), state, slots, parents, None, x, path, int32([3, 1]), 1)
    check(OPS.conv_verify_deferred.default, deferred, test_utils=checks)
    check(OPS.conv_commit.default, (state, x, path, None, slots), test_utils=checks)


class Rounds(torch.nn.Module):
    """Verify, commit a path, then a round whose commit is deferred, then drafting below a prefix."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        how = {"state": state, "qk_l2norm": True, "strategy": "exact"}
        lengths = torch.full((q.shape[0],), 2, dtype=torch.int32)
        first, factors = ops.verify(q, k, v, g, beta, **how)
        ops.commit(state, factors, None, lengths)
        second, factors = ops.verify(q * 2, k, v, g, beta, pending=Pending(factors, None, lengths), **how)
        third, _ = ops.verify(q * 3, k, v, g, beta, prefix=Prefix(factors), **how)
        ops.commit(state, Factors(factors.k, factors.u * 0.5, factors.g))
        return first + second.sin() + third


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", None), ("aot_eager", True), ("inductor", None)]
)
def test_compile(backend: str, dynamic: bool | None) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a compiler")
    case, tokens = plain()
    eager_state, compiled_state = case.state[:2].clone(), case.state[:2].clone()
    want = Rounds()(*tokens, eager_state)
    out = torch.compile(Rounds(), fullgraph=True, backend=backend, dynamic=dynamic)(*tokens, compiled_state)
    assert torch.equal(compiled_state, eager_state)
    # Inductor's own sine is not eager's to the last bit; the operators' results are.
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


def test_compile_with_a_scale_that_changes() -> None:
    """Dynamo makes a float symbolic once its value changes."""
    case, tokens = plain()

    def run(scale: float, weight: Tensor) -> Tensor:
        out, _ = ops.verify(*tokens, state=case.state, slots=case.slots, scale=scale, strategy="serial")
        return ops.rms_norm(out.float(), weight, scale)

    weight = torch.ones(64)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for scale in (0.5, 0.7, 0.9):
        assert torch.equal(compiled(scale, weight), run(scale, weight))


def test_meta_shapes() -> None:
    """The fakes answer for tensors without data, in every dtype, also without gate."""
    meta = torch.device("meta")
    q, v = (torch.empty(2, 5, h, 64, dtype=torch.bfloat16, device=meta) for h in (2, 4))
    state = torch.empty(2, 4, 64, 64, device=meta)
    out, factors = ops.verify(q, q, v, state=state)
    assert (out.shape, out.dtype) == (v.shape, torch.bfloat16)
    assert (factors.k.shape, factors.k.dtype) == (q.shape, torch.float32)
    assert factors.g is None
    with pytest.raises(ValueError, match="k: got a tensor on cpu, want meta"):
        ops.commit(state, Factors(*(torch.empty(t.shape) for t in factors[:2])))
