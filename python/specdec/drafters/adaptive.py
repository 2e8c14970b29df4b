"""Chooses the tiers of every round from what rounds took and brought.

Each plan, plain decoding among them, is expected to take and to bring what the arithmetic says: layers that
run, in the measured time of a layer, and tokens by how often one exit's drafts pass another
(`plan_value.py`). What rounds of the plan then take and bring counts for more and more of it. So one measured
plan tells about all of them, and a plan that looks bad by the arithmetic is tried once in a while all the
same, ever more rarely.

A clock has no say in a text whose drafts are drawn at random: such a sequence chooses for itself
(`sequence_plans.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec.drafters.plan import Plan
from specdec.drafters.plan_value import MARGIN, Passed, PlanValue
from specdec.drafters.sequence_plans import SequencePlans
from specdec.drafters.worth import Exploration
from specdec.learned import PerModel
from specdec.models.base import LayeredLM

LENGTHS = (1, 2, 3, 4, 6)  # of two tiers
INNER = (1, 2, 3)  # N_d of three
TENTATIVE = (2, 4, 6)  # N_i
MEMORY = 0.99  # of a plan's rounds, a round of that plan
BELIEF = 20.0  # rounds of a plan that the arithmetic counts for
OPTIMISM = 0.3  # of a plan that was never tried, when it is chosen which one to try
EXPLORE_EVERY = 32  # rounds; doubled until another one is clearly better than the best so far
CLEARLY = 0.02  # above the best one so far: then it is worth trying more
HELD = 4  # rounds of a plan before all are compared again, which takes a part of a round


@dataclass
class _Arm:
    """What rounds of one plan took and brought of late, in rounds, tokens and seconds."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Books a round."""
        self.rounds = MEMORY * self.rounds + 1.0
        self.tokens = MEMORY * self.tokens + tokens
        self.seconds = MEMORY * self.seconds + seconds


@dataclass
class _Learned:
    """What is known of one batch size.

    Attributes:
        arms: by plan; None is plain decoding.
        unit: seconds of a round of plain decoding, by all plans.
        best: the plan of late.
        left: rounds for which it stays so.
    """

    arms: dict[Plan | None, _Arm] = field(default_factory=dict)
    unit: _Arm = field(default_factory=_Arm)  # its tokens are units
    exploration: Exploration = field(default_factory=lambda: Exploration(EXPLORE_EVERY))
    best: Plan | None = None
    left: int = 0


class _Experience:
    """What is known of one model."""

    def __init__(self) -> None:
        self.passed = Passed()
        self.learned: dict[int, _Learned] = {}


_KNOWN = PerModel(_Experience)


def likely_plans(exits: Sequence[int]) -> list[Plan]:
    """What is worth choosing from, of exits in ascending order: two tiers by each of them, and three by each
    pair. Sequences whose drafts are drawn have the exit of the first.
    """
    plans = [Plan(exits[0], 3)]
    plans += [Plan(e, n) for e in exits for n in LENGTHS if (e, n) != (exits[0], 3)]
    for i, exit in enumerate(exits):
        plans += [Plan(exit, n, m, t) for m in exits[i + 1 :] for n in INNER for t in TENTATIVE]
    return plans


class AdaptivePlanner:
    """Chooses among plans.

    Args:
        model: the target. What was learned about it in this process is gone on from.
        plans: what to choose from; see `likely_plans`.
        int8: whether exits are read through a head in int8.
    """

    def __init__(self, model: LayeredLM, plans: Sequence[Plan], *, int8: bool = False) -> None:
        self.plans: Sequence[Plan] = tuple(plans)
        self._expected = PlanValue(model, int8=int8)
        self._experience = _KNOWN(model, torch.get_num_threads(), int8)

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        """Books that `kept` of `said` tokens of one exit were those of another."""
        self._experience.passed.observe(lower, upper, kept, said)

    def for_sequence(self) -> SequencePlans:
        """Chooses for a sequence whose drafts are drawn at random."""
        return SequencePlans(self.plans, self._expected)

    def choose(self, rows: int) -> Plan | None:
        """The plan of a round of `rows` sequences; None for plain decoding."""
        learned = self._experience.learned.setdefault(rows, _Learned())
        changed = False
        if learned.left <= 0:
            values = self._values(learned, rows)
            best = max(values, key=values.__getitem__)
            changed = values[best] > (1.0 + CLEARLY) * values.get(learned.best, 0.0)
            learned.best, learned.left = best, HELD
        learned.left -= 1
        if not learned.exploration.due(changed):
            return learned.best
        learned.left = 0  # what is tried may be the best one
        # The one that may be better than thought: what was tried little may be better by more.
        hopes = {
            plan: value * (1.0 + OPTIMISM / (1.0 + self._arm(learned, plan).rounds) ** 0.5)
            for plan, value in self._values(learned, rows).items()
            if plan != learned.best
        }
        return max(hopes, key=hopes.__getitem__)

    def _values(self, learned: _Learned, rows: int) -> dict[Plan | None, float]:
        """What every plan is expected to bring, plain decoding with the margin."""
        values = {plan: self._value(learned, plan, rows) for plan in (None, *self.plans)}
        values[None] *= 1.0 + MARGIN
        return values

    def observe(self, rows: int, plan: Plan | None, tokens: int, seconds: float) -> None:
        """Books a round of `rows` sequences: the tokens that all of them emitted, and its seconds."""
        learned = self._experience.learned.setdefault(rows, _Learned())
        unit = learned.unit
        units = self._expected.units(plan, self._experience.passed, rows)
        if unit.tokens:  # an interruption says nothing about plans
            seconds = min(seconds, 3.0 * units * unit.seconds / unit.tokens)
        unit.observe(units, seconds)
        self._arm(learned, plan).observe(tokens / rows, seconds)

    @staticmethod
    def _arm(learned: _Learned, plan: Plan | None) -> _Arm:
        return learned.arms.setdefault(plan, _Arm())

    def _value(self, learned: _Learned, plan: Plan | None, rows: int) -> float:
        """Tokens a sequence and second."""
        arm, unit, passed = self._arm(learned, plan), learned.unit, self._experience.passed
        second = unit.seconds / unit.tokens if unit.tokens else 1.0
        tokens = arm.tokens + BELIEF * self._expected.tokens(plan, passed)
        return tokens / (arm.seconds + BELIEF * second * self._expected.units(plan, passed, rows))
