"""The recurrent drafter in the loop: whatever it drafts, the text is that of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from loop.models import random_model
from loop.recurrent import random_drafter
from loop.test_laws import LENGTH as LAW_LENGTH
from loop.test_laws import PLAIN, SEEDS, SLOTS, VOCAB, exact_law, p_values, sampled, tiny
from lossless.statistics import ALPHA
from specdec.acceptance import SamplingParams
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.shape import TreeShape
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

SHAPES = {"chain": TreeShape((1,)), "fixed": TreeShape((2, 2, 1)), "pruned": TreeShape.pruned(3)}


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Greedy and sampled ones, of many lengths; some end with an end token."""
    r = random.Random(1)
    made = []
    for i, length in enumerate((1, 2, 3, 5, 17, 64, 90, 4, 33)):
        sampling = SamplingParams(temperature=0.7 * (i % 3), seed=i, top_k=0 if i % 2 else 20)
        prompt = [r.randrange(1, 61) for _ in range(length)]
        made.append(Request(prompt, 40 - 2 * i, sampling, ignore_eos=i % 2 == 0))
    return made


@pytest.fixture(scope="module")
def plain(model: GatedDeltaNetForCausalLM, requests: list[Request]) -> list[list[int]]:
    return [result.tokens for result in Loop(model, slots=4).run(requests)]


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("adaptive", [True, False])
def test_likeliest_drafts_keep_every_token(adaptive, shape, slots, model, requests, plain):
    """Greedy requests, and sampled ones with their seeds, whose drafts are followed; budgets skip rounds."""
    drafter = RecurrentDrafter(random_drafter(model, 3), slots=slots, branching=SHAPES[shape], draw=False)
    auditor = CacheAuditor(model, slots)
    loop = Loop(model, drafter, slots=slots, budget=DraftBudget(6, adaptive=adaptive), observer=auditor)
    assert [result.tokens for result in loop.run(requests)] == plain
    assert adaptive or loop.statistics.drafted > 0  # drafts of random weights are rarely worth a node


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_activations_keep_every_token(shape):
    """Features, the drafter's own outputs and its convolution's windows are rounded."""
    target = random_model(dtype=torch.bfloat16)
    requests = [
        Request([3 + i] * (1 + 5 * i), 30 - i, SamplingParams(0.8 * (i % 2), seed=i), ignore_eos=True)
        for i in range(5)
    ]
    plain = [result.tokens for result in Loop(target, slots=2).run(requests)]
    small = random_drafter(target, 3)
    assert small.dtype == torch.bfloat16
    drafter = RecurrentDrafter(small, slots=3, branching=SHAPES[shape], draw=False)
    auditor = CacheAuditor(target, 3)
    loop = Loop(target, drafter, slots=3, budget=DraftBudget(6, adaptive=False), observer=auditor)
    assert [result.tokens for result in loop.run(requests)] == plain
    assert loop.statistics.accepted > 0


@pytest.mark.parametrize("in_one_call", [True, False])
def test_cold_requests_keep_every_token(in_one_call, model, monkeypatch):
    """All but the likeliest children have no chance, nor have their children."""
    if not in_one_call:
        monkeypatch.setattr(RecurrentDrafter, "run_trees", lambda *_: None)
    requests = [Request([5, 7 + i], 20, SamplingParams(10.0**-i, seed=i), ignore_eos=True) for i in range(6)]
    plain = [result.tokens for result in Loop(model, slots=4).run(requests)]
    drafter = RecurrentDrafter(random_drafter(model, 3), slots=2, branching=SHAPES["fixed"], draw=False)
    loop = Loop(model, drafter, slots=2, budget=DraftBudget(10, adaptive=False))
    assert [result.tokens for result in loop.run(requests)] == plain


def test_a_draft_vocabulary_keeps_every_token(model, requests, plain):
    drafter = RecurrentDrafter(
        random_drafter(model, 4, draft_vocab_size=20), slots=3, branching=(3, 1), draw=False
    )
    loop = Loop(model, drafter, slots=3, budget=DraftBudget(6, adaptive=False))
    assert [result.tokens for result in loop.run(requests)] == plain
    assert loop.statistics.accepted > 0


@pytest.mark.parametrize(
    ("branching", "rule", "drafts"),
    [((1,), "block", {}), ((2, 1), "k-seq", {}), ((2, 2, 1), "traversal", {"draft_vocab_size": 3})],
)
def test_law_of_drawn_drafts(branching, rule, drafts):
    target = tiny(0)
    options = {"features": ("hidden:0", "readout:0"), **drafts}
    drafter = RecurrentDrafter(
        random_drafter(target, 7, **options), slots=SLOTS, branching=branching, replacement=rule == "k-seq"
    )
    texts, loop = sampled(target, drafter, rule, SEEDS, SLOTS, PLAIN, 8)
    assert 0.05 < loop.statistics.acceptance_rate < 0.95  # both outcomes of a test were met
    assert min(p_values(texts, exact_law(target, range(VOCAB), LAW_LENGTH, PLAIN))) > ALPHA


def test_a_seed_repeats_drawn_drafts_at_any_batch(model):
    small = random_drafter(model, 6)
    requests = [
        Request([3 + i, 5, 7], 40 - 3 * i, SamplingParams(temperature=0.6 + 0.2 * i, seed=i))
        for i in range(4)
    ]
    runs = []
    for slots, order in ((1, 1), (3, -1), (4, 1)):
        drafter = RecurrentDrafter(small, slots=slots, branching=(2, 1))
        results = Loop(model, drafter, slots=slots).run(requests[::order])[::order]
        runs.append([(r.tokens, r.rounds, r.drafted) for r in results])
    assert runs[0] == runs[1] == runs[2]
    again = [replace(r, sampling=replace(r.sampling, seed=9)) for r in requests]
    assert [r.tokens for r in Loop(model, slots=4).run(again)] != [tokens for tokens, *_ in runs[0]]
