"""What a `Loop` refuses when it is made, rather than in its first round."""

from __future__ import annotations

import pytest

import specdec
from loop.models import random_model
from specdec.budget import DraftBudget
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM


def test_a_name_or_a_class_is_no_model_and_no_drafter() -> None:
    model = specdec.load_model("gdn-code")
    for wrong in ("gdn-code", GatedDeltaNetForCausalLM, None):
        with pytest.raises(TypeError, match=r"^model: got .*, want a CausalLM"):
            specdec.Loop(wrong)  # type: ignore[arg-type]
    for wrong in ("ngram", specdec.NGramDrafter):
        with pytest.raises(TypeError, match=r"^drafter: got .*, want a Drafter"):
            specdec.Loop(model, wrong)  # type: ignore[arg-type]


def test_a_drafter_of_an_older_form_is_refused() -> None:
    class Old:
        name = "old"
        draws = False

        def propose(self, requests: object) -> list[object]:
            return []

    with pytest.raises(TypeError, match=r"^drafter: got .* without features, want a Drafter"):
        specdec.Loop(specdec.load_model("gdn-code"), Old())  # type: ignore[arg-type]


def test_a_budget_may_be_given_to_several_loops() -> None:
    """Each learns for itself; what rounds of a model cost is shared by loops that commit in the same way."""
    budget = DraftBudget(3, adaptive=False)
    models = [random_model(seed, num_hidden_layers=1) for seed in (0, 1)]
    loops = [specdec.Loop(m, budget=budget) for m in models]
    loops += [specdec.Loop(models[0], commit=commit, budget=budget) for commit in ("eager", "deferred")]
    assert len({id(loop.budget) for loop in loops} | {id(budget)}) == 5
    assert all((loop.budget.max_draft, loop.budget.adaptive) == (3, False) for loop in loops)
    first, other, eager, again = (loop.budget.costs for loop in loops)
    assert again is first
    assert len({id(costs) for costs in (first, other, eager, budget.costs)}) == 4
    given = DraftBudget(costs=eager)
    assert specdec.Loop(models[0], budget=given).budget.costs is eager


def test_a_model_that_cannot_be_a_key_has_costs_of_its_own() -> None:
    class Unhashable(GatedDeltaNetForCausalLM):
        __hash__ = None  # type: ignore[assignment]

    model = random_model(num_hidden_layers=1)
    model.__class__ = Unhashable
    loops = [specdec.Loop(model) for _ in range(2)]
    assert loops[0].budget.costs is not loops[1].budget.costs


def test_a_number_is_no_budget_and_no_observer() -> None:
    model = specdec.load_model("gdn-code")
    for wrong in (16, 0, DraftBudget):
        with pytest.raises(TypeError, match=r"^budget: got .*, want a DraftBudget"):
            specdec.Loop(model, budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^observer: got 5, want a RoundObserver"):
        specdec.Loop(model, observer=5)  # type: ignore[arg-type]
