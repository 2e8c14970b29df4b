"""Chooses the tiers of every round from what rounds took and brought.

Each plan, plain decoding among them, is expected to take and to bring what the arithmetic says: layers that
run, what every pass takes besides, and tokens by how often one exit's drafts pass another (`plan_value.py`).
By how much rounds of the plan then take and bring more or less counts for more and more. So one measured plan
tells about all of them, and a plan that looks bad by the arithmetic is tried once in a while all the same,
ever more rarely. Times are in rounds of plain decoding, some of which are made to know the machine's pace.

A clock has no say in a text whose drafts are drawn at random: such a sequence chooses for itself
(`sequence_plans.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec.drafters.calibration import RunningRatio
from specdec.drafters.plan import Plan
from specdec.drafters.plan_value import MARGIN, PASS, Passed, PlanValue
from specdec.drafters.sequence_plans import SequencePlans
from specdec.drafters.worth import Exploration
from specdec.learned import PerModel
from specdec.models.base import LayeredLM

LENGTHS = (1, 2, 3, 4)  # of two tiers
INNER = (2, 3)  # N_d of three
TENTATIVE = (2, 4)  # N_i
TOKENS = 0.99, 100.0  # that a plan brings, over the arithmetic's: memory, and what that counts for
UNITS = 0.95, 10.0  # that a plan takes, over the arithmetic's
PASSES = 0.95, 10.0  # what passes take besides their layers: memory, and what the prior counts for
FIRST, AGAIN, EVERY = 4, 2, 64  # rounds of plain decoding at first, and after so many others: to compare with
PACE = 0.3  # of the latest one in what they take: machines change their pace
DRIFT, TOO_FAR = 0.2, 0.15  # of the latest round in how far rounds are off; from there on plain ones are due
TRIAL = 4  # rounds of a plan that is tried; the first one, whose weights are not at hand, tells no time
OPTIMISM = 0.3  # of a plan that was never tried, when it is chosen which one to try
EXPLORE_EVERY = 48  # rounds; doubled until another one is clearly better than the best so far
CLEARLY = 0.02  # above the best one so far: then it is worth trying more
HELD = 16  # rounds of a plan before all are compared again, which takes a part of a round


class _Arm:
    """What rounds of one plan took and brought of late, over what the arithmetic says.

    Attributes:
        rounds: how many.
        tokens, units: the ratios.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = RunningRatio(*TOKENS)
        self.units = RunningRatio(*UNITS)


@dataclass
class _Learned:
    """What is known of one batch size.

    Attributes:
        arms: by plan; None is plain decoding.
        a_pass: rounds of plain decoding that a pass takes besides its layers.
        second: of a round of plain decoding; 0 before any.
        since: rounds since plain decoding was measured.
        forced: rounds to come of `plan`, whatever is best: of plain decoding, with which all others are
            compared, and of plans that are tried.
        off: what rounds of late took over what was expected of them.
        plan: of this round.
        booked: whether the round before had the same one.
        fresh: whether the text is new. Rounds without drafts say nothing of what drafts would bring, so it
            begins with some, even if plain decoding was the best.
        exploration: says when a plan that is not the best is tried.
        best: the plan of late.
        left: rounds for which it stays so.
    """

    arms: dict[Plan | None, _Arm] = field(default_factory=dict)
    a_pass: RunningRatio = field(default_factory=lambda: RunningRatio(*PASSES, PASS))
    second: float = 0.0
    since: int = 0
    forced: int = FIRST
    off: float = 1.0
    plan: Plan | None = None
    booked: bool = False
    fresh: bool = True
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
        adapted: exits that are read through adapters; what is learned of others is none of these.

    Attributes:
        plans: as given.
    """

    def __init__(
        self, model: LayeredLM, plans: Sequence[Plan], *, int8: bool = False, adapted: Sequence[int] = ()
    ) -> None:
        self.plans: Sequence[Plan] = tuple(plans)
        self._expected = PlanValue(model, int8=int8)
        self._experience = _KNOWN(model, torch.get_num_threads(), int8, tuple(adapted))
        self._round: _Learned | None = None  # what the round is booked to whose plan was chosen

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        """Books that `kept` of `said` tokens of one exit were those of another."""
        self._experience.passed.observe(lower, upper, kept, said)

    def for_sequence(self) -> SequencePlans:
        """Chooses for a sequence whose drafts are drawn at random."""
        return SequencePlans(self.plans, self._expected)

    def begin(self, slots: int) -> None:
        """A new text is one of so many sequences."""
        self._experience.passed.begin(1.0 / slots)
        for learned in self._experience.learned.values():
            learned.left, learned.fresh = 0, True
        self._round = None

    def rests(self, rows: int) -> bool:
        """Whether a round is plain decoding."""
        self._round = None
        return self.choose(rows) is None

    def choose(self, rows: int) -> Plan | None:
        """The plan of a round of `rows` sequences; None for plain decoding."""
        learned = self._experience.learned.setdefault(rows, _Learned())
        if self._round is None:
            plan = self._chosen(learned, rows)
            learned.booked, learned.plan = plan == learned.plan, plan
            self._round = learned
        return learned.plan

    def _chosen(self, learned: _Learned, rows: int) -> Plan | None:
        learned.since += 1
        if learned.forced > 0:
            learned.forced -= 1
            return learned.plan
        if learned.since > EVERY:
            learned.since, learned.forced = 0, AGAIN - 1
            return None
        changed = False
        if learned.left <= 0:
            values = self._values(learned, rows)
            best = max(values, key=values.__getitem__)
            changed = values[best] > (1.0 + CLEARLY) * values.get(learned.best, 0.0)
            learned.best, learned.left = best, HELD
        learned.left -= 1
        tries = learned.exploration.due(changed) or (learned.fresh and learned.best is None)
        learned.fresh = False
        if not tries:
            return learned.best
        learned.left, learned.forced = 0, TRIAL - 1  # what is tried may be the best one
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

    def observe(self, rows: int, nodes: int, tokens: int, seconds: float, rested: bool) -> None:
        """Books a round; see `RoundPlanner.observe`."""
        learned, self._round = self._round, None
        if learned is None or (nodes == 1) != (learned.plan is None):
            return  # sequences had plans of their own, or no draft was allowed
        plan, passed = learned.plan, self._experience.passed
        arm = self._arm(learned, plan)
        arm.rounds += 1
        arm.tokens.observe(tokens / rows, self._expected.tokens(plan, passed))
        if not learned.booked:
            return
        layers, passes = self._expected.units(plan, passed, rows), self._expected.passes(plan, passed)
        expected = layers + learned.a_pass.value * passes
        if not learned.second:
            learned.second = seconds
        elif plan is None:
            learned.second += PACE * (min(seconds, 2.0 * learned.second) - learned.second)
            learned.off = 1.0
        took = min(seconds / learned.second, 3.0 * expected)  # an interruption says nothing about plans
        learned.off += DRIFT * (took / (arm.units.value * expected) - learned.off)
        if abs(learned.off - 1.0) > TOO_FAR and plan is not None:
            learned.since = max(learned.since, EVERY)  # the machine may have changed its pace
        if passes:
            learned.a_pass.observe(took - layers, passes)
        arm.units.observe(took, expected)

    @staticmethod
    def _arm(learned: _Learned, plan: Plan | None) -> _Arm:
        return learned.arms.setdefault(plan, _Arm())

    def _value(self, learned: _Learned, plan: Plan | None, rows: int) -> float:
        """Tokens a sequence in the time of a round of plain decoding."""
        arm, passed = self._arm(learned, plan), self._experience.passed
        units = self._expected.time(plan, passed, rows, learned.a_pass.value)
        tokens = self._expected.tokens(plan, passed)
        return arm.tokens.value * tokens / (arm.units.value * units)
