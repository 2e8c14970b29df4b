"""The operators against Hugging Face's Gated DeltaNet functions, which share nothing with this project."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import BACKENDS, Backend
from ops.cases import assert_close, random_case, tolerance

pytest.importorskip("transformers")


def peer(name: str) -> Any:
    for model in ("qwen3_5", "qwen3_next"):
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ImportError:
            continue
        if hasattr(module, name):
            function = getattr(module, name)
            return getattr(function, "__wrapped__", function)
    pytest.skip(f"this transformers has no {name}")


def expected(name: str, tokens: tuple[Tensor | None, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """The peer's output and final state, which it keeps as [B, HV, DK, DV]."""
    q, k, v, g, beta = tokens
    out, final = peer(name)(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=state.mT.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out, final.mT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize(("N", "HK", "HV", "DK", "DV"), [(8, 2, 2, 64, 128), (63, 1, 3, 128, 64)])
def test_gated_delta_rule(backend: Backend, name: str, N: int, HK: int, HV: int, DK: int, DV: int) -> None:
    case = random_case(
        1, B=2, N=N, HK=HK, HV=HV, DK=DK, DV=DV, tree=False, ragged=False, padding=False, poison=False
    )
    start = case.state[:2]
    want, want_state = expected(name, case.tokens, start)
    # Both sides are float32: twice the error that one of them may have.
    atol = 2 * tolerance(torch.float32, N, DK, want, start)
    for strategy in backend.strategies:
        state = start.clone()
        out, factors = backend.verify(*case.tokens, state=state, qk_l2norm=True, strategy=strategy)
        backend.commit(state, factors)
        assert_close(out, want, atol, f"{strategy} out")
        assert_close(state, want_state, atol, f"{strategy} state")
    state = start.clone()
    out = backend.prefill(*case.tokens, state=state, qk_l2norm=True)
    assert_close(out, want, atol, "prefill out")
    assert_close(state, want_state, atol, "prefill state")
