"""Some layers of the target over the nodes of a round, run pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.cache import DecodingCache, LayerEntries, LayerFactors, PendingRound, Round, Steps
from specdec.cache.rounds import taker
from specdec.models.base import LayeredLM
from specdec.ops import GrownTrees


class Work:
    """What a drafter that is a part of its target had its layers do.

    Attributes:
        passes: calls of a layer, whatever was in them: weights were read that often.
        tokens: nodes that a layer was run for, over all layers; rows of a batch count each.
        checks: times that a middle exit checked drafts.
    """

    def __init__(self) -> None:
        self.passes = self.tokens = self.checks = 0

    def book(self, layers: int, nodes: int, passes: int = 1) -> None:
        """So many passes of so many layers, over so many nodes of all rows together."""
        self.passes += passes * layers
        self.tokens += layers * nodes


class Stage:
    """Layers of the target over the nodes of one round: their hidden states and entries, a column a node.

    A column stays where it is until `arrange`; a row's columns may be others than its neighbour's.

    Args:
        model: the target.
        cache: its memory, which is read.
        layers: which ones.
        slots: int32 [B].
        pending: what the cache handed out for these slots, which the first pass folds in.
        work: is told of every pass.
    """

    def __init__(
        self,
        model: LayeredLM,
        cache: DecodingCache,
        layers: range,
        slots: Tensor,
        pending: PendingRound | None,
        work: Work,
    ) -> None:
        self._model, self._cache, self.layers = model, cache, layers
        self._slots, self._pending, self._work = slots, pending, work
        self._steps = Steps()
        self._hidden: Tensor | None = None  # [B, C, D] after the last of the layers

    @property
    def columns(self) -> int:
        """Nodes so far, of every row."""
        return len(self._steps)

    @property
    def steps(self) -> Steps:
        """What the layers made of all columns, as a prefix of further nodes."""
        return self._steps

    @property
    def round(self) -> Round:
        """What the layers made of all columns."""
        assert self._steps.round is not None, "nothing was run"
        return self._steps.round

    @property
    def hidden(self) -> Tensor:
        """[B, C, D] the hidden states after the last of the layers."""
        assert self._hidden is not None, "nothing was run"
        return self._hidden

    def run(self, x: Tensor, above: Sequence[Sequence[int]]) -> Tensor:
        """Runs new nodes; they get the next columns.

        Args:
            x: [B, N, D] what goes into the first of the layers; beyond a row's nodes it means nothing.
            above: of each row the columns of its nodes' parents, those of this call counted on; -1 for a
                root. Its length says how many nodes a row has.

        Returns:
            [B, N, D] their hidden states after the last of the layers.
        """
        steps, nodes = self._steps, x.shape[1]
        first = len(steps)
        lengths = [len(row) for row in above]
        full = min(lengths) == nodes
        parents = None
        if steps.parents is not None or not _goes_on(above, first, full):
            parents = torch.from_numpy(
                np.array([[*row, *[-1] * (nodes - len(row))] for row in above], np.int32)
            )
        pending, self._pending = self._pending, None
        y, round = self._model.run_layers(
            x,
            self.layers,
            cache=self._cache,
            slots=self._slots,
            parents=parents,
            lengths=None if full else torch.from_numpy(np.array(lengths, np.int32)),
            pending=pending,
            prefix=steps if first else None,
        )
        steps.extend(round)
        self._hidden = y if self._hidden is None else torch.cat([self._hidden, y], dim=1)
        self._work.book(len(self.layers), sum(lengths))
        return y

    def take(self, grown: GrownTrees) -> None:
        """Takes the nodes that `LayeredLM.grow` ran through these layers after those that are there."""
        layers: list[LayerEntries] = [None] * len(self.round.layers)
        for layer, entries in zip(self.layers, grown.entries, strict=True):
            layers[layer] = LayerFactors(*entries)
        old, nodes = self.round, grown.outputs.shape[1]
        self._steps.round = Round(tuple(layers), old.slots, grown.parents, nodes)
        self._hidden = grown.outputs
        run = sum(column >= old.nodes for tree in grown.trees for column in tree.columns)
        self._work.book(len(self.layers), run, passes=max(grown.levels - 1, 0))

    def arrange(self, rows: Sequence[Sequence[int]]) -> None:
        """Keeps these columns of each row, in this order, and drops all others; see `Steps.arrange`."""
        width = max(map(len, rows))
        in_turn = all(list(row) == list(range(width)) for row in rows)
        if in_turn and width == self.columns:
            return
        self._steps.arrange(rows)
        self._hidden = taker(rows)(self.hidden)


class StageNodes(NamedTuple):
    """What one row of a batch wants every stage to have run.

    Attributes:
        kept: its first columns, which stay: a chain of nodes before these.
        columns: of each node its column in a stage that has run it; -1 where it was not run.
        parents: of each node the one above, -1 where that is the last kept column.
    """

    kept: int
    columns: Sequence[int]
    parents: Sequence[int]


def complete(stage: Stage, x: Tensor, rows: Sequence[StageNodes]) -> Tensor:
    """Runs the nodes that a stage has not run, all in one pass, and drops the columns of all others: what is
    left of each row is what it keeps, then its nodes in their order.

    Args:
        stage: which layers.
        x: [B, N, D] what goes into the first of them, of all nodes.
        rows: [B] their nodes, none of rows that take no part. The columns are those of this stage.

    Returns:
        [B, N, D] the nodes' hidden states after the last of the layers.
    """
    missing = [[i for i, column in enumerate(row.columns) if column < 0] for row in rows]
    order = [[*range(row.kept), *row.columns] for row in rows]
    if any(missing):
        first, above = stage.columns, []
        for row, nodes, columns in zip(rows, missing, order, strict=True):
            for place, node in enumerate(nodes):
                columns[row.kept + node] = first + place
            parents = [row.parents[node] for node in nodes]
            above.append([columns[row.kept + p] if row.kept + p >= 0 else -1 for p in parents])
        stage.run(taker(missing)(x), above)
    stage.arrange(order)
    return taker([list(range(row.kept, row.kept + len(row.columns))) for row in rows])(stage.hidden)


def _goes_on(above: Sequence[Sequence[int]], first: int, full: bool) -> bool:
    """Whether every row is a chain that goes on where the last column is."""
    return full and all(list(row) == list(range(first - 1, first - 1 + len(row))) for row in above)
