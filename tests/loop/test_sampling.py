"""Sampling through the whole loop: the law of the emitted tokens, seeds, penalties."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from loop.drafters import RandomTreeDrafter
from loop.models import random_model
from lossless.statistics import ALPHA, chi_square
from specdec.acceptance import SamplingParams, TokenHistory, process_logits
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

VOCAB = 4
PROMPT = (1, 2, 3)
SEQUENCES = 15_000
PARAMS = SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.3)


def exact_law(model: GatedDeltaNetForCausalLM, length: int, params: SamplingParams) -> np.ndarray:
    """[V] * length: the probability of every text of that length, by plain forward passes."""
    law = np.zeros((VOCAB,) * length)
    cache = model.new_cache(1)
    for text in itertools.product(range(VOCAB), repeat=length):
        probability, history = 1.0, TokenHistory(VOCAB, PROMPT)
        for i, token in enumerate(text):
            logits = model.prefill([[*PROMPT, *text[:i]]], cache=cache, slots=[0])[0]
            probability *= float(process_logits(logits.double(), params, history)[token])
            history.extend([token])
        law[text] = probability
    return law


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_joint_law_of_the_first_tokens(drafter):
    """Chi-square over all texts of three tokens, 15 000 seeds in batches of 50 slots, deferred commits.

    The drafter is another model that samples its drafts (a soft q), or an n-gram tree (one-hot). The penalty
    makes every node's distribution depend on its own path.
    """
    model = random_model(0, vocab_size=VOCAB, num_hidden_layers=1, eos_token_ids=())
    slots = 50
    made = {
        "model": lambda: ModelDrafter(
            random_model(7, vocab_size=VOCAB, num_hidden_layers=1, eos_token_ids=()), slots=slots
        ),
        "ngram": lambda: NGramDrafter(min_match=1, branches=2),
    }[drafter]()
    loop = Loop(model, made, slots=slots, budget=DraftBudget(2, adaptive=False))
    requests = [
        Request(PROMPT, max_new_tokens=3, sampling=replace(PARAMS, seed=seed)) for seed in range(SEQUENCES)
    ]
    texts = np.array([r.tokens for r in loop.run(requests)])
    assert loop.statistics.drafted > SEQUENCES // 4
    if drafter == "model":
        assert 0.2 < loop.statistics.acceptance_rate < 0.95  # both outcomes of the rule were exercised
    assert chi_square(texts, exact_law(model, 3, PARAMS)) > ALPHA


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_one_hot_drafts_leave_a_seeded_text_unchanged(model, penalty):
    """A seeded text does not depend on drafts that were not drawn at random, on the batch or on its order."""
    requests = [
        Request(
            [3 + i, 5, 7],
            max_new_tokens=40,
            ignore_eos=True,
            sampling=SamplingParams(
                temperature=0.7 + 0.1 * i, top_p=0.95, seed=i, repetition_penalty=penalty
            ),
        )
        for i in range(5)
    ]
    plain = [Loop(model).run([r])[0].tokens for r in requests]
    continuations = {tuple(r.prompt): tokens for r, tokens in zip(requests, plain, strict=True)}
    for slots, order in ((1, 1), (3, 1), (5, -1)):
        loop = Loop(
            model,
            RandomTreeDrafter(continuations, model.vocab_size, seed=slots),
            slots=slots,
            budget=DraftBudget(8, adaptive=False),
            observer=CacheAuditor(model, slots),
        )
        results = loop.run(requests[::order])[::order]
        assert [r.tokens for r in results] == plain
        assert loop.statistics.accepted > 0


def test_greedy_and_seeded_requests_share_a_batch(model):
    """Sampling parameters are per sequence: neighbours do not disturb each other."""
    greedy = Request([9, 8, 7], max_new_tokens=30, ignore_eos=True)
    seeded = replace(greedy, sampling=SamplingParams(temperature=1.0, seed=11))
    penalised = replace(greedy, sampling=SamplingParams(repetition_penalty=1.5))
    alone = [Loop(model).run([r])[0].tokens for r in (greedy, seeded, penalised)]
    together = Loop(model, NGramDrafter(min_match=1), slots=3).run([greedy, seeded, penalised])
    assert [r.tokens for r in together] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_penalised_greedy_with_a_drafter(model):
    """Every accepted token counts once in the penalty, rejected drafts never: the text stays the same."""
    request = Request(
        [5, 5, 6], max_new_tokens=60, ignore_eos=True, sampling=SamplingParams(repetition_penalty=1.2)
    )
    plain = Loop(model).run([request])[0].tokens
    for drafter in (
        ModelDrafter(model),
        ModelDrafter(random_model(3)),
        NGramDrafter(min_match=1, branches=3),
    ):
        loop = Loop(model, drafter, budget=DraftBudget(6, adaptive=False))
        assert loop.run([request])[0].tokens == plain


def test_unseeded_runs_report_a_seed_that_repeats_them(model):
    sampling = SamplingParams(temperature=1.0)
    first = Loop(model).run([Request([4, 5], max_new_tokens=20, sampling=sampling, ignore_eos=True)])[0]
    again = Request([4, 5], max_new_tokens=20, sampling=replace(sampling, seed=first.seed), ignore_eos=True)
    assert Loop(model).run([again])[0].tokens == first.tokens
    other = Loop(model).run([Request([4, 5], max_new_tokens=20, sampling=sampling, ignore_eos=True)])[0]
    assert other.seed != first.seed


@pytest.mark.parametrize("cost", ["cheap", "dear"])
def test_a_seed_repeats_drawn_drafts_at_any_batch_and_in_any_order(model, cost):
    """With the default budget: how much a sampled sequence drafts must not come from the clock."""

    class Cheap(ModelDrafter):
        def step_cost(self, target):
            return 0.05 if cost == "cheap" else 0.4

    drafter = random_model(9, num_hidden_layers=1)
    requests = [
        Request(
            [3 + i, 5, 7],
            max_new_tokens=60 - i,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.6 + 0.2 * i if i < 4 else 0.0, seed=i),
        )
        for i in range(6)
    ]
    runs = []
    for slots, order in ((1, 1), (1, 1), (3, 1), (6, -1)):
        loop = Loop(model, Cheap(drafter, slots=slots), slots=slots)
        runs.append(loop.run(requests[::order])[::order])
        assert loop.statistics.drafted > 0
    for run in runs[1:]:
        assert [r.tokens for r in run] == [r.tokens for r in runs[0]]
        assert [r.drafted for r in run[:4]] == [r.drafted for r in runs[0][:4]]


def test_target_as_its_own_sampling_drafter_accepts_everything(model):
    """p == q row for row, because drafting and verification compute the same bits."""
    request = Request(
        [2, 3], max_new_tokens=200, ignore_eos=True, sampling=SamplingParams(temperature=1.0, seed=1)
    )
    loop = Loop(model, ModelDrafter(model), budget=DraftBudget(4, adaptive=False))
    loop.run([request])
    assert loop.statistics.acceptance_rate == 1.0
    assert loop.statistics.drafted > 100
    assert torch.is_inference_mode_enabled() is False
