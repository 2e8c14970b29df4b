"""Where a sequence ends: end tokens and stops inside an accepted block, token limits, early consumers."""

from __future__ import annotations

import pytest

from loop.models import random_model
from specdec.acceptance import SamplingParams
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.proposal import Proposal, ProposalKind
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.tree import TokenTree

PROMPT = (8, 9, 10, 11)


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


@pytest.fixture(scope="module")
def text(model: GatedDeltaNetForCausalLM) -> list[int]:
    return Loop(model).run([Request(PROMPT, max_new_tokens=60, ignore_eos=True)])[0].tokens


def oracle(text: list[int], vocab: int) -> OracleDrafter:
    return OracleDrafter([(PROMPT, text)], vocab_size=vocab)


class StopAfter:
    """Stops with the n-th token."""

    def __init__(self, count: int) -> None:
        self._left = count

    def feed(self, token: int) -> bool:
        self._left -= 1
        return self._left == 0


@pytest.mark.parametrize("count", range(1, 12))
def test_stop_inside_an_accepted_block(count, model, text):
    """With 5 accepted drafts a round, the stop falls on every place of a block; the cache ends there too."""
    request = Request(PROMPT, max_new_tokens=60, stop=lambda: StopAfter(count), ignore_eos=True)
    loop = Loop(
        model,
        oracle(text, model.vocab_size),
        budget=DraftBudget(5, adaptive=False),
        observer=CacheAuditor(model, 1),
    )
    result = loop.run([request])[0]
    assert (result.tokens, result.finish_reason) == (text[:count], "stop")


@pytest.mark.parametrize("count", range(1, 12))
def test_token_limit_is_never_exceeded(count, model, text):
    request = Request(PROMPT, max_new_tokens=count, ignore_eos=True)
    loop = Loop(
        model,
        oracle(text, model.vocab_size),
        budget=DraftBudget(5, adaptive=False),
        observer=CacheAuditor(model, 1),
    )
    result = loop.run([request])[0]
    assert (result.tokens, result.finish_reason) == (text[:count], "length")
    assert loop.statistics.acceptance_rate in (0.0, 1.0)  # nothing was drafted past the limit


def test_end_token_inside_an_accepted_block(text):
    """Whichever token ends the text is emitted last; nothing after it is emitted, streamed or kept."""
    for eos in dict.fromkeys(text[1:12]):
        model = random_model(eos_token_ids=(eos,))
        end = text.index(eos) + 1
        loop = Loop(
            model,
            oracle(text, model.vocab_size),
            budget=DraftBudget(7, adaptive=False),
            observer=CacheAuditor(model, 1),
        )
        events = list(loop.stream([Request(PROMPT, max_new_tokens=60)]))
        assert [t for e in events for t in e.tokens] == text[:end]
        assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + ["eos"]


def test_consumer_that_stops_early_keeps_what_was_emitted(model, text):
    loop = Loop(model, oracle(text, model.vocab_size), budget=DraftBudget(3, adaptive=False))
    results = []
    stream = loop.stream([Request(PROMPT, max_new_tokens=60, ignore_eos=True)], results)
    seen = [t for _, event in zip(range(4), stream, strict=False) for t in event.tokens]
    stream.close()
    assert results[0].finish_reason == "cancelled"
    assert results[0].tokens[: len(seen)] == seen == text[: len(seen)]
    # The loop is whole again: the slot is free and a new run is exact.
    assert loop.run([Request(PROMPT, max_new_tokens=20, ignore_eos=True)])[0].tokens == text[:20]


def test_a_request_without_prompt_or_tokens_is_refused():
    with pytest.raises(ValueError, match="prompt: got no tokens"):
        Request([])
    with pytest.raises(ValueError, match="max_new_tokens: got 0"):
        Request([1], max_new_tokens=0)


def test_a_request_of_wrong_types_is_refused():
    with pytest.raises(ValueError, match=r"prompt: got 1\.5"):
        Request([1.5])
    with pytest.raises(ValueError, match="max_new_tokens: got nan"):
        Request([1], max_new_tokens=float("nan"))


def test_an_error_at_admission_leaves_the_loop_usable(model, text):
    """A stop condition that cannot be made, a prompt that no history takes: the slot is free again."""

    def broken() -> StopAfter:
        raise RuntimeError("no stop condition")

    loop = Loop(model)
    with pytest.raises(RuntimeError, match="no stop condition"):
        loop.run([Request(PROMPT, stop=broken)])
    penalised = SamplingParams(repetition_penalty=1.2)
    with pytest.raises(ValueError, match="61"):
        loop.run([Request([61], sampling=penalised)])
    assert loop.run([Request(PROMPT, max_new_tokens=9, ignore_eos=True)])[0].tokens == text[:9]


def test_a_loop_that_is_decoding_takes_no_other_requests(model, text):
    loop = Loop(model)
    stream = loop.stream([Request(PROMPT, max_new_tokens=5, ignore_eos=True)])
    first = next(stream)
    with pytest.raises(ValueError, match="decoding others"):
        loop.run([Request(PROMPT)])
    assert [t for e in (first, *stream) for t in e.tokens] == text[:5]


@pytest.mark.parametrize(
    ("tokens", "message"), [((1, 61), "tokens from 1 to 61"), ((1, 2, 3), "got 3 nodes for slot 0")]
)
def test_a_drafter_out_of_bounds_is_named(tokens, message, model):
    class Broken(OracleDrafter):
        name = "broken"

        def propose(self, requests):
            return [Proposal(TokenTree.from_chain(tokens), ProposalKind.DETERMINISTIC) for _ in requests]

    drafter = Broken([(PROMPT, (1, 2))], vocab_size=61)
    loop = Loop(model, drafter, budget=DraftBudget(2, adaptive=False))
    with pytest.raises(ValueError, match=f"drafter broken: got {message.removeprefix('got ')}"):
        loop.run([Request(PROMPT, max_new_tokens=9)])


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=1)])
def test_logits_that_are_not_numbers_are_an_error(sampling):
    model = random_model()
    model._final_norm = model._final_norm * float("nan")
    with pytest.raises(ValueError, match=r"NaN|positive finite sum"):
        Loop(model).run([Request(PROMPT, sampling=sampling)])


def test_token_outside_the_vocabulary_is_refused(model):
    with pytest.raises(ValueError, match="want 0 to 60"):
        Loop(model).run([Request([3, 61])])
