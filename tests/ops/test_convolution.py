"""conv_verify and conv_commit against the float64 reference, for every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import BACKENDS, Backend
from ops.cases import EPS, NAN, assert_close, bits, int32, random_parents, random_path
from specdec.ops import ConvPending, ConvPrefix, reference

backends = pytest.mark.parametrize("backend", BACKENDS)
BIG = 1 << 30


def inputs(
    seed: int, B: int, N: int, C: int, W: int, dtype=torch.float32, state_dtype=None
) -> dict[str, Any]:
    """x is a slice of a wider projection, row 0 is padding, the last row is short, the unread is NaN."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(B, N, C + 7, generator=rng).to(dtype)[..., 3 : C + 3]
    state = torch.randn(B + 2, W - 1, C, generator=rng).to(state_dtype or dtype)
    slots = torch.randperm(B + 2, generator=rng)[:B].int()
    slots[0] = -3
    lengths = torch.full((B,), N, dtype=torch.int32)
    lengths[-1] = N // 2
    parents = random_parents(rng, B, N)
    x[0], x[-1, N // 2 :] = NAN, NAN
    parents[0], parents[-1, N // 2 :] = BIG, BIG
    spare = torch.ones(B + 2, dtype=torch.bool)
    spare[slots[1:].long()] = False
    state[spare] = NAN
    weight, bias = torch.randn(C, W, generator=rng), torch.randn(C, generator=rng)
    return {
        "x": x,
        "weight": weight,
        "bias": bias,
        "conv_state": state,
        "slots": slots,
        "lengths": lengths,
        "parents": parents,
    }


def check(backend: Backend, *, activation: str | None = "silu", **arguments: Any) -> Tensor:
    state, want_state = arguments["conv_state"].clone(), arguments["conv_state"].clone()
    x, weight = arguments["x"], arguments["weight"]
    y = backend.conv_verify(**{**arguments, "conv_state": state}, activation=activation)
    want = reference.conv_verify(
        **{**arguments, "conv_state": want_state}, activation=activation, dtype=torch.float64
    )
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    # W + 1 additions of terms |weight| |x| (both below 4), a sigmoid good to a few last places, one rounding.
    W = weight.shape[1]
    size = max(float(want.abs().max()) if want.numel() else 0.0, W * 4 * 4)
    assert_close(
        y, want, size * EPS[torch.float32] * (W + 8) + size * EPS[x.dtype] * (x.dtype != torch.float32), "y"
    )
    assert torch.equal(state.nan_to_num(7.0), want_state.nan_to_num(7.0)), "conv_state"
    return y


@backends
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
def test_tree(backend: Backend, activation: str | None, W: int) -> None:
    check(backend, **inputs(1, 4, 9, 37, W), activation=activation)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("float_state", [False, True])
def test_dtypes(backend: Backend, dtype: torch.dtype, float_state: bool) -> None:
    check(backend, **inputs(2, 3, 6, 96, 4, dtype, torch.float32 if float_state else dtype))


@backends
@pytest.mark.parametrize("N", [1, 2, 16, 100])
def test_chain(backend: Backend, N: int) -> None:
    arguments = inputs(3, 3, N, 64, 4)
    check(backend, **{**arguments, "parents": None, "bias": None})


@backends
def test_siblings_do_not_see_each_other(backend: Backend) -> None:
    arguments = inputs(4, 3, 5, 16, 4)
    star = int32([[-1, 0, 0, 0, 0]] * 3)
    y = check(backend, **{**arguments, "parents": star})
    first_and_last = {"x": arguments["x"][:, [0, 4]], "parents": None, "lengths": int32([2, 2, 1])}
    alone = check(backend, **{**arguments, **first_and_last})
    assert torch.equal(y[1, 4], alone[1, 1])


@backends
def test_pending(backend: Backend) -> None:
    arguments = inputs(5, 5, 4, 33, 4)
    rng = torch.Generator().manual_seed(6)
    x = torch.randn(5, 6, 33, generator=rng)
    path, lengths = random_path(rng, 5, 6)
    lengths[1:] = int32([0, 1, 3, 6])
    path[4] = torch.arange(6)
    path[2, 0], path[3, :3] = 2, int32([0, 2, 5])
    check(backend, **arguments, pending=ConvPending(x, path, lengths))
    check(backend, **arguments, pending=ConvPending(x, None, lengths))
    check(backend, **arguments, pending=ConvPending(x))


@backends
def test_no_new_inputs_still_settle_what_is_pending(backend: Backend) -> None:
    B, N, C, W = 2, 3, 8, 4
    window = torch.randn(B, W - 1, C)
    window[1] = torch.nan
    want, x = window.clone(), torch.full((B, N, C), torch.nan)
    pending, counts = torch.randn(B, N, C), int32([2, 0])
    backend.conv_commit(want, pending, None, counts)
    y = backend.conv_verify(
        x,
        torch.ones(C, W),
        conv_state=window,
        lengths=int32([0, 0]),
        pending=ConvPending(pending, None, counts),
    )
    assert torch.equal(bits(window), bits(want))
    assert torch.equal(window[0, 1:], pending[0, :2])
    assert (y == 0).all()


@backends
@pytest.mark.parametrize("NP", [1, 2, 5])
def test_prefix(backend: Backend, NP: int) -> None:
    arguments = inputs(7, 3, 6, 20, 4)
    rng = torch.Generator().manual_seed(8)
    x = torch.randn(3, NP + 2, 20, generator=rng)[:, :NP]
    chain = {**arguments, "parents": None}
    check(backend, **chain, prefix=ConvPrefix(x))
    check(backend, **chain, prefix=ConvPrefix(x, random_parents(rng, 3, NP)))
    tree = {**arguments, "parents": random_parents(rng, 3, 6, first=NP)}
    check(backend, **tree, prefix=ConvPrefix(x, random_parents(rng, 3, NP)))


@backends
@pytest.mark.parametrize(("dtype", "state_dtype"), [(torch.bfloat16, torch.float32), (torch.float16,) * 2])
def test_commit_is_a_copy(backend: Backend, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    arguments = inputs(9, 6, 5, 18, 4, dtype, state_dtype)
    rng = torch.Generator().manual_seed(10)
    x = torch.randn(6, 5, 18, generator=rng).to(dtype)
    path, lengths = random_path(rng, 6, 5)
    lengths[1:] = int32([0, 1, 2, 4, 5])
    for b in range(1, 6):
        m = int(lengths[b])
        path[b, :m] = torch.randperm(5, generator=rng)[:m].sort().values.int()
    path[0] = BIG
    for how in ((path, lengths), (None, lengths), (None, None)):
        state, want = arguments["conv_state"].clone(), arguments["conv_state"].clone()
        backend.conv_commit(state, x, *how, slots=arguments["slots"])
        reference.conv_commit(want, x, *how, slots=arguments["slots"])
        assert torch.equal(state.nan_to_num(7.0), want.nan_to_num(7.0))


@backends
def test_empty(backend: Backend) -> None:
    arguments = inputs(11, 2, 3, 8, 4)
    none = {key: arguments[key] for key in ("weight", "bias", "conv_state")}
    assert backend.conv_verify(arguments["x"][:0], **none, slots=arguments["slots"][:0]).shape == (0, 3, 8)
    assert backend.conv_verify(arguments["x"][:, :0], **none, slots=arguments["slots"]).shape == (2, 0, 8)
    y = check(backend, **{**arguments, "lengths": int32([3, -1])})
    assert (y == 0).all()
