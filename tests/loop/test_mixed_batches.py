"""Greedy and drawn drafts in one batch, for which drafts are made otherwise than for each alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from unittest.mock import patch

from loop import test_at_once as at_once
from loop.models import random_model
from loop.recurrent import random_drafter
from specdec.acceptance import SamplingParams
from specdec.budget import DraftBudget
from specdec.drafters import DraftRequest, Proposal, combined
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.draft_exit import StaticThreshold
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.skipping import SkipSet


def test_drawn_rounds_are_not_booked_as_seconds_of_one_round() -> None:
    """A greedy text that a sampled one joins for a while, and that is alone again then."""
    model = random_model(4, num_hidden_layers=2, eos_token_ids=(0,))
    adapted = RecurrentDrafter(random_drafter(model, 1), slots=2)
    drafter = CombinedDrafter(NGramDrafter(), adapted)
    loop = Loop(model, drafter, slots=2, budget=DraftBudget(4, adaptive=False))
    rounds = count()
    booked: list[float] = []

    class Following(combined._Following):
        def observe(self, which: int, tokens: float, seconds: float) -> None:
            booked.append(seconds)

    drafter._following = Following()
    clock = [0.0]
    propose = drafter.propose

    def counted(requests: Sequence[DraftRequest]) -> list[Proposal]:
        clock[0] = float(next(rounds))  # a round takes a second
        return propose(requests)

    drafter.propose = counted  # type: ignore[method-assign]
    greedy = Request([3, 5, 7], 150, ignore_eos=True)
    short = Request([3, 9], 5, ignore_eos=True)  # before the sampled one comes
    sampled = Request([4, 8], 60, SamplingParams(temperature=1.0, seed=1), ignore_eos=True)
    with patch.object(combined, "perf_counter", lambda: clock[0]):
        loop.run([greedy, short, sampled])
    assert booked
    assert max(booked) <= 1.0, max(booked)


def test_drafts_with_a_sure_drafter_are_the_same_at_once_and_level_by_level() -> None:
    """Near a threshold, here that of certainty, where the last bit of a confidence counts."""

    def sharp(seed: int, **options: Any) -> GatedDeltaNetForCausalLM:
        model = random_model(seed, **options)
        model._final_norm = model._final_norm * 10.0
        return model

    with patch.object(at_once, "random_model", sharp):
        make = at_once.layer_skip(exit=StaticThreshold(1.0), vocabulary=range(0, 61, 2))
        one, levels = (at_once.told(make, at_once.DRAWN["temperature"], levels=x) for x in (False, True))
    assert [p.tree for p in one.proposals] == [p.tree for p in levels.proposals]


def test_a_seed_repeats_its_text_beside_a_greedy_neighbour() -> None:
    """Alone its drafts are grown in one call, beside others level by level."""
    model = random_model(3, num_hidden_layers=4, eos_token_ids=(0,))
    model._final_norm = model._final_norm * 11.0
    sampling = SamplingParams(temperature=3.0, seed=802)
    request = Request([5, 5, 7], 80, sampling, ignore_eos=True)
    greedy = Request([9, 9], 200, ignore_eos=True)

    def run(*requests: Request) -> list[int]:
        view = model.skipping(SkipSet.of([1], [2]), range(0, 61, 2))
        drafter = LayerSkipDrafter(view, model.new_cache(2), exit=StaticThreshold(1.0))
        budget = DraftBudget(6, adaptive=False, whole=True)
        return Loop(model, drafter, slots=2, budget=budget, cache=drafter.cache).run(requests)[0].tokens

    assert run(request) == run(request, greedy)
