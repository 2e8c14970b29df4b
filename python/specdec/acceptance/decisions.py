"""Where the random outcomes of the rules come from.

The rules are written against `Decisions`. A sequence runs them with its seeded numbers; the proofs in
`tests/lossless` run the same code over every outcome and add up the exact probabilities. `depth` counts the
tokens that a round emits from 0.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.acceptance.rng import Stream, categorical, uniform

Row = NDArray[np.floating]
"""One distribution [V]."""


class Decisions(Protocol):
    """The random outcomes of one round."""

    def accept(self, depth: int, p: float, q: float, rank: int = 0) -> bool:
        """Whether a draft is kept, True with probability min(1, p / q); q > 0.

        `rank` counts the tests of one position: that of the child among its siblings.
        """

    def sample(self, depth: int, weights: Row) -> int:
        """An index with probability proportional to its weight; weights [V] are non-negative."""

    def keep(self, node: int, chance: float) -> bool:
        """Whether a walk from the leaves up ends at the node, True with probability `chance`."""


class SeededDecisions:
    """The decisions of one sequence: `position` is that of the first token the round emits."""

    def __init__(self, seed: int, position: int) -> None:
        self._seed = seed
        self._position = position

    def accept(self, depth: int, p: float, q: float, rank: int = 0) -> bool:
        """Accept where `u q < p`, u from the position's ACCEPT stream."""
        return uniform(self._seed, self._position + depth, Stream.ACCEPT, rank) * q < p

    def sample(self, depth: int, weights: Row) -> int:
        """`categorical` at the position's SAMPLE stream."""
        return categorical(weights, uniform(self._seed, self._position + depth, Stream.SAMPLE))

    def keep(self, node: int, chance: float) -> bool:
        """Keep where `u < chance`, u from the round's ROUND stream."""
        return uniform(self._seed, self._position, Stream.ROUND, node) < chance
