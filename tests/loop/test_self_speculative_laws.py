"""Self-speculative sampling with drawn drafts: texts have the target's law wherever a draft's end is decided
by what was drawn, as long as what was drawn stays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loop.models import random_llama, random_model
from loop.test_laws import LENGTH, PENALISED, PLAIN, PROMPT, exact_law, p_values
from lossless.statistics import ALPHA
from specdec.acceptance import SamplingParams
from specdec.budget import DraftBudget
from specdec.drafters.draft_exit import AdaptiveExit, DraftExit, StaticThreshold
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.shape import TreeShape
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.base import SkippableLM
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.skipping import SkipSet

VOCAB = 4
SEEDS = 5_000
SLOTS = 500
EXIT = AdaptiveExit(threshold=0.3, target=0.6, step=0.5, memory=0.5)
CASES = [
    # widen, branching, replacement, rule, exit, parameters
    (1, (1,), False, "block", EXIT, PLAIN),
    (2, (1,), False, "speculative", EXIT, PENALISED),
    (3, (1,), False, "traversal", StaticThreshold(0.4), PLAIN),
    (1, (2, 1), False, "traversal", EXIT, PENALISED),
    (1, (2, 1), True, "k-seq", StaticThreshold(0.3), PLAIN),
    (1, TreeShape.pruned(3, 1.2), False, "traversal", EXIT, PLAIN),
]


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model(0, vocab_size=VOCAB, num_hidden_layers=2, eos_token_ids=())


class Dropping(LayerSkipDrafter):
    """Drops the token that ended a draft, as it was not likely: what may not be done."""

    def run_trees(self, *given):  # type: ignore[no-untyped-def]
        return None  # level by level, where what ended a draft is known

    def _finished(self, tree, state, probs):  # type: ignore[no-untyped-def]
        proposal = super()._finished(tree, state, probs)
        return proposal.truncate(len(proposal.tree) - bool(tree._closed))


def sampled(
    model: SkippableLM,
    params: SamplingParams,
    rule: str,
    exit: DraftExit,
    kind: type[LayerSkipDrafter] = LayerSkipDrafter,
    **options: object,
) -> tuple[np.ndarray, Loop]:
    """int [SEEDS, LENGTH] texts, one a seed."""
    view = model.skipping(SkipSet.of([1], [0]))
    drafter = kind(view, model.new_cache(SLOTS), exit=exit, **options)  # type: ignore[arg-type]
    budget = DraftBudget(8, adaptive=False, whole=True)
    loop = Loop(model, drafter, slots=SLOTS, budget=budget, acceptance=rule, cache=drafter.cache)
    requests = [Request(PROMPT, LENGTH, replace(params, seed=seed), ignore_eos=True) for seed in range(SEEDS)]
    return np.array([r.tokens for r in loop.run(requests)]), loop


@pytest.mark.parametrize(("widen", "branching", "replacement", "rule", "exit", "params"), CASES)
def test_law_of_drafts_that_end_by_what_was_drawn(model, widen, branching, replacement, rule, exit, params):
    options = {"widen": widen, "branching": branching, "replacement": replacement}
    texts, loop = sampled(model, params, rule, exit, **options)
    assert 0.05 < loop.statistics.acceptance_rate < 0.9
    assert len(loop.statistics.drafted_at) > 1  # not every draft ended with its first token
    assert min(p_values(texts, exact_law(model, range(VOCAB), LENGTH, params))) > ALPHA


def test_law_of_drafts_of_a_llama():
    llama = random_llama(0, vocab_size=VOCAB, num_hidden_layers=2, eos_token_ids=())
    texts, loop = sampled(llama, PENALISED, "speculative", EXIT, widen=2)
    assert 0.05 < loop.statistics.acceptance_rate < 0.9
    assert len(loop.statistics.drafted_at) > 1
    assert min(p_values(texts, exact_law(llama, range(VOCAB), LENGTH, PENALISED))) > ALPHA


def test_dropping_the_token_that_ended_a_draft_is_found_out(model):
    texts, _ = sampled(model, PLAIN, "block", StaticThreshold(0.4), Dropping)
    assert min(p_values(texts, exact_law(model, range(VOCAB), LENGTH, PLAIN))) < ALPHA
