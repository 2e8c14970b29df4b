"""Sampled laws: pairs of emitted tokens against the exact law, by chi-square."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

from specdec.acceptance import Stream, categorical, uniform_grid

# Chi-square tests of real rules in the whole suite, for Bonferroni; seeds are fixed, so the suite is
# deterministic.
TESTS = 20
ALPHA = 1e-3 / TESTS


class Numbers:
    """A sequence's seeded decisions: the numbers of `SeededDecisions`, read from a table made at once."""

    def __init__(self, table: dict[Stream, list[float]], position: int) -> None:
        self._table, self._position = table, position

    def accept(self, depth: int, p: float, q: float, rank: int = 0) -> bool:
        """The acceptance test of `SeededDecisions`."""
        return self._table[Stream.ACCEPT][self._position + depth] * q < p

    def sample(self, depth: int, weights: np.ndarray) -> int:
        """The draw of `SeededDecisions`."""
        return categorical(weights, self._table[Stream.SAMPLE][self._position + depth])

    def draft(self, depth: int, weights: np.ndarray) -> int:
        """The drafter's draw for the same position, from its own stream."""
        return categorical(weights, self._table[Stream.DRAFT][self._position + depth])


def sampled_texts(
    rounds: Callable[[tuple[int, ...], Numbers], list[int]],
    prompt: tuple[int, ...],
    length: int,
    seeds: np.ndarray,
    ahead: int = 8,
) -> np.ndarray:
    """The first `length` tokens for each seed: int [N, length]; drafts have fewer than `ahead` tokens."""
    positions = np.arange(len(prompt) + length + ahead)
    streams = {s: uniform_grid(seeds[:, None], positions, s).tolist() for s in Stream}
    texts = np.empty((len(seeds), length), int)
    for row in range(len(seeds)):
        table = {s: numbers[row] for s, numbers in streams.items()}
        text: list[int] = []
        while len(text) < length:
            text += rounds((*prompt, *text), Numbers(table, len(prompt) + len(text)))
        texts[row] = text[:length]
    return texts


def chi_square(texts: np.ndarray, law: np.ndarray) -> float:
    """p-value of sampled texts [N, L] under their law [V] * L; 0 if a text of probability zero occurs."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(texts.T), 1)
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    expected = law[possible] * len(texts)
    assert expected.min() >= 5, f"too few texts for chi-square: a cell expects {expected.min():.2f}"
    return float(stats.chisquare(counts[possible], expected * counts.sum() / expected.sum()).pvalue)
