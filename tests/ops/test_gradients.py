"""The operators are for inference: in grad mode they refuse an input that requires grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.ops import Factors, PackedWeight, Pending, pack_weight

B, N, HK, HV, DK, DV = 2, 3, 1, 2, 32, 64


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def verify_arguments() -> dict[str, Any]:
    tokens = {"q": f32(B, N, HK, DK), "k": f32(B, N, HK, DK), "v": f32(B, N, HV, DV)}
    return {**tokens, "g": -f32(B, N, HV), "beta": f32(B, N, HV), "state": f32(B, HV, DV, DK)}


PACKED = pack_weight(f32(6, 4))
PARAMETER = torch.nn.Parameter(f32(4))
WITH_GRAD = f32(2, 4).requires_grad_()
DENSE: list[tuple[str, Callable[[], Any]]] = [
    ("x", lambda: ops.linear(WITH_GRAD, PACKED)),
    ("residual", lambda: ops.linear(f32(2, 4), PACKED, residual=f32(2, 6).requires_grad_())),
    ("weight", lambda: ops.linear(f32(2, 4), PackedWeight(PACKED.data.clone().requires_grad_(), None, 4, 6))),
    ("norm_weight", lambda: ops.rms_norm_linear(f32(2, 4), PARAMETER, 1e-6, PACKED)),
    ("x", lambda: ops.swiglu_linear(f32(2, 8).requires_grad_(), PACKED)),
    ("weight", lambda: ops.rms_norm(f32(2, 4), PARAMETER, 1e-6)),
    ("gate", lambda: ops.rms_norm(f32(2, 4), f32(4), 1e-6, WITH_GRAD)),
    ("x", lambda: ops.swiglu(WITH_GRAD)),
    ("A_log", lambda: ops.gated_delta_gates(f32(2, 4), f32(2, 4), PARAMETER, f32(4))),
]


@pytest.mark.parametrize(("name", "call"), DENSE)
def test_dense_ops_refuse_gradients(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name}: got a tensor that requires grad, want inference: .*no_gr"
    ):
        call()
    with torch.no_grad():
        without = call()
    with torch.inference_mode():
        inference = call()
    pairs = [(without, inference)] if isinstance(without, Tensor) else zip(without, inference, strict=True)
    for a, b in pairs:
        assert torch.equal(a, b)
        assert not a.requires_grad
        assert not b.requires_grad


@pytest.mark.parametrize("name", ["q", "beta", "state"])
def test_verify_refuses_gradients(name: str) -> None:
    arguments = verify_arguments()
    arguments[name] = arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: got a tensor that requires grad"):
        ops.verify(**arguments)
    with torch.no_grad():
        out, _ = ops.verify(**arguments)
    assert not out.requires_grad
    factors = Factors(f32(B, N, HK, DK), f32(B, N, HV, DV).requires_grad_(), f32(B, N, HV))
    with pytest.raises(ValueError, match=r"^pending.factors.u: got a tensor that requires grad"):
        ops.verify(**verify_arguments(), pending=Pending(factors))


def test_compiled_code_refuses_gradients() -> None:
    """Compiled code would run its forward without grad mode: the check has to be part of what is traced."""

    @torch.compile(backend="aot_eager")
    def norm(x: Tensor) -> Tensor:
        return ops.rms_norm(x, PARAMETER, 1e-6)

    with pytest.raises(Exception, match="weight: got a tensor that requires grad"):
        norm(f32(2, 4))
    with torch.no_grad():
        assert torch.equal(norm(f32(2, 4)), ops.rms_norm(f32(2, 4), PARAMETER, 1e-6))
