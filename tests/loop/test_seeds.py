"""A seed fixes a text: at any batch size, in any order, with drafts that are drawn at random as well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loop.models import random_model
from specdec.acceptance import SamplingParams, SeededDecisions, process_logits
from specdec.audit import CacheAuditor
from specdec.drafters.model import ModelDrafter
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_draws_its_own_numbers(seed, model):
    """The operators take a seed's 64 bits; the first token is that of the rule in Python."""
    params = SamplingParams(temperature=1.5, seed=seed)
    prompt = (5, 5, 6, 40)
    logits = model.prefill([prompt], cache=model.new_cache(1), slots=[0])[0]
    want = SeededDecisions(seed, len(prompt)).sample(0, process_logits(logits, params).numpy())
    assert Loop(model).run([Request(prompt, max_new_tokens=1, sampling=params)])[0].tokens == [want]


def test_unseeded_runs_report_a_seed_that_repeats_them(model):
    sampling = SamplingParams(temperature=1.0)
    first = Loop(model).run([Request([4, 5], max_new_tokens=20, sampling=sampling, ignore_eos=True)])[0]
    again = Request([4, 5], max_new_tokens=20, sampling=replace(sampling, seed=first.seed), ignore_eos=True)
    assert Loop(model).run([again])[0].tokens == first.tokens
    other = Loop(model).run([Request([4, 5], max_new_tokens=20, sampling=sampling, ignore_eos=True)])[0]
    assert other.seed != first.seed


class PricedDrafter(ModelDrafter):
    """Says what a step costs, which decides how much the default budget drafts."""

    cost = 0.0

    def step_cost(self, target):
        return self.cost


@pytest.mark.parametrize(
    ("branching", "rule", "cost"),
    [
        ((1,), "block", 0.05),
        ((1,), "block", 0.4),
        ((2, 2, 1), "auto", 0.05),
        ((2, 1), "speculative", 0.4),
        ((2, 1), "k-seq", 0.05),
    ],
)
def test_a_seed_repeats_drawn_drafts_at_any_batch_and_in_any_order(branching, rule, cost, model):
    """How much a sampled sequence drafts must not come from the clock, nor from greedy neighbours. Ragged
    ends, the default budget; the cache is compared with plain decoding's after every round."""
    other = random_model(9, num_hidden_layers=1)
    sampled = [
        SamplingParams(temperature=0.5 + 0.2 * i, seed=i, top_k=30, presence_penalty=0.1 * i)
        for i in range(5)
    ]
    requests = [
        Request([3 + i, 5, 7], max_new_tokens=40 - 3 * i, ignore_eos=i % 2 == 0, sampling=params)
        for i, params in enumerate([*sampled, SamplingParams()])
    ]
    runs = []
    for slots, order in ((1, 1), (4, 1), (6, -1), (1, 1)):
        drafter = PricedDrafter(other, slots=slots, branching=branching, replacement=rule == "k-seq")
        drafter.cost = cost
        loop = Loop(model, drafter, slots=slots, acceptance=rule, observer=CacheAuditor(model, slots))
        runs.append(loop.run(requests[::order])[::order])
        assert loop.statistics.accepted > 0
    for run in runs[1:]:
        assert [r.tokens for r in run] == [r.tokens for r in runs[0]]
        for ours, theirs in zip(run[: len(sampled)], runs[0], strict=False):
            assert (ours.rounds, ours.drafted) == (theirs.rounds, theirs.drafted)
