"""The implementations that every operator test runs over. A backend is added here and nowhere else.

Tests make their tensors on the CPU; a backend of another device moves them there and back itself, storages
whole, so that strides, gaps and shared memory stay what the test made them.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from ops import sampling
from specdec import ops
from specdec.ops import (
    Accepted,
    Factors,
    acceptance,
    attention,
    attention_reference,
    convolution,
    layer,
    recurrence,
    reference,
)
from specdec.ops._operator import operator

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """The operators of one backend, with the signatures of `specdec.ops`."""

    name: str
    verify: Callable[..., tuple[Tensor, Factors]]
    commit: Callable[..., None]
    conv_verify: Callable[..., Tensor]
    conv_commit: Callable[..., None]
    prefill: Callable[..., Tensor]
    verify_layer: Callable[..., tuple[Tensor, Factors]]
    accept_greedy: Callable[..., Accepted]
    accept_sampled: Callable[..., Accepted]
    sampling_probs: Callable[..., Tensor]
    draw_tokens: Callable[..., Tensor]
    tree_attention: Callable[..., Tensor]
    strategies: tuple[str, ...]
    precisions: tuple[str, ...] = ()  # of solve and prefill, beside the default
    checks_values: bool = True  # does it refuse what only a look into the tensors shows?
    share: int = 1  # of a long series of cases, one in so many is run
    missing: str = ""  # why it cannot run here

    def __repr__(self) -> str:
        return self.name

    def some(self, cases: Iterable[T]) -> list[T]:
        """The cases of a long series that this backend runs: all, or the last and one in `share`."""
        return list(cases)[:: -self.share][::-1]

    def count(self, number: int) -> int:
        """How many repetitions this backend runs of `number`."""
        return -(-number // self.share)


def _reference_verify(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Factors]:
    out, factors = reference.verify(q, k, v, *args, **kwargs, dtype=torch.float32)
    return out.to(v.dtype), factors


def _reference_prefill(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return reference.prefill(q, k, v, *args, **kwargs, dtype=torch.float32).to(v.dtype)


def _reference_conv(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return reference.conv_verify(x, *args, **kwargs, dtype=torch.float32).to(x.dtype)


def _reference_layer(mixed: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Factors]:
    out, factors = reference.verify_layer(mixed, *args, **kwargs, dtype=torch.float32)
    return out.to(mixed.dtype), factors


def _reference_attention(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return attention_reference.tree_attention(q, *args, **kwargs, dtype=torch.float32).to(q.dtype)


# The reference in float32 arithmetic against itself in float64: shows that the tolerances are honest.
REFERENCE = Backend(
    name="reference",
    verify=_reference_verify,
    commit=lambda *args, **kwargs: reference.commit(*args, **kwargs, dtype=torch.float32),
    conv_verify=_reference_conv,
    conv_commit=reference.conv_commit,
    prefill=_reference_prefill,
    verify_layer=_reference_layer,
    accept_greedy=sampling.accept_greedy,
    accept_sampled=sampling.accept_sampled,
    sampling_probs=sampling.sampling_probs,
    draw_tokens=sampling.draw_tokens,
    tree_attention=_reference_attention,
    strategies=("serial",),
)

CPU = Backend(
    name="cpu",
    verify=ops.verify,
    commit=ops.commit,
    conv_verify=ops.conv_verify,
    conv_commit=ops.conv_commit,
    prefill=ops.prefill,
    verify_layer=ops.verify_layer,
    accept_greedy=ops.accept_greedy,
    accept_sampled=ops.accept_sampled,
    sampling_probs=ops.sampling_probs,
    draw_tokens=ops.draw_tokens,
    tree_attention=ops.tree_attention,
    strategies=("serial", "hybrid", "solve"),
)

# --- the CUDA kernels through the executor, which checks every access and raises RuntimeError ---

SIMT_LIBRARY = Path(__file__).resolve().parents[2] / "build" / "lib" / "libspecdec_simt.so"
_RECURRENCE = ("verify", "verify_deferred", "commit", "prefill")
_CONVOLUTION = ("conv_verify", "conv_verify_deferred", "conv_commit")
_LAYER = ("verify_layer", "verify_layer_deferred")
_SAMPLING = ("accept_greedy", "accept_sampled", "sampling_probs", "draw_tokens")
_ATTENTION = ("tree_attention",)
_OTHERS = ("verify", "commit", "conv_verify", "conv_commit", "prefill", "verify_layer")
_WRAPPERS = (*_OTHERS, *_SAMPLING, *_ATTENTION)


@functools.cache
def simt_library() -> ctypes.CDLL:
    """The library, loaded, for its settings. Fails the test where it is not built."""
    if not SIMT_LIBRARY.exists():
        pytest.fail(f"{SIMT_LIBRARY.name} is not built: run `make test-cpp`, which makes it")
    torch.ops.load_library(str(SIMT_LIBRARY))
    return ctypes.CDLL(str(SIMT_LIBRARY))


@functools.cache
def _simt_operators(ops_: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    simt_library()
    return {f"_{op}": operator(op, "specdec_simt") for op in ops_}


def _through_simt(function: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper `function` over the operators of the executor, with what it does for a GPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            of_gpu = {**_simt_operators(_RECURRENCE), "on_gpu": lambda _: True}
            stack.enter_context(mock.patch.multiple(recurrence, **of_gpu))
            stack.enter_context(mock.patch.multiple(convolution, **_simt_operators(_CONVOLUTION)))
            stack.enter_context(mock.patch.multiple(layer, **_simt_operators(_LAYER)))
            stack.enter_context(mock.patch.multiple(acceptance, **_simt_operators(_SAMPLING)))
            stack.enter_context(mock.patch.multiple(attention, **_simt_operators(_ATTENTION)))
            return function(*args, **kwargs)

    return call


SIMT = replace(
    CPU,
    name="simt",
    **{name: _through_simt(getattr(ops, name)) for name in _WRAPPERS},
    precisions=("tf32", "bf16"),
    share=32,
    # Where CI runs, nothing is left out: the test then fails and says how to build it.
    missing=""
    if SIMT_LIBRARY.exists() or os.environ.get("CI")
    else f"{SIMT_LIBRARY.name} is not built: run `make test-cpp`",
)

# --- a GPU ---


def _on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on a GPU for tensors of the CPU: storages go there whole, and come back."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        moved: dict[int, tuple[Tensor, Tensor]] = {}  # by the storage's address: its bytes here and there

        def there(x: Any) -> Any:
            if isinstance(x, Tensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                if storage.data_ptr() not in moved:
                    here = torch.empty(0, dtype=torch.uint8).set_(storage)
                    moved[storage.data_ptr()] = here, here.cuda()
                bytes_ = moved[storage.data_ptr()][1].untyped_storage()
                on_gpu = torch.empty(0, dtype=x.dtype, device="cuda")
                return on_gpu.set_(bytes_, x.storage_offset(), x.shape, x.stride())
            return _map(there, x)

        def back(x: Any) -> Any:
            return x.cpu() if isinstance(x, Tensor) else _map(back, x)

        result = back(function(*there(args), **there(kwargs)))
        for here, gpu in moved.values():
            here.copy_(gpu)
        return result

    return call


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """`function` of what a container holds."""
    if isinstance(x, dict):
        return {key: function(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return type(x)(*map(function, x)) if hasattr(x, "_fields") else tuple(map(function, x))
    return x


CUDA = replace(
    SIMT,
    name="cuda",
    **{name: _on_cuda(getattr(ops, name)) for name in _WRAPPERS},
    checks_values=False,
    share=4,
    missing="" if torch.cuda.is_available() else "no GPU",
)

_ALL = [REFERENCE, CPU, SIMT, *([CUDA] if torch.cuda.is_available() else [])]


def _param(backend: Backend, *more: Any) -> Any:
    marks = [pytest.mark.skip(reason=backend.missing)] if backend.missing else []
    return pytest.param(backend, *more, id="-".join(map(str, (backend, *more))), marks=marks)


BACKENDS = [_param(backend) for backend in _ALL]
COMPILED = [_param(b) for b in _ALL[1:]]  # the ones that promise bit-equality and check their arguments
PAIRS = [_param(b, s) for b in _ALL for s in b.strategies]
EXACT_PAIRS = [_param(b, s) for b in _ALL[1:] for s in b.strategies if s in ("serial", "hybrid")]
PRECISIONS = [_param(b, p) for b in _ALL for p in b.precisions]
# The kernels of a GPU, which look at no values first.
UNCHECKED = [_param(b) for b in _ALL if b not in (REFERENCE, CPU)]
