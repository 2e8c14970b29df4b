"""What a verification costs, learned while it runs.

The time of a round is no line in its nodes: on a CPU it jumps where the rows of a matrix product no longer
fit the registers, and a batch has its own curve. So for every batch size the time is a known shape times a
correction at each number of nodes that was seen, between which corrections are interpolated.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock

import torch

from specdec.learned import PerModel
from specdec.models.base import CausalLM

# A starting guess, from a few rounds of gdn-code on two cores of a Xeon: (rows of the matrix products, time
# in that of one row). Up to eight rows share a pass over the weights. The machine's own is learned from here.
SHAPE = ((1, 1.0), (8, 1.46), (9, 2.0), (32, 4.9), (64, 7.0), (128, 10.5))
SEQUENCE = 0.1  # of the time of one row, for the state of each further sequence; a guess too
# Of a correction, for each measurement that is faster or slower than thought: what interrupts a round only
# makes it slower, and a size that seems dear is not tried again, so bad luck must not last.
FASTER, SLOWER = 0.25, 0.05
FIRST = 0.3  # of the first measurement at a number of nodes
STALE = 256  # rounds of a batch size after which a correction that was not seen again is forgotten


@lru_cache(maxsize=4096)
def prior_cost(rows: int, nodes: int) -> float:
    """The time of a round of `rows` sequences of `nodes` nodes, in that of one node, before any was seen."""
    every = rows * nodes
    above = min(bisect_left(SHAPE, (every,)), len(SHAPE) - 1)
    (n0, t0), (n1, t1) = SHAPE[max(above - 1, 0)], SHAPE[max(above, 1)]
    return t0 + (t1 - t0) * (every - n0) / (n1 - n0) + SEQUENCE * (rows - 1)


@dataclass
class _Knot:
    """A number of nodes that was seen: its correction, how often, and when last."""

    ratio: float
    count: int
    seen: int


@dataclass
class _Curve:
    """One batch size."""

    knots: dict[int, _Knot] = field(default_factory=dict)
    rounds: int = 0
    table: list[float] = field(default_factory=list)  # seconds by nodes, up to the most asked for


class RoundCost:
    """Seconds of a round by the sequences in it and the nodes of the longest.

    It never falls with the nodes. A measurement above the estimate may be an interruption, not a cost, and
    counts for less than one below.
    """

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}
        self._lock = Lock()  # loops of one model share it, and may run in several threads

    def observe(self, rows: int, nodes: int, seconds: float) -> None:
        """Books a measured round of `rows` sequences padded to `nodes` nodes each."""
        with self._lock:
            self._observe(rows, nodes, max(seconds, 1e-9))  # a coarse clock must not make rounds free

    def _observe(self, rows: int, nodes: int, seconds: float) -> None:
        curve = self._curves.get(rows)
        if curve is None:
            curve = self._curves[rows] = self._like(rows)
        curve.rounds += 1
        if curve.rounds == 2:
            # The first round ran with cold caches; kept, it would stand for its size until that came again.
            curve.knots = {n: k for n, k in curve.knots.items() if k.seen == 0}
        prior = prior_cost(rows, nodes)
        knot = curve.knots.get(nodes)
        if knot is None:
            guess = self._ratio(curve, nodes)
            # A first round of a size is often slow: it says less than the neighbours and the shape.
            ratio = seconds / prior
            if guess is not None:
                ratio = guess + FIRST * (min(ratio, 1.5 * guess) - guess)
            curve.knots[nodes] = _Knot(ratio, 1, curve.rounds)
        else:
            knot.count += 1
            knot.seen = curve.rounds
            new = min(seconds / prior, 1.5 * knot.ratio)
            rate = FASTER if new < knot.ratio else SLOWER
            knot.ratio += max(1.0 / knot.count, rate) * (new - knot.ratio)
        if curve.rounds % STALE == 0:
            last = curve.rounds - STALE
            curve.knots = {n: k for n, k in curve.knots.items() if k.seen > last}
        curve.table = []

    def __call__(self, rows: int, nodes: int) -> float:
        """Estimated seconds; in units of a round of one node as long as none was seen."""
        return self.up_to(rows, nodes)[nodes]

    def up_to(self, rows: int, nodes: int) -> list[float]:
        """Estimated seconds of rounds of 0, 1, ... at least `nodes` nodes; the first is 0."""
        with self._lock:
            return self._up_to(rows, nodes)

    def _up_to(self, rows: int, nodes: int) -> list[float]:
        curve = self._curves.get(rows)
        if curve is None:
            curve = self._like(rows)
        if len(curve.table) <= nodes:
            table, known = [0.0], sorted(curve.knots)
            for n in range(1, max(nodes, 16) + 1):
                ratio = self._ratio(curve, n, known)
                table.append(max(table[-1], prior_cost(rows, n) * (1.0 if ratio is None else ratio)))
            curve.table = table
        return curve.table

    def _like(self, rows: int) -> _Curve:
        """A curve for a batch size that was not seen, from the nearest one that was."""
        near = min(self._curves, key=lambda r: abs(r - rows), default=None)
        if near is None:
            return _Curve()
        return _Curve({n: _Knot(k.ratio, 1, 0) for n, k in self._curves[near].knots.items()})

    @staticmethod
    def _ratio(curve: _Curve, nodes: int, known: list[int] | None = None) -> float | None:
        """The correction at a number of nodes; None where nothing was seen."""
        knots = curve.knots
        if nodes in knots:
            return knots[nodes].ratio
        known = sorted(knots) if known is None else known
        if not known:
            return None
        place = bisect(known, nodes)
        if place in (0, len(known)):
            return knots[known[0 if place == 0 else -1]].ratio
        low, high = known[place - 1], known[place]
        part = (nodes - low) / (high - low)
        return (1.0 - part) * knots[low].ratio + part * knots[high].ratio


_COSTS = PerModel(RoundCost)


def costs_of(model: CausalLM, *, deferred: bool, begun: bool = False) -> RoundCost:
    """What was learned about this model in this process, with the number of threads that torch has now. Costs
    are a matter of the machine, not of a text: loops share them.

    Args:
        model: the target. One that is not hashable or takes no weak references gets new costs in every loop.
        deferred: whether its loop commits late: such rounds do the work in another place.
        begun: whether its drafter has done a part of a verification when it begins.
    """
    return _COSTS(model, torch.get_num_threads(), deferred, begun)
