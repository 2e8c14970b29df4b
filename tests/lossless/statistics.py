"""Sampled laws: texts of the seeded sampler against the exact law, by chi-square."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import numpy as np
from scipy import stats

from lossless.grid import uniform_grid
from specdec.acceptance import Stream, categorical, draw_tokens

# At least as many as there are chi-square tests of real rules in the whole suite, for Bonferroni; seeds are
# fixed, so the suite is deterministic.
TESTS = 130
ALPHA = 1e-3 / TESTS


class Table:
    """The numbers of many seeds, made at once: those of `uniform`."""

    def __init__(self, seeds: np.ndarray, positions: int) -> None:
        self._seeds, self._positions = seeds[:, None], np.arange(positions)
        self._numbers: dict[tuple[Stream, int], list[list[float]]] = {}

    def number(self, row: int, position: int, stream: Stream, draw: int) -> float:
        """The number of the seed in this row."""
        if (stream, draw) not in self._numbers:
            grid = uniform_grid(self._seeds, self._positions, stream, draw)
            self._numbers[stream, draw] = grid.tolist()
        return self._numbers[stream, draw][row][position]


class Numbers:
    """A sequence's seeded decisions: those of `SeededDecisions`, and its drafter's draws."""

    def __init__(self, table: Table, row: int, position: int) -> None:
        self.position = position
        self._table, self._row = table, row

    def number(self, position: int, stream: Stream, draw: int = 0) -> float:
        """A number of this sequence."""
        return self._table.number(self._row, position, stream, draw)

    def accept(self, depth: int, p: float, q: float, rank: int = 0) -> bool:
        """The acceptance test of `SeededDecisions`."""
        return self.number(self.position + depth, Stream.ACCEPT, rank) * q < p

    def sample(self, depth: int, weights: np.ndarray) -> int:
        """The draw of `SeededDecisions`."""
        return categorical(weights, self.number(self.position + depth, Stream.SAMPLE))

    def keep(self, node: int, chance: float) -> bool:
        """The test of `SeededDecisions`."""
        return self.number(self.position, Stream.ROUND, node) < chance

    def draft(self, parent: int, rank: int, q: np.ndarray, elder: Collection[int] | None) -> int:
        """The child of this rank: drawn from q, or the one that arrives then in a race (Gumbel top-k)."""
        number = functools.partial(self.number, self.position)
        return draw_tokens(q, rank + 1, parent, number, replacement=elder is None)[rank]


def sampled_texts(
    rounds: Callable[[tuple[int, ...], Numbers], list[int]],
    prompt: tuple[int, ...],
    length: int,
    seeds: np.ndarray,
    ahead: int = 5,
    decisions: type[Numbers] = Numbers,
) -> np.ndarray:
    """The first `length` tokens for each seed: int [N, length]; a round looks fewer than `ahead` ahead."""
    table = Table(seeds, len(prompt) + length + ahead)
    texts = np.empty((len(seeds), length), int)
    for row in range(len(seeds)):
        text: list[int] = []
        while len(text) < length:
            text += rounds((*prompt, *text), decisions(table, row, len(prompt) + len(text)))
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
