"""What every rule shares: rows, trees, and how a round ends.

Conventions, here and in every rule: `p_target(node)` is the row [V] that the target samples the token after
`node` from, `p_draft(node)` the row that the token of `node` was drawn from, both after the same processing
of logits; without replacement it is the row before the tokens of elder siblings were taken out. Node 0 is the
round's root token, emitted before and accepted always; parents come before their children, and siblings count
from the eldest, the one of lowest index.

csrc/include/specdec/acceptance_rules.h has the rules with the same control flow on float32 rows, for every
backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.acceptance.decisions import Decisions, Row

Rows = Callable[[int], Row]
"""Maps a node to its row; rules ask only for the rows they need."""


class Verdict(NamedTuple):
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
