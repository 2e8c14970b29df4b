"""Where the rules' random outcomes come from, and what every rule shares.

Conventions, here and in every rule: `p_target(node)` is the row [V] that the target samples the token after
`node` from, `p_draft(node)` the row that the token of `node` was drawn from, both after the same processing
of logits; without replacement it is the row before the tokens of elder siblings were taken out. Node 0 is the
round's root token, emitted before and accepted always; parents come before their children, and siblings count
from the eldest, the one of lowest index. `depth` counts the tokens that a round emits from 0.

The rules are written against `Decisions`. A sequence runs them with its seeded numbers; the proofs in
`tests/lossless` run the same code over every outcome and add up the exact probabilities.
csrc/include/specdec/acceptance_rules.h has the same control flow on float32 rows, for every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.acceptance.rng import Stream, categorical, uniform

Row = NDArray[np.floating]
"""One distribution [V]."""
Rows = Callable[[int], Row]
"""Maps a node to its row; rules ask only for the rows they need."""


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


class Accepted(NamedTuple):
    """What a round decided.

    Attributes:
        path: node indices from the root token's node 0 to the last accepted node.
        next_token: the token emitted after the path.
    """

    path: list[int]
    next_token: int


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """[N] children of each node, eldest first."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from node 0 to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def without(row: Row, taken: Sequence[int]) -> NDArray[np.float64]:
    """The row [V] that is drawn from when the tokens in `taken` were drawn before: they are zero, the rest
    has the sum 1, or is zero throughout where nothing is left."""
    if not taken:
        return np.asarray(row, np.float64)
    left = np.array(row, np.float64)
    left[list(taken)] = 0.0
    total = left.sum()
    return left * (1.0 / total) if total > 0.0 else left


def emit(decide: Decisions, depth: int, left: Row, p: Row) -> int:
    """A token of what is left of the target's row p. It vanishes only where p equals the draft's row up to
    rounding; there p is its limit."""
    return decide.sample(depth, left if left.any() else p)
