"""What is learned about drafting with a model, beyond one drafter and one loop."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from specdec._host import MAX_SERIAL_NODES
from specdec.drafters.calibration import EDGES, MOST, Calibration
from specdec.drafters.shape import TreeShape
from specdec.drafters.tree import MOST_RUN, GrowingTree
from specdec.drafters.worth import SecondsOfLate, Worth
from specdec.learned import PerModel
from specdec.models.base import DraftModel
from specdec.ops import TreeRules

CHILD = 0.02  # of what is known of best children, for each that is seen


class Experience:
    """What drafting with one model, trees of one shape and a number of threads has shown.

    Attributes:
        calibration: by whether a request is greedy.
        worth: whether drafting pays.
        best_child: chance of a node's likeliest child.
    """

    def __init__(self) -> None:
        self.calibration = {greedy: Calibration(greedy) for greedy in (True, False)}
        tables = np.stack([calibration.table for calibration in self.calibration.values()])
        for calibration, table in zip(self.calibration.values(), tables, strict=True):
            calibration.table = table  # a view, so that `_ratios` is always as it is
        self._ratios = torch.from_numpy(tables)  # [2, RANKS, bins], that of greedy requests first
        self._edges = torch.tensor(EDGES, dtype=torch.float64)
        self.worth = Worth()
        self.best_child = 0.7
        self._level_seconds: dict[int, SecondsOfLate] = {}

    def level_seconds(self, rows: int) -> SecondsOfLate:
        """Of a level after the first, of so many rows."""
        return self._level_seconds.setdefault(rows, SecondsOfLate())

    def see_child(self, chance: float) -> None:
        """Books the likeliest child of a node."""
        self.best_child += CHILD * (chance - self.best_child)

    def see_children(self, tree: GrowingTree) -> None:
        """Books the likeliest children of all nodes of a tree."""
        chances = tree.chances
        for chance, parent, (_, rank) in zip(chances, tree.parents, tree.said, strict=True):
            # A cold row's other children may have no chance at all, which says nothing of theirs.
            if parent >= 0 and rank == 0 and chances[parent] > 0.0:
                self.see_child(chance / chances[parent])

    def rules(
        self, shape: TreeShape, level_price: float, ends: Tensor, vocabulary: Tensor | None
    ) -> TreeRules:
        """How trees grow, as `ops.draft_tree` takes it.

        Args:
            shape: of the trees.
            level_price: expected tokens that a level must bring.
            ends: int64 [E] tokens that end a text.
            vocabulary: int64 [V'] tokens of the columns of the drafter's logits; None: all.
        """
        return TreeRules(
            branching=shape.branching,
            tau=shape.tau,
            ratios=self._ratios,
            edges=self._edges,
            most_chance=MOST,
            child_chance=self.best_child,
            level_price=level_price,
            most_run=MOST_RUN,
            most_nodes=MAX_SERIAL_NODES,
            ends=ends,
            vocabulary=vocabulary,
        )


_KNOWN = PerModel(Experience)


def experience_of(model: DraftModel, shape: TreeShape, *settings: Hashable) -> Experience:
    """What was learned in this process, with the number of threads that torch has now.

    Args:
        model: what drafts.
        shape: of the trees.
        settings: what else its drafts depend on.
    """
    return _KNOWN(model, shape, torch.get_num_threads(), *settings)
