"""Speculative sampling through the whole loop: the emitted texts have the target's law.

Batches of slots, deferred commits, drafts that another model draws, for every rule and every kind of proposal
that it takes, and n-gram drafts. What is tested beyond the proofs of the rules alone
(tests/test_acceptance_lossless.py) is all that is around them: numbers of several rounds, operators, the
drafter's state, the rows that drafts came from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from loop.models import random_llama, random_model
from lossless.statistics import ALPHA, chi_square
from specdec.acceptance import SamplingParams, TokenHistory, process_logits
from specdec.budget import DraftBudget
from specdec.drafters import Drafter, stepping
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.shape import TreeShape
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models import load_model
from specdec.models.base import CausalLM

PROMPT = (1, 2, 3)
LENGTH = 5  # the first token comes from the prefill; the round after it can draft three levels
PLAIN = SamplingParams(temperature=1.2)
PENALISED = SamplingParams(temperature=1.2, top_p=0.97, frequency_penalty=0.3)
ALLOWED = (2, 60, 341, 348)  # ascending


def exact_law(model: CausalLM, tokens: Sequence[int], length: int, params: SamplingParams) -> np.ndarray:
    """[K] * length over `tokens`: the probability of every text, by prefilling every prefix of one."""
    law = np.ones((len(tokens),) * length)
    for known in range(length):
        prefixes = list(itertools.product(range(len(tokens)), repeat=known))
        texts = [[tokens[i] for i in prefix] for prefix in prefixes]
        slots = range(len(prefixes))
        logits = model.prefill([[*PROMPT, *t] for t in texts], cache=model.new_cache(len(texts)), slots=slots)
        for prefix, text, row in zip(prefixes, texts, logits.double(), strict=True):
            chances = process_logits(row, params, TokenHistory(model.vocab_size, PROMPT, text)).numpy()
            law[prefix] *= chances[list(tokens)].reshape(-1, *(1,) * (length - known - 1))
    return law


def sampled(
    model: CausalLM,
    drafter: Drafter,
    rule: str,
    seeds: int,
    slots: int,
    params: SamplingParams,
    drafts: int,
) -> tuple[np.ndarray, Loop]:
    """int [seeds, LENGTH] texts, one a seed."""
    budget = DraftBudget(drafts, adaptive=False)
    loop = Loop(model, drafter, slots=slots, budget=budget, acceptance=rule)
    requests = [Request(PROMPT, LENGTH, replace(params, seed=seed), ignore_eos=True) for seed in range(seeds)]
    return np.array([r.tokens for r in loop.run(requests)]), loop


def p_values(texts: np.ndarray, law: np.ndarray) -> list[float]:
    """Of the tokens that the first drafted round decides, and of the last pair, which later rounds do."""
    axes = set(range(LENGTH))
    return [
        chi_square(texts[:, list(kept)], law.sum(tuple(axes - set(kept))))
        for kept in ((1, 2), (2, 3), (3, 4))
    ]


VOCAB = 4
SEEDS = 5_000
SLOTS = 500
CHAIN, PAIR, PAIRS = (1,), (2, 1), (2, 2, 1)
CASES = [
    # branching, replacement, rule, parameters
    (CHAIN, False, "speculative", PLAIN),
    (CHAIN, False, "block", PLAIN),
    (PAIR, True, "speculative", PLAIN),
    (PAIR, True, "k-seq", PLAIN),
    (PAIRS, True, "traversal", PLAIN),
    (PAIR, False, "speculative", PENALISED),
    (PAIRS, False, "traversal", PENALISED),
    (TreeShape.pruned(3, 1.2), False, "traversal", PLAIN),
    (TreeShape.pruned(3, 1.2), True, "k-seq", PLAIN),
]


def tiny(seed: int) -> CausalLM:
    return random_model(seed, vocab_size=VOCAB, num_hidden_layers=1, eos_token_ids=())


@pytest.mark.parametrize(("branching", "replacement", "rule", "params"), CASES)
def test_law_of_drawn_drafts(branching, replacement, rule, params):
    drafter = ModelDrafter(tiny(7), slots=SLOTS, branching=branching, replacement=replacement)
    texts, loop = sampled(tiny(0), drafter, rule, SEEDS, SLOTS, params, 8)
    assert 0.05 < loop.statistics.acceptance_rate < 0.9  # both outcomes of a test were met
    assert min(p_values(texts, exact_law(tiny(0), range(VOCAB), LENGTH, params))) > ALPHA


def test_law_of_drafts_between_families():
    """A Llama drafts for a Llama, and a Gated DeltaNet for a Llama."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "eos_token_ids": ()}
    target = random_llama(0, **sizes)
    law = exact_law(target, range(VOCAB), LENGTH, PLAIN)
    for model in (random_llama(7, **sizes), tiny(7)):
        drafter = ModelDrafter(model, slots=SLOTS, branching=PAIRS)
        texts, loop = sampled(target, drafter, "traversal", SEEDS, SLOTS, PLAIN, 8)
        assert 0.05 < loop.statistics.acceptance_rate < 0.9
        assert min(p_values(texts, law)) > ALPHA


def test_law_of_deterministic_drafts():
    """Trees of the text's own n-grams; penalties make a node's row depend on its own path."""
    params = replace(PLAIN, top_k=3, repetition_penalty=1.3)
    texts, loop = sampled(tiny(0), NGramDrafter(min_match=1, branches=2), "auto", SEEDS, SLOTS, params, 4)
    assert 0.05 < loop.statistics.acceptance_rate < 0.9
    assert min(p_values(texts, exact_law(tiny(0), range(VOCAB), LENGTH, params))) > ALPHA


def test_law_of_the_embedded_model_among_four_tokens():
    """Its own first layers draft; the tokens are as likely as any after this prompt."""
    model = load_model("gdn-code")
    params = SamplingParams(temperature=2.0, allowed_tokens=ALLOWED)
    drafter = ModelDrafter(model.first_layers(2), slots=100, branching=PAIRS)
    texts, loop = sampled(model, drafter, "auto", 2_000, 100, params, 8)
    assert 0.05 < loop.statistics.acceptance_rate < 0.9
    assert set(np.unique(texts)) == set(ALLOWED)
    law = exact_law(model, ALLOWED, LENGTH, params)
    assert min(p_values(np.searchsorted(ALLOWED, texts), law)) > ALPHA


def test_a_drafter_that_misnames_its_draws_is_found_out(monkeypatch):
    """Siblings drawn without replacement that are said to be independent."""
    honest = stepping.draw_children
    monkeypatch.setattr(stepping, "draw_children", lambda *given, replacement, **more: honest(*given, **more))
    drafter = ModelDrafter(tiny(7), slots=SLOTS, branching=(3,), replacement=True)
    texts, _ = sampled(tiny(0), drafter, "speculative", SEEDS, SLOTS, PLAIN, 3)
    assert min(p_values(texts, exact_law(tiny(0), range(VOCAB), LENGTH, PLAIN))) < ALPHA
