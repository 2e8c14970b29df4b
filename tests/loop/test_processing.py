"""Penalties, bias, masks and callbacks in the loop: the text of plain decoding, whatever is drafted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from loop.drafters import RandomTreeDrafter
from loop.models import random_model
from lossless.reference import edits
from specdec.acceptance import SamplingParams, TokenHistory
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.proposal import Proposal, ProposalKind
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.tree import TokenTree

PROMPT = (5, 5, 6, 40)


def alternate(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """After an even token an odd one has to come, and the other way round."""
    logits[tokens[-1] % 2 :: 2] = -math.inf
    return logits


EDITS = {
    "repetition": SamplingParams(repetition_penalty=1.3),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.6),
    "negative": SamplingParams(frequency_penalty=-0.2, repetition_penalty=0.9),
    "bias": SamplingParams(logit_bias={7: 1.0, 8: 0.7, 9: -50.0}),
    "allowed": SamplingParams(allowed_tokens=range(3, 20)),
    "banned": SamplingParams(banned_tokens=[*range(0, 61, 3)]),
    "callback": SamplingParams(logits_processor=alternate),
    "all": SamplingParams(
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={7: 2.0},
        allowed_tokens=range(1, 50),
        banned_tokens=[4],
        logits_processor=alternate,
    ),
    "none": SamplingParams(),
}
SAMPLED = {
    name: replace(p, temperature=0.9, top_p=0.97, seed=2**64 - 1 - i)
    for i, (name, p) in enumerate(EDITS.items())
}

NUMBERS = {params: i for i, params in enumerate([*EDITS.values(), *SAMPLED.values()])}


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


def request(params: SamplingParams, count: int = 40) -> Request:
    # Prompts differ, so that a drafter can tell what to continue.
    last = NUMBERS.get(params, 60)
    return Request([*PROMPT, last], max_new_tokens=count, ignore_eos=True, sampling=params)


@pytest.fixture(scope="module")
def plain(model: GatedDeltaNetForCausalLM) -> dict[SamplingParams, list[int]]:
    """What each setting gives alone, without drafts."""
    every = [*EDITS.values(), *SAMPLED.values()]
    return {params: Loop(model).run([request(params)])[0].tokens for params in every}


@pytest.mark.parametrize("name", [n for n in EDITS if n not in ("callback", "all")])
def test_every_emitted_token_counts_once(name, model, plain):
    """Plain greedy decoding against the naive twin on the logits of a fresh prefill of every text."""
    params = EDITS[name]
    prompt, text = list(request(params).prompt), plain[params]
    cache = model.new_cache(1)
    for i, token in enumerate(text):
        logits = model.prefill([[*prompt, *text[:i]]], cache=cache, slots=[0])[0]
        want = np.array(edits(logits.tolist(), params, prompt, text[:i]))
        # The chunked prefill rounds otherwise than steps do, measured: by 5e-6 at most; 20 times that.
        assert want[token] >= want.max() - 1e-4
    assert len(set(text)) > 3


@pytest.mark.parametrize("drafter", ["tree", "ngram", "model"])
def test_a_mixed_batch_writes_the_texts_of_plain_decoding(drafter, model, plain):
    """Every setting beside every other, greedy and sampled: rejected drafts, siblings and neighbours leave no
    trace, whatever the batch and its order."""
    # What a model draws for sampled requests makes other texts.
    settings = [*EDITS.values(), *(SAMPLED.values() if drafter != "model" else ())]
    known = {tuple(request(p).prompt): plain[p] for p in settings}
    for slots, order in ((4, 1), (len(settings), -1)):
        made = {
            "tree": lambda: RandomTreeDrafter(known, model.vocab_size, seed=7),
            "ngram": lambda: NGramDrafter(min_match=1, branches=3),
            "model": lambda slots=slots: ModelDrafter(random_model(3), slots=slots, branching=(2, 1)),
        }[drafter]()
        auditor = CacheAuditor(model, slots)
        loop = Loop(model, made, slots=slots, budget=DraftBudget(8, adaptive=False), observer=auditor)
        results = loop.run([request(p) for p in settings[::order]])
        for params, result in zip(settings[::order], results, strict=True):
            assert result.tokens == plain[params], params
        assert loop.statistics.accepted > 0


@pytest.mark.parametrize("replacement", [True, False])
def test_drawn_drafts_obey_the_masks(replacement, model):
    """Trees that another model drew: what is excluded never comes, and the callback's rule holds."""
    other = random_model(3)
    drafter = ModelDrafter(other, slots=5, branching=(3, 2), replacement=replacement)
    loop = Loop(model, drafter, slots=5, budget=DraftBudget(9, adaptive=False))
    base = SamplingParams(temperature=1.2, seed=0)
    masks = {
        "banned": replace(base, banned_tokens=EDITS["banned"].banned_tokens),
        "allowed": replace(base, allowed_tokens=range(3, 20)),
        "one": replace(base, allowed_tokens=[11]),
        "callback": replace(base, logits_processor=alternate),
        "two": replace(base, allowed_tokens=[4, 5, 6, 7], banned_tokens=[6, 7]),
    }
    results = loop.run([request(p, 60) for p in masks.values()])
    texts = dict(zip(masks, (r.tokens for r in results), strict=True))
    assert loop.statistics.accepted > 0
    assert not set(texts["banned"]) & EDITS["banned"].banned_tokens
    assert set(texts["allowed"]) <= set(range(3, 20))
    assert set(texts["one"]) == {11}
    assert set(texts["two"]) == {4, 5}
    last = request(masks["callback"]).prompt[-1]
    for token in texts["callback"]:
        assert token % 2 != last % 2
        last = token


def test_the_target_as_its_own_drafter_is_always_right(model):
    """Draft rows and target rows are edited alike, each along its own path, so that p is q."""
    for params in (*EDITS.values(), *SAMPLED.values()):
        loop = Loop(model, ModelDrafter(model), budget=DraftBudget(4, adaptive=False))
        loop.run([request(params)])
        assert loop.statistics.acceptance_rate == 1.0, params
        assert loop.statistics.drafted > 20


def test_the_callback_is_asked_only_about_texts_that_can_come(model):
    """Drafts hold banned tokens and go on after the end; the callback never hears of them."""
    prompt, end, banned = list(PROMPT), 9, 3

    def callback(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert tokens[: len(prompt)] == prompt
        written = tokens[len(prompt) :]
        assert banned not in written
        assert end not in written
        if len(written) == 6:
            logits[end] = 1e4
        return logits

    class Foolish(OracleDrafter):
        def propose(self, requests):
            paths = [(banned, 1), (4, banned), (end, 5, 6), (4, end, 2)]
            return [Proposal(TokenTree.from_paths(paths), ProposalKind.DETERMINISTIC) for _ in requests]

    model = random_model(eos_token_ids=(end,))
    params = SamplingParams(banned_tokens=[banned], logits_processor=callback)
    r = Request(prompt, max_new_tokens=30, sampling=params)
    loop = Loop(model, Foolish([(prompt, (1,) * 30)], vocab_size=61), budget=DraftBudget(9, adaptive=False))
    result = loop.run([r])[0]
    assert result.finish_reason == "eos"
    assert result.tokens == Loop(model).run([r])[0].tokens


@pytest.mark.parametrize("rule", ["auto", "typical"])
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_a_callback_that_leaves_nothing_is_named(value, rule, model):
    params = SamplingParams(logits_processor=lambda tokens, logits: torch.full_like(logits, value))
    sampled = request(SamplingParams(temperature=1.0, seed=1))
    loop = Loop(model, slots=2, acceptance=rule)
    for p in (params, replace(params, temperature=1.0), replace(params, temperature=1.0, top_p=0.5)):
        for batch in ([request(p)], [request(p), sampled]):
            with pytest.raises(ValueError, match=f"logits_processor: the largest logit after it is {value}"):
                loop.run(batch)
    assert loop.run([sampled])[0].tokens == Loop(model).run([sampled])[0].tokens


def test_tokens_outside_the_vocabulary_are_refused_before_decoding(model):
    for name, value in (("logit_bias", {61: 1.0}), ("allowed_tokens", [61]), ("banned_tokens", [61])):
        bad = Request(PROMPT, sampling=SamplingParams(**{name: value}))
        with pytest.raises(ValueError, match=rf"requests\[1\]\.sampling\.{name}: got token 61, want 0 to 60"):
            Loop(model).run([Request(PROMPT), bad])


def test_a_tiny_top_p_is_greedy(model):
    """Less than float32 can hold."""
    tiny = Request(PROMPT, max_new_tokens=8, sampling=SamplingParams(temperature=1.0, top_p=1e-300, seed=1))
    greedy = Request(PROMPT, max_new_tokens=8)
    a, b = Loop(model, slots=2).run([tiny, greedy])
    assert a.tokens == b.tokens


def test_an_inexact_rule_names_drafter_rule_and_kind(model):
    drafter = ModelDrafter(random_model(3), branching=(2,), replacement=True)
    loop = Loop(model, drafter, budget=DraftBudget(6, adaptive=False), acceptance="block")
    message = "drafter model: acceptance: block is not exact for a tree drawn independently"
    with pytest.raises(ValueError, match=message):
        loop.run([request(SamplingParams(temperature=1.0, seed=0))])
    greedy = [request(SamplingParams())]  # nothing is drawn, and the rule decides nothing
    assert loop.run(greedy)[0].tokens == Loop(model).run(greedy)[0].tokens


@pytest.mark.parametrize("rule", ["block", "k-seq"])
def test_greedy_requests_follow_drawn_trees_alone_and_in_a_batch(rule, model):
    """At temperature 0 a drafter may call its tree drawn: no rule is at work that could be inexact."""

    class Drawn(RandomTreeDrafter):
        def _one(self, asked):
            if not asked.sampling.greedy:
                return Proposal.empty()
            tree = super()._one(asked).tree
            row = torch.full((1, 61), 1 / 61)
            return Proposal(tree, ProposalKind.IID, row.expand(len(tree), 61))  # siblings of many rows

    batch = [request(SamplingParams()), request(SamplingParams(temperature=1.0, seed=3))]
    texts = [r.tokens for r in Loop(model, slots=2).run(batch)]
    for some in (batch[:1], batch):
        known = {tuple(r.prompt): text for r, text in zip(batch, texts, strict=True)}
        drafter = Drawn(known, model.vocab_size, seed=2)
        budget = DraftBudget(8, adaptive=False)
        loop = Loop(model, drafter, slots=2, budget=budget, acceptance=rule)
        assert [r.tokens for r in loop.run(some)] == texts[: len(some)]
        assert loop.statistics.accepted > 0


@pytest.mark.parametrize("rule", ["auto", "speculative", "k-seq", "block", "traversal"])
def test_every_lossless_rule_follows_deterministic_drafts(rule, model, plain):
    params = SAMPLED["all"]
    known = {tuple(request(params).prompt): plain[params]}
    drafter = RandomTreeDrafter(known, model.vocab_size, seed=2)
    loop = Loop(model, drafter, budget=DraftBudget(8, adaptive=False), acceptance=rule)
    assert loop.run([request(params)])[0].tokens == plain[params]


def test_typical_obeys_edits_and_writes_other_texts(model, plain):
    settings = {n: p for n, p in SAMPLED.items() if n in ("banned", "callback", "none")}
    known = {
        tuple(request(p).prompt): Loop(model).run([request(replace(p, seed=1))])[0].tokens
        for p in settings.values()
    }
    loop = Loop(
        model,
        RandomTreeDrafter(known, model.vocab_size, seed=5),
        slots=3,
        budget=DraftBudget(8, adaptive=False),
        acceptance="typical",
    )
    results = loop.run([request(p) for p in settings.values()])
    assert loop.statistics.accepted > 0
    assert not set(results[list(settings).index("banned")].tokens) & EDITS["banned"].banned_tokens
    assert [r.tokens for r in results] != [plain[p] for p in settings.values()]


def test_a_rule_that_there_is_not_is_refused_when_the_loop_is_made(model):
    with pytest.raises(ValueError, match="acceptance: got 'magic', want one of auto, speculative"):
        Loop(model, acceptance="magic")


def test_histories_are_kept_only_where_rows_depend_on_them(model):
    from specdec.sequence import ActiveSequence

    seen: dict[str, TokenHistory | None] = {}

    class Watch:
        def after_round(self, cache, sequences: list[ActiveSequence]) -> None:
            seen.update({s.request.sampling: s.history for s in sequences})

    Loop(model, slots=10, observer=Watch()).run([request(p, 4) for p in EDITS.values()])
    for params, history in seen.items():
        assert (history is not None) == params.contextual
