"""The counter-based generator: published vectors, one definition for one number and for many."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from scipy import stats

import specdec.acceptance.rng
from lossless.grid import uniform_grid
from specdec.acceptance import Stream, categorical, resolve_seed, uniform
from specdec.acceptance.rng import philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    c, k, want = (tuple(int(w, 16) for w in text.split()) for text in (counter, key, words))
    assert philox4x32(c, k) == want


def test_one_number_and_many_agree() -> None:
    rng = np.random.default_rng(0)
    seeds = [0, 1, 2**32 - 1, 2**32, 2**64 - 1, *rng.integers(2**63, size=3).tolist()]
    positions = [0, 1, 2**32 - 1, 2**32, 2**40 + 5]
    for stream in Stream:
        for seed in seeds:
            for position in positions:
                want = [uniform(seed, position, stream, d) for d in range(5)]
                assert uniform_grid(seed, position, stream, np.arange(5)).tolist() == want
    grid = uniform_grid(np.array(seeds, np.uint64)[:, None], np.array(positions), Stream.SAMPLE, 3)
    assert grid.shape == (8, 5)
    assert grid[4, 2] == uniform(seeds[4], positions[2], Stream.SAMPLE, 3)


def test_every_coordinate_changes_the_number() -> None:
    at = [
        uniform(seed, position, stream, draw)
        for seed in (0, 1, 2**32)
        for position in (0, 1, 2**32)
        for stream in Stream
        for draw in (0, 1, 2)
    ]
    assert len(set(at)) == len(at) == 3 * 3 * 3 * len(Stream)


def test_uniform_on_the_unit_interval_and_independent_across_coordinates() -> None:
    n = 50_000
    index = np.arange(n)
    along = {
        "seed": uniform_grid(index, 3, Stream.ACCEPT),
        "position": uniform_grid(3, index, Stream.ACCEPT),
        "draw": uniform_grid(3, 3, Stream.ACCEPT, index),
        "stream": uniform_grid(index, 3, Stream.SAMPLE),
    }
    for u in along.values():
        assert u.min() >= 0
        assert u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-4
    cells = np.histogram2d(along["seed"], along["stream"], bins=8, range=[[0, 1]] * 2)[0]
    assert stats.chisquare(cells.ravel()).pvalue > 1e-4
    cells = np.histogram2d(along["position"][:-1], along["position"][1:], bins=8, range=[[0, 1]] * 2)[0]
    assert stats.chisquare(cells.ravel()).pvalue > 1e-4


def test_categorical_inverts_the_cumulative_sum() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    for u, want in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2.0**-53, 4)]:
        assert categorical(weights, u) == want
    assert categorical(np.array([0.0, 3e-39, 0.0], np.float32), 1 - 2.0**-53) == 1


def test_categorical_never_draws_a_zero() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        weights = rng.random(rng.integers(1, 40)).astype(np.float32) * (rng.random() < 0.9)
        weights[rng.random(weights.size) < 0.5] = 0
        if not weights.any():
            continue
        for u in (0.0, 1 - 2.0**-53, rng.random()):
            assert weights[categorical(weights, u)] > 0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_categorical_refuses_what_is_no_distribution(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive finite sum"):
        categorical(np.array(weights), 0.5)


def test_seed_resolution() -> None:
    assert resolve_seed(0) == 0
    assert resolve_seed(2**64 - 1) == 2**64 - 1
    drawn = {resolve_seed(None) for _ in range(4)}
    assert len(drawn) == 4
    assert all(0 <= s < 2**63 for s in drawn)


def test_docstring_examples() -> None:
    assert doctest.testmod(specdec.acceptance.rng).failed == 0
