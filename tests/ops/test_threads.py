"""The number of threads changes no bit: every op with one thread and with two, where the second one works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ops.backends import CPU
from ops.cases import RECURRENCES, Case, bits, int32, random_case, random_parents, random_path
from specdec import ops
from specdec.ops import ConvPending, Pending

SetThreads = Callable[[int], None]
recurrences = pytest.mark.parametrize(("gate", "update"), RECURRENCES)
rows = pytest.mark.parametrize("ragged", [False, True], ids=["full", "ragged"])

# Per call at least 8 x 32768 multiply-adds, below which the kernels stay in one thread (csrc/cpu/parallel.h);
# several times over, as ragged rows have less to do. Odd counts, so that the two threads get unequal shares.
B, N, HK, HV, DK, DV = 3, 13, 1, 5, 64, 96


def assert_same_bits(run: Callable[[], list[Tensor]], set_threads: SetThreads) -> None:
    """`run` gives the same tensors with one thread and, three times over, with two."""
    set_threads(1)
    want = run()
    set_threads(2)
    for _ in range(3):  # which thread takes which part differs from call to call
        for got, expected in zip(run(), want, strict=True):
            assert torch.equal(bits(got), bits(expected))


def made(gate, update, *, seed: int = 0, tree: bool = False, tokens: int = N, ragged: bool = False) -> Case:
    """`ragged`: one row is padding, one has no new nodes, and the lengths of the others differ."""
    return random_case(
        seed,
        B=B,
        N=tokens,
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        gate=gate,
        update=update,
        tree=tree,
        padding=ragged,
        ragged=ragged,
    )


@recurrences
@rows
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("strategy", CPU.strategies)
def test_verify(strategy: str, tree: bool, ragged: bool, gate, update, set_threads: SetThreads) -> None:
    """Also with a pending commit, which writes the state."""
    case, before = made(gate, update, tree=tree, ragged=ragged), made(gate, update, seed=1)
    _, factors = ops.verify(*before.tokens, state=case.state, **case.kwargs("slots", "qk_l2norm"))

    def run() -> list[Tensor]:
        state = case.state.clone()
        out, new = ops.verify(*case.tokens, state=state, strategy=strategy, **case.kwargs())
        late, newer = ops.verify(
            *case.tokens,
            state=state,
            strategy=strategy,
            pending=Pending(factors, None, int32([5, N, 0])),
            **case.kwargs(),
        )
        return [out, late, state, *(t for t in (*new, *newer) if t is not None)]

    assert_same_bits(run, set_threads)


@recurrences
@rows
def test_commit(ragged: bool, gate, update, set_threads: SetThreads) -> None:
    case = made(gate, update, ragged=ragged)
    _, factors = ops.verify(*case.tokens, state=case.state, **case.kwargs())
    path, lengths = random_path(torch.Generator().manual_seed(2), B, N)

    def run() -> list[Tensor]:
        chain, some = case.state.clone(), case.state.clone()
        ops.commit(chain, factors, slots=case.slots)
        ops.commit(some, factors, path, lengths, slots=case.slots)
        return [chain, some]

    assert_same_bits(run, set_threads)


@recurrences
@rows
def test_prefill(ragged: bool, gate, update, set_threads: SetThreads) -> None:
    case = made(gate, update, tokens=151, ragged=ragged)

    def run() -> list[Tensor]:
        state = case.state.clone()
        how = case.kwargs("slots", "lengths", "qk_l2norm")
        return [ops.prefill(*case.tokens, state=state, **how), state]

    assert_same_bits(run, set_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@rows
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_convolution(tree: bool, ragged: bool, dtype: torch.dtype, set_threads: SetThreads) -> None:
    C, W = 2803, 4  # B * W * C: the commit alone has to be worth a second thread
    rng = torch.Generator().manual_seed(3)
    x, before = torch.randn(2, B, N, C, generator=rng).to(dtype)
    weight, bias = torch.randn(C, W, generator=rng), torch.randn(C, generator=rng)
    window = torch.randn(B, W - 1, C, generator=rng).to(dtype)
    how = {
        "parents": random_parents(rng, B, N) if tree else None,
        "lengths": int32([N, 7, 0]) if ragged else None,
        "slots": int32([2, -1, 0]) if ragged else None,
    }

    def run() -> list[Tensor]:
        late, eager = window.clone(), window.clone()
        y = ops.conv_verify(x, weight, bias, conv_state=late, **how)
        pending = ConvPending(before, None, int32([5, N, 0]))
        later = ops.conv_verify(x, weight, bias, conv_state=late, pending=pending, **how)
        ops.conv_commit(eager, before, None, int32([5, N, 0]), slots=how["slots"])
        return [y, later, late, eager]

    assert_same_bits(run, set_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [9, 301])
def test_dense(rows: int, stored: torch.dtype, dtype: torch.dtype, set_threads: SetThreads) -> None:
    rng = torch.Generator().manual_seed(4)
    inputs, outputs, heads = 660, 331, 129
    x, gate = torch.randn(2, rows, inputs, generator=rng).to(dtype)
    gate_up = torch.randn(rows, 2 * inputs, generator=rng).to(dtype)
    residual = torch.randn(rows, outputs, generator=rng).to(dtype)
    norm, head_norm = torch.randn(inputs, generator=rng), torch.randn(inputs // 5, generator=rng)
    bias = torch.randn(outputs, generator=rng)
    weight = ops.pack_weight(torch.randn(outputs, inputs, generator=rng), stored, bias=bias)
    a, b = torch.randn(2, rows, heads, generator=rng)
    A_log, dt_bias = torch.randn(2, heads, generator=rng)

    def run() -> list[Tensor]:
        return [
            ops.linear(x, weight, residual=residual),
            ops.rms_norm(x, norm, 1e-6, gate),
            ops.swiglu(gate_up),
            ops.rms_norm_linear(x, norm, 1e-6, weight, residual=residual),
            ops.rms_norm_linear(x, head_norm, 1e-6, weight, gate=gate),  # five heads
            ops.swiglu_linear(gate_up, weight, residual=residual),
            *ops.gated_delta_gates(a, b, A_log, dt_bias),
        ]

    assert_same_bits(run, set_threads)
