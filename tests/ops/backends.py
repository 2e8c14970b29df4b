"""The implementations that every operator test runs over. A backend is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec import ops
from specdec.ops import Factors, reference


@dataclass(frozen=True)
class Backend:
    """The operators of one backend, with the signatures of `specdec.ops`."""

    name: str
    verify: Callable[..., tuple[Tensor, Factors]]
    commit: Callable[..., None]
    conv_verify: Callable[..., Tensor]
    conv_commit: Callable[..., None]
    prefill: Callable[..., Tensor]
    strategies: tuple[str, ...]
    device: str = "cpu"

    def __repr__(self) -> str:
        return self.name


def _reference_verify(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Factors]:
    out, factors = reference.verify(q, k, v, *args, **kwargs, dtype=torch.float32)
    return out.to(v.dtype), factors


def _reference_prefill(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return reference.prefill(q, k, v, *args, **kwargs, dtype=torch.float32).to(v.dtype)


def _reference_conv(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return reference.conv_verify(x, *args, **kwargs, dtype=torch.float32).to(x.dtype)


# The reference in float32 arithmetic against itself in float64: shows that the tolerances are honest.
REFERENCE = Backend(
    name="reference",
    verify=_reference_verify,
    commit=lambda *args, **kwargs: reference.commit(*args, **kwargs, dtype=torch.float32),
    conv_verify=_reference_conv,
    conv_commit=reference.conv_commit,
    prefill=_reference_prefill,
    strategies=("serial",),
)

CPU = Backend(
    name="cpu",
    verify=ops.verify,
    commit=ops.commit,
    conv_verify=ops.conv_verify,
    conv_commit=ops.conv_commit,
    prefill=ops.prefill,
    strategies=("serial", "hybrid", "solve"),
)

BACKENDS = [REFERENCE, CPU]
COMPILED = [CPU]  # the ones that promise bit-equality and check their arguments
PAIRS = [(backend, strategy) for backend in BACKENDS for strategy in backend.strategies]
EXACT_PAIRS = [(b, s) for b in COMPILED for s in b.strategies if s in ("serial", "hybrid")]
