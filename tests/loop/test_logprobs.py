"""Log-probabilities of emitted tokens: those of plain decoding, to the bit, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loop.drafters import RandomTreeDrafter
from loop.models import random_model
from specdec.acceptance import SamplingParams, TokenLogprob
from specdec.budget import DraftBudget
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.generation import Request, Result
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=5, seed=3),
    SamplingParams(repetition_penalty=1.4, presence_penalty=1.0, logit_bias={4: 5.0}),
    SamplingParams(temperature=1.1, allowed_tokens=range(2, 30), frequency_penalty=0.5, seed=4),
    SamplingParams(temperature=1.0, logits_processor=lambda tokens, logits: logits * 0.5, seed=5),
]
REQUESTS = [
    Request([3 + i, 5, 7], max_new_tokens=30, ignore_eos=True, sampling=p, logprobs=i)
    for i, p in enumerate(SETTINGS)
]


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


@pytest.fixture(scope="module")
def plain(model: GatedDeltaNetForCausalLM) -> list[Result]:
    return [Loop(model).run([r])[0] for r in REQUESTS]


def test_they_are_those_of_the_raw_logits(model, plain):
    cache = model.new_cache(1)
    for request, result in zip(REQUESTS, plain, strict=True):
        assert result.logprobs is not None
        for i, (token, told) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
            text = [*request.prompt, *result.tokens[:i]]
            row = model.prefill([text], cache=cache, slots=[0])[0].double().log_softmax(0)
            # The chunked prefill rounds otherwise than steps do, measured: by 5e-6 at most; 20 times that.
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert len(told.top) == request.logprobs
            best = row.sort(descending=True).values[: len(told.top)].tolist()
            assert [p for _, p in told.top] == pytest.approx(best, abs=1e-4)
            assert told.top == tuple(sorted(told.top, key=lambda pair: (-pair[1], pair[0])))


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("drafter", ["tree", "ngram", "model", "none"])
def test_they_are_those_of_plain_decoding(drafter, slots, model, plain):
    known = {tuple(r.prompt): p.tokens for r, p in zip(REQUESTS, plain, strict=True)}
    made = {
        "tree": lambda: RandomTreeDrafter(known, model.vocab_size, seed=1),
        "ngram": lambda: NGramDrafter(min_match=1, branches=2),
        "model": lambda: ModelDrafter(model, slots=slots, branching=(2, 1)),
        "none": lambda: None,
    }[drafter]()
    loop = Loop(model, made, slots=slots, budget=DraftBudget(6, adaptive=False))
    results: list[Result] = []
    told: dict[int, list[TokenLogprob]] = {i: [] for i in range(len(REQUESTS))}
    for event in loop.stream(REQUESTS, results):
        assert event.logprobs is not None
        assert len(event.logprobs) == len(event.tokens)
        told[event.index] += event.logprobs
    for i, (result, want) in enumerate(zip(results, plain, strict=True)):
        assert result.logprobs == told[i]
        if drafter == "model" and not REQUESTS[i].sampling.greedy:
            # Drawn drafts make another text: what plain decoding tells of its tokens, it is asked by force.
            forced = forced_logprobs(model, REQUESTS[i], result.tokens)
            assert result.logprobs == forced
            continue
        assert result.tokens == want.tokens
        assert result.logprobs == want.logprobs
    assert drafter == "none" or loop.statistics.accepted > 0


def forced_logprobs(
    model: GatedDeltaNetForCausalLM, request: Request, tokens: list[int]
) -> list[TokenLogprob] | None:
    """What plain decoding reports where a callback makes it write these tokens."""

    def force(before: list[int], logits):
        logits[tokens[len(before) - len(request.prompt)]] = 1e6
        return logits

    return Loop(model).run([replace(request, sampling=SamplingParams(logits_processor=force))])[0].logprobs


@pytest.mark.parametrize("count", [1, 4, 5, 6, 9])
def test_they_end_where_the_tokens_end(count, model):
    """A stop, an end token and the limit inside an accepted block."""

    class StopAfter:
        def __init__(self) -> None:
            self.left = count

        def feed(self, token: int) -> bool:
            self.left -= 1
            return self.left == 0

    prompt = [8, 9, 10]
    whole = Loop(model).run([Request(prompt, max_new_tokens=30, ignore_eos=True, logprobs=2)])[0]
    assert whole.logprobs is not None

    def run(target: GatedDeltaNetForCausalLM, **more: object) -> Result:
        drafter = OracleDrafter([(prompt, whole.tokens)], vocab_size=61)
        loop = Loop(target, drafter, budget=DraftBudget(5, adaptive=False))
        return loop.run([Request(prompt, logprobs=2, **{"max_new_tokens": 30, **more})])[0]

    end = whole.tokens[count - 1]
    for result, reason in (
        (run(model, stop=StopAfter, ignore_eos=True), "stop"),
        (run(model, max_new_tokens=count, ignore_eos=True), "length"),
        (run(random_model(eos_token_ids=(end,))), "eos"),
    ):
        assert result.finish_reason == reason
        length = whole.tokens.index(end) + 1 if reason == "eos" else count
        assert result.tokens == whole.tokens[:length]
        assert result.logprobs == whole.logprobs[:length]


def test_nobody_is_told_who_does_not_ask(model):
    quiet = Request([3, 4], max_new_tokens=6)
    results = Loop(model, slots=2).run([quiet, replace(quiet, logprobs=0)])
    assert results[0].logprobs is None
    assert results[1].logprobs is not None
    assert all(told.top == () for told in results[1].logprobs)
    for event in Loop(model).stream([quiet]):
        assert event.logprobs is None


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "5"])
def test_a_wrong_number_is_named(wrong):
    with pytest.raises(ValueError, match="logprobs: got"):
        Request([1], logprobs=wrong)
