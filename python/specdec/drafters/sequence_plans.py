"""Chooses the tiers of a sequence whose drafts are drawn at random, from what became of its own drafts.

Which plan a round has may follow from anything that was before it, and the text keeps its law
(docs/lossless.md). For a seed to repeat its text, it may not follow from a clock, from a neighbour in the
batch or from what ran before in the process. So a plan's time is the arithmetic's, and how often tokens pass
is counted in this sequence alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specdec.drafters.plan import Plan
from specdec.drafters.plan_value import MARGIN, Passed, PlanValue
from specdec.drafters.worth import Exploration

EXPLORE_EVERY = 32  # rounds, then ever more rarely
HELD = 4  # rounds of a plan before all are compared again


class SequencePlans:
    """The plans of one sequence.

    Rows of a round draft with the same exit and check with the same, so plans with other exits than the
    first plan's, and with other middle exits than the first one's behind it, are none of its choices.

    Args:
        plans: what to choose from, and plain decoding.
        value: the arithmetic.
    """

    def __init__(self, plans: Sequence[Plan], value: PlanValue) -> None:
        exit = plans[0].exit
        middle = next((p.middle for p in plans if p.exit == exit and p.middle), 0)
        self._plans = [p for p in plans if p.exit == exit and p.middle in (0, middle)]
        self._value = value
        self._passed = Passed()
        self._exploration = Exploration(EXPLORE_EVERY)
        self._values: dict[Plan | None, float] = {}
        self._best: Plan | None = None
        self._left = 0
        self._tries: Counter[int] = Counter()  # by tiers

    def choose(self) -> Plan | None:
        """The plan of the next round, None for plain decoding. Call it once a round."""
        if self._left <= 0:
            value, passed = self._value, self._passed
            self._values = {p: value.tokens(p, passed) / value.time(p, passed) for p in self._plans}
            self._values[None] = 1.0 + MARGIN
            self._best = max(self._values, key=self._values.__getitem__)
            self._left = HELD
        self._left -= 1
        if not self._exploration.due(False):
            return self._best
        self._left = 0  # what it tells may change the choice
        hopes = {
            p: value / (1.0 + self._tries[_tiers(p)])  # all kinds in turn
            for p, value in self._values.items()
            if p is not None and _tiers(p) != _tiers(self._best)
        }
        tried = max(hopes, key=hopes.__getitem__, default=self._best)
        self._tries[_tiers(tried)] += 1
        return tried

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        """See `SequencePlanner.accepted`."""
        self._passed.observe(lower, upper, kept, said)


def _tiers(plan: Plan | None) -> int:
    return 1 if plan is None else 1 + len(plan.spans)
