"""Rows of probabilities and draws from them on every backend, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.backends import BACKENDS, COMPILED, Backend
from ops.cases import NAN, int32
from ops.rounds import DTYPES, gapped, random_logits, settings_of
from ops.sampling import draw_tokens, row_of
from specdec import ops


def probs_bound(logits: Tensor, want: np.ndarray, temperature: float) -> np.ndarray:
    """What float32 may make of a row. The scaled distance x from the largest logit has two roundings, which
    move e^x by |x| 2^-23; e^x itself is good to 1.5 units of 2^-23, its sum, the inverse and the product
    round once each. Below e^-87 there is nothing."""
    x = logits.double().numpy()
    x = (x.max() - x) / (temperature or 1.0)
    return np.where(want > 0, want * (np.minimum(x, 90) + 4) * 2.0**-23, 0) + 2.0**-125


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probs_match_float64(backend: Backend, dtype: torch.dtype) -> None:
    close = rows = 0
    for V in backend.some([1, 2, 5, 127, 129, 1000, 4096, 8193, 300]):
        g = torch.Generator().manual_seed(V)
        logits = random_logits(g, 12, V, dtype=dtype)
        settings = settings_of(12)
        got = backend.sampling_probs(gapped(logits), **settings)
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        for r in range(12):
            of_row = {name: x[r].item() for name, x in settings.items()}
            want, margin = row_of(logits[r], **of_row)
            rows += 1
            if margin < 1e-5:  # top-p or min-p may end at another token
                close += 1
                continue
            error = np.abs(got[r].double().numpy() - want)
            assert (error <= probs_bound(logits[r], want, of_row["temperature"])).all(), (V, r, error.max())
            assert ((got[r].numpy() > 0) <= (want > 0)).all()
    assert close < rows / 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_smaller_token(backend: Backend) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -0.0, 0.0, -0.0, -1.0]])
    for k, kept in ((1, 1), (2, 2), (3, 3)):
        probs = backend.sampling_probs(logits, top_k=int32([k, k]))
        assert probs[0].nonzero().flatten().tolist() == [1, 2, 4][:kept]
        assert probs[1].nonzero().flatten().tolist() == [0, 1, 2][:kept]
    half = backend.sampling_probs(torch.zeros(1, 8), top_p=torch.tensor([0.5]))
    assert half[0].tolist() == [0.25] * 4 + [0.0] * 4
    greedy = backend.sampling_probs(logits, temperature=torch.zeros(2))
    assert greedy.argmax(1).tolist() == [1, 0]
    assert greedy.sum(1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_settings(backend: Backend) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, -1e30], [3e38, -3e38, 0.0, 3e38], [-1e30, -2e30, -math.inf, -3e30]]
    )
    hot = backend.sampling_probs(logits[:2], temperature=torch.tensor([3e38, 3e38]))
    assert torch.allclose(hot[0], torch.full((4,), 0.25), rtol=2.0**-21, atol=0)  # `probs_bound` at x = 0
    cold = backend.sampling_probs(logits, temperature=torch.full((3,), 1e-30))
    assert cold.tolist() == [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [1, 0, 0, 0]]
    narrow = backend.sampling_probs(logits, top_p=torch.full((3,), 1e-30))
    assert narrow.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    strict = backend.sampling_probs(logits, min_p=torch.ones(3))
    assert strict.tolist() == [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [1, 0, 0, 0]]


@pytest.mark.parametrize("V", [3, 600])
def test_hot_rows_where_subnormal_numbers_are_flushed(V: int) -> None:
    logits = torch.full((1, V), -math.inf)
    logits[0, 0] = 0.0
    torch.set_flush_denormal(True)
    try:
        probs = ops.sampling_probs(logits, temperature=torch.tensor([3e38]), top_p=torch.tensor([0.9]))
    finally:
        torch.set_flush_denormal(False)
    assert probs[0].tolist() == [1.0] + [0.0] * (V - 1)


def spoil(logits: Tensor, kind: int, at: int) -> None:
    """Makes a row [V] one that nothing can be drawn from."""
    logits[at] = (NAN, math.inf, -NAN, 0.0)[kind]
    if kind == 3:
        logits[:] = -math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_have_no_maximum(backend: Backend) -> None:
    V = 300
    logits = torch.randn(6, V)
    for kind in range(4):
        spoil(logits[kind], kind, 77 * kind)
    probs = backend.sampling_probs(logits, top_k=int32([0, 5, 0, 5, 0, 5]))
    assert probs.isnan().all(1).tolist() == [True] * 4 + [False] * 2
    assert not probs[4:].isnan().any()
    # Node 1 is right and its row is spoiled: the walk ends there. Node 2 is wrong, its row does not count.
    rounds = torch.zeros(4, 3, V)
    rounds[:, 0, 9] = 1000.0
    for kind in range(4):
        spoil(rounds[kind, 1], kind, 77 * kind)
        spoil(rounds[kind, 2], kind, 0)
    tokens = torch.tensor([[0, 9, 8]] * 4)
    parents = int32([[-1, 0, 0]] * 4)
    how = {"rules": int32([0] * 4), "seeds": torch.arange(4), "positions": torch.arange(4)}
    for right, found in ((9, -1), (7, 9)):
        tokens[:, 1] = right
        greedy = backend.accept_greedy(rounds, tokens, parents)
        sampled = backend.accept_sampled(rounds, tokens, parents, **how)
        for got in (greedy, sampled):
            assert got.next_token.tolist() == [found] * 4
            if backend.name != "reference" or found >= 0:
                assert got.path_lengths.tolist() == [2 if right == 9 else 1] * 4


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("replacement", [True, False])
def test_draws(backend: Backend, replacement: bool) -> None:
    for V in backend.some([1, 3, 129, 8193, 100]):
        g = torch.Generator().manual_seed(V)
        probs = torch.rand(8, V, generator=g) ** 4
        probs[torch.rand(8, V, generator=g) < 0.4] = 0
        probs[5], probs[6] = 0, NAN
        how = {
            "seeds": torch.randint(-(2**63), 2**63 - 1, (8,), generator=g),
            "positions": torch.randint(2**40, (8,), generator=g),
            "nodes": torch.randint(64, (8,), generator=g, dtype=torch.int32),
        }
        got = backend.draw_tokens(gapped(probs), 5, replacement=replacement, **how)
        assert torch.equal(got, draw_tokens(probs, 5, replacement=replacement, **how))
        assert (got[5:7] == -1).all()


def test_draws_of_an_infinite_number() -> None:
    """It spoils the sum that independent draws need, and is first where tokens race."""
    probs = torch.tensor([[1.0, math.inf, 0.0]])
    how = {"seeds": torch.tensor([5]), "positions": torch.tensor([6]), "nodes": int32([0])}
    for replacement, want in ((True, [-1, -1, -1]), (False, [1, 0, -1])):
        for draw in (ops.draw_tokens, draw_tokens):
            assert draw(probs, 3, replacement=replacement, **how).tolist() == [want]
