"""From what a drafter thinks of a token to the chance that the target keeps it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from specdec.tree import TokenTree

EDGES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
RANKS = 3  # the likeliest child, the second, all others
WEIGHT = 12.0  # tokens that the drafter's own word counts for
MEMORY = 0.998
# Of a greedy first child the chance is the probability to this power: the best fit to the shipped drafter.
GREEDY = 0.35
MOST = 0.995  # no draft is certain


class RunningRatio:
    """What was kept over what was said or seen, of late.

    Args:
        memory: what stays of the past with each observation.
        weight: what the prior counts for, in what is said.
        prior: the ratio before anything was observed.

    Attributes:
        value: the ratio.
    """

    __slots__ = ("_kept", "_memory", "_prior", "_said", "_weight", "value")

    def __init__(self, memory: float, weight: float, prior: float = 1.0) -> None:
        self._memory = memory
        self._weight = weight
        self._prior = weight * prior
        self._kept = self._said = 0.0
        self.value = prior

    @property
    def said(self) -> float:
        """What was said of late."""
        return self._said

    def mixed(self, prior: float) -> float:
        """The ratio with another prior."""
        return (self._kept + self._weight * prior) / (self._said + self._weight)

    def observe(self, kept: float, said: float = 1.0) -> None:
        """Books what was kept of what was said."""
        self._kept = self._memory * self._kept + kept
        self._said = self._memory * self._said + said
        self.value = (self._kept + self._prior) / (self._said + self._weight)


class Calibration:
    """Running chance that a drafted token is kept, given that its parent was.

    By the token's probability in the drafter's row and its rank among its siblings: within a bin of
    probabilities the chance is a multiple of the probability, learned from what became of the drafts. At
    first the drafter is taken at its word where tokens are sampled. A greedy target keeps its likeliest
    token, which a good drafter shares however unsure both are: there a first child is trusted more.

    Args:
        greedy: whether it is for greedy requests.

    Attributes:
        table: float64 [RANKS, bins] the multiples.
    """

    def __init__(self, greedy: bool) -> None:
        # What the prior says of a bin is as much as WEIGHT tokens of its middle say.
        middles = [0.5 * (low + high) for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        self._ratios = [
            [
                RunningRatio(
                    MEMORY, WEIGHT * middle, middle ** (GREEDY - 1.0) if greedy and rank == 0 else 1.0
                )
                for middle in middles
            ]
            for rank in range(RANKS)
        ]
        self.table = np.array([[ratio.value for ratio in row] for row in self._ratios])

    def __call__(self, probability: float, rank: int) -> float:
        """The chance of the child of this rank (0: the likeliest)."""
        ratio = self._ratios[rank if rank < RANKS else RANKS - 1][bisect(EDGES, probability)]
        return min(probability * ratio.value, MOST)

    def observe(self, probability: float, rank: int, kept: bool) -> None:
        """Books what became of a child whose parent was kept."""
        rank, place = min(rank, RANKS - 1), bisect(EDGES, probability)
        ratio = self._ratios[rank][place]
        ratio.observe(kept, probability)
        self.table[rank, place] = ratio.value


def outcomes(tree: TokenTree, emitted: Sequence[int]) -> list[tuple[int, bool]]:
    """What the emitted tokens say about a tree, verified or not: (node, whether it was right) for every node
    whose parent was.
    """
    right = {-1: 0}  # nodes on the emitted path: their depth
    told = []
    last = len(emitted)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        depth = right.get(parent, last)
        if depth < last:
            kept = token == emitted[depth]
            told.append((node, kept))
            if kept:
                right[node] = depth + 1
    return told
