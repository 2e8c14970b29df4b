"""Tiers that are chosen online: where the best plan is known, nearly all of its speed is reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.drafters.adaptive import AdaptivePlanner, likely_plans
from specdec.drafters.plan import Plan
from specdec.drafters.sequence_plans import SequencePlans
from specdec.models.base import LayeredLM

LAYERS, HEAD = 10, 1.5  # of a model like gdn-code, the head in layers
PLANS = likely_plans((2, 5))
# How often a token of an exit is another's: (2, 5), (5, 10), (2, 10); the price of a further node of a pass.
WORLDS = {
    "three tiers": ((0.9, 0.95, 0.6), 0.01),
    "two tiers": ((0.55, 0.6, 0.75), 0.02),
    "plain": ((0.2, 0.2, 0.1), 0.3),
}


class Model(SimpleNamespace):
    """What the planner reads of a model."""

    __hash__ = object.__hash__


def model() -> LayeredLM:
    head = SimpleNamespace(in_features=15, out_features=10)
    found: Any = Model(num_layers=LAYERS, num_parameters=150 + 1000, head=head)
    return found  # type: ignore[no-any-return]


Told = AdaptivePlanner | SequencePlans


class World:
    """Rounds of a model: what they take, in layers, and what they bring."""

    def __init__(self, name: str, seed: int = 0) -> None:
        (low, high, far), self.node = WORLDS[name]
        self.chances = {(2, 5): low, (5, LAYERS): high, (2, LAYERS): far}
        self.random = np.random.default_rng(seed)

    def run(self, plan: Plan | None, planner: Told | None = None) -> tuple[int, float]:
        """Tokens and seconds of a round."""
        if plan is None:
            return 1, LAYERS + HEAD
        layers = 0.0
        if not plan.middle:
            layers += plan.length * (plan.exit + HEAD)
            came, lower = plan.length, plan.exit
        else:
            came, lower = 0, plan.middle
            while came < plan.tentative:
                layers += plan.length * (plan.exit + HEAD) + plan.exit
                layers += (plan.middle - plan.exit + HEAD) * (1.0 + self.node * plan.length)
                kept = self.kept(plan.exit, plan.middle, plan.length, planner)
                came += kept + 1
        layers += lower + (LAYERS - lower + HEAD) * (1.0 + self.node * came)
        return 1 + self.kept(lower, LAYERS, came, planner), layers * float(self.random.uniform(0.95, 1.05))

    def kept(self, lower: int, upper: int, drafts: int, planner: Told | None) -> int:
        """Drafts that pass."""
        wrong = np.flatnonzero(self.random.random(drafts) >= self.chances[lower, upper])
        kept = int(wrong[0]) if len(wrong) else drafts
        if planner is not None:
            planner.accepted(lower, upper, kept, min(kept + 1, drafts))
        return kept

    def rate(self, plan: Plan | None, rounds: int = 1500) -> float:
        """Tokens a second of one plan."""
        told = np.array([self.run(plan) for _ in range(rounds)]).sum(axis=0)
        return float(told[0] / told[1])


@pytest.mark.parametrize("name", WORLDS)
def test_nearly_all_of_the_best_plans_speed_is_reached(name: str) -> None:
    world = World(name)
    rates = {plan: world.rate(plan) for plan in (None, *PLANS)}
    best = max(rates, key=rates.__getitem__)
    kind = "plain" if best is None else "three tiers" if best.middle else "two tiers"
    assert kind == name
    planner = AdaptivePlanner(model(), PLANS)
    told = []
    for _ in range(2500):
        plan = planner.choose(1)
        tokens, seconds = world.run(plan, planner)
        planner.observe(1, 1 if plan is None else 2, tokens, seconds, False)
        tried = plan != planner._experience.learned[1].best
        told.append((tokens, seconds, seconds * tried * (1.0 - rates[plan] / rates[best])))
    tokens, seconds, lost = np.array(told[500:]).sum(axis=0)
    assert tokens / seconds / rates[best] > 0.95  # plans differ by less than what their rounds tell for long
    assert lost < 0.02 * seconds  # by tries


def told(chances: dict[tuple[int, int], float], rounds: int = 400) -> list[Plan | None]:
    """The plans of a sequence's rounds in a world of these chances."""
    world = World("plain")
    world.chances = chances
    plans, chosen = AdaptivePlanner(model(), PLANS).for_sequence(), []
    for _ in range(rounds):
        chosen.append(plans.choose())
        if chosen[-1] is not None:
            world.run(chosen[-1], plans)
    return chosen


def test_a_sequence_takes_the_tiers_that_its_own_drafts_speak_for() -> None:
    poor = told({(2, 5): 0.1, (5, LAYERS): 0.1, (2, LAYERS): 0.1})
    assert poor[-200:].count(None) > 190
    assert 0 < sum(plan is not None for plan in poor[64:]) < 12  # now and then it tries all the same
    two = told({(2, 5): 0.5, (5, LAYERS): 0.5, (2, LAYERS): 0.9})
    assert sum(plan is not None and not plan.middle for plan in two) > 380
    three = told({(2, 5): 0.9, (5, LAYERS): 0.97, (2, LAYERS): 0.5}, 600)
    assert sum(plan is not None and plan.middle == 5 for plan in three[300:]) > 280
    assert three == told({(2, 5): 0.9, (5, LAYERS): 0.97, (2, LAYERS): 0.5}, 600)  # no clock


def test_sequences_draft_and_check_with_the_same_exits() -> None:
    plans = AdaptivePlanner(model(), likely_plans((2, 5, 7))).for_sequence()
    chosen = {plans.choose() for _ in range(200)}
    assert all(plan is None or (plan.exit == 2 and plan.middle in (0, 5)) for plan in chosen)


def test_what_was_learned_outlives_a_planner_and_an_interruption_does_not() -> None:
    world, target = World("three tiers"), model()
    planner = AdaptivePlanner(target, PLANS)
    for _ in range(400):
        plan = planner.choose(1)
        planner.observe(1, 1 if plan is None else 2, *world.run(plan, planner), False)
    again = AdaptivePlanner(target, PLANS)
    plan = next(plan for plan in chosen(again, 3) if plan is not None)  # two of plain decoding may be due
    assert plan is not None
    assert plan.middle
    other = AdaptivePlanner(target, PLANS, adapted=(2, 5))  # whose exits pass more or less often
    assert other._experience is not again._experience
    again.choose(1)
    again.observe(1, 2, 3, 1e6, False)  # a machine that slept
    assert sum(plan is None for plan in chosen(again, 20)) <= 2


def test_plain_rounds_are_known_before_the_drafter_is_asked() -> None:
    world, planner = World("plain"), AdaptivePlanner(model(), PLANS)
    rested = 0
    for number in range(400):
        if number % 40 == 0:
            planner.begin(1)
        rests = planner.rests(1)
        plan = planner.choose(1)
        assert rests == (plan is None)
        rested += rests
        planner.observe(1, 1 if rests else 2, *world.run(plan, planner), rests)
    assert 300 < rested < 400  # new texts begin with drafts
    # A round of others in between has no plan of this batch size, and is none of its business.
    before = planner._experience.learned[1].arms[None].rounds
    planner.observe(1, 1, 1, 0.1, False)
    assert planner._experience.learned[1].arms[None].rounds == before


def chosen(planner: AdaptivePlanner, rounds: int) -> list[Plan | None]:
    """The plans of so many rounds, of which nothing is told."""
    found = []
    for _ in range(rounds):
        planner.rests(1)
        found.append(planner.choose(1))
    return found
