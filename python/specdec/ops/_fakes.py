"""What `torch.compile` and `torch.export` see of the operators: shapes and dtypes of the outputs, no data.

Only devices are checked here; every other check needs the real call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from specdec.ops._load import load

load()

Optional = Tensor | None
F = TypeVar("F", bound=Callable[..., object])


def _fake(op: str) -> Callable[[F], F]:
    """`torch.library.register_fake`, typed."""
    return cast("Callable[[F], F]", torch.library.register_fake(f"specdec::{op}"))


def _check_devices(first: Tensor, **others: Optional) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device.type != first.device.type:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, want {first.device} as the first argument"
            )


def _fake_verify(q: Tensor, k: Tensor, v: Tensor, g: Optional) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    factor_k = k.new_empty(k.shape, dtype=torch.float32)
    factor_u = v.new_empty(v.shape, dtype=torch.float32)
    factor_g = v.new_empty((0,) if g is None else g.shape, dtype=torch.float32)
    return out, factor_k, factor_u, factor_g


@_fake("verify")
def _verify(
    q: Tensor, k: Tensor, v: Tensor, g: Optional, beta: Optional, state: Tensor, slots: Optional,
    parents: Optional, lengths: Optional, prefix_k: Optional, prefix_u: Optional, prefix_g: Optional,
    prefix_parents: Optional, scale: float | None, qk_l2norm: bool, strategy: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_devices(q, k=k, v=v, g=g, beta=beta, state=state, slots=slots, parents=parents, lengths=lengths)
    return _fake_verify(q, k, v, g)


@_fake("verify_deferred")
def _verify_deferred(
    q: Tensor, k: Tensor, v: Tensor, g: Optional, beta: Optional, state: Tensor, slots: Optional,
    parents: Optional, lengths: Optional, pending_k: Tensor, pending_u: Tensor, pending_g: Optional,
    pending_path: Optional, pending_path_lengths: Optional, scale: float | None, qk_l2norm: bool,
    strategy: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_devices(q, k=k, v=v, g=g, beta=beta, state=state, slots=slots, parents=parents, lengths=lengths)
    return _fake_verify(q, k, v, g)


@_fake("commit")
def _commit(
    state: Tensor, k: Tensor, u: Tensor, g: Optional, path: Optional, path_lengths: Optional, slots: Optional,
    how: int,
) -> None:  # fmt: skip
    _check_devices(state, k=k, u=u, g=g, path=path, path_lengths=path_lengths, slots=slots)


@_fake("prefill")
def _prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Optional, beta: Optional, state: Tensor, slots: Optional,
    lengths: Optional, cu_seqlens: Optional, scale: float | None, qk_l2norm: bool,
) -> Tensor:  # fmt: skip
    _check_devices(q, k=k, v=v, g=g, beta=beta, state=state, slots=slots, lengths=lengths)
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_fake("conv_verify")
def _conv_verify(
    x: Tensor, weight: Tensor, bias: Optional, conv_state: Tensor, slots: Optional, parents: Optional,
    lengths: Optional, prefix_x: Optional, prefix_parents: Optional, activation: int,
) -> Tensor:  # fmt: skip
    _check_devices(x, weight=weight, bias=bias, conv_state=conv_state, slots=slots, parents=parents)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_fake("conv_verify_deferred")
def _conv_verify_deferred(
    x: Tensor, weight: Tensor, bias: Optional, conv_state: Tensor, slots: Optional, parents: Optional,
    lengths: Optional, pending_x: Tensor, pending_path: Optional, pending_path_lengths: Optional,
    activation: int,
) -> Tensor:  # fmt: skip
    _check_devices(x, weight=weight, bias=bias, conv_state=conv_state, slots=slots, parents=parents)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_fake("conv_commit")
def _conv_commit(
    conv_state: Tensor, x: Tensor, path: Optional, path_lengths: Optional, slots: Optional
) -> None:  # fmt: skip
    _check_devices(conv_state, x=x, path=path, path_lengths=path_lengths, slots=slots)
