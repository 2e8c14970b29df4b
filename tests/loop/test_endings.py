"""Where a sequence ends: end tokens and stops inside an accepted block, token limits, early consumers."""

from __future__ import annotations

import contextlib

import pytest
import torch

from loop.models import random_model
from specdec.acceptance import SamplingParams
from specdec.audit import CacheAuditor
from specdec.batch_decision import Decided
from specdec.budget import DraftBudget
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.proposal import Proposal, ProposalKind
from specdec.generation import Request, Result
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


def test_one_auditor_sees_several_runs(model):
    """A later run may begin with the same slot and the same request index."""
    loop = Loop(model, observer=CacheAuditor(model, 1))
    request = Request(PROMPT, max_new_tokens=5, ignore_eos=True)
    assert loop.run([request])[0].tokens == loop.run([request])[0].tokens


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
    """A stop condition that cannot be made, a prompt that no drafter takes: the slot is free again."""

    def broken() -> StopAfter:
        raise RuntimeError("no stop condition")

    loop = Loop(model)
    with pytest.raises(RuntimeError, match="no stop condition"):
        loop.run([Request(PROMPT, stop=broken)])
    assert loop.run([Request(PROMPT, max_new_tokens=9, ignore_eos=True)])[0].tokens == text[:9]
    loop = Loop(model, oracle(text, model.vocab_size))
    with pytest.raises(ValueError, match="no continuation"):
        loop.run([Request([5])])
    assert loop.run([Request(PROMPT, max_new_tokens=9, ignore_eos=True)])[0].tokens == text[:9]


def test_a_loop_that_is_decoding_takes_no_other_requests(model, text):
    loop = Loop(model)
    stream = loop.stream([Request(PROMPT, max_new_tokens=5, ignore_eos=True)])
    late = loop.stream([Request(PROMPT)])
    first = next(stream)
    results = [Result()]
    with pytest.raises(RuntimeError, match="decoding other requests"):
        loop.stream([Request(PROMPT), Request(PROMPT)], results)
    assert len(results) == 1  # refused before anything changed
    with pytest.raises(RuntimeError, match="decoding other requests"):
        next(late)
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


@pytest.mark.parametrize(
    ("parents", "path", "message"),
    [
        ((-1, 0, 0, 1), [0, 1, 3, 4], "entry 3 is node 4 with parent 2, want a child of node 3"),
        ((-1, 0, 0, 1), [1, 2], "entry 0 is node 1 with parent 0, want a root"),
        (None, [0, 2], "entry 1 is node 2 with parent 1, want a child of node 0"),
    ],
)
def test_a_path_off_its_tree_is_not_committed(parents, path, message, model, monkeypatch):
    class Fixed(OracleDrafter):
        def propose(self, requests):
            return [Proposal(TokenTree((1, 2, 3, 4), parents), ProposalKind.DETERMINISTIC) for _ in requests]

    loop = Loop(model, Fixed([(PROMPT, (1, 2))], vocab_size=61), budget=DraftBudget(4, adaptive=False))
    stream = loop.stream([Request(PROMPT, max_new_tokens=9, ignore_eos=True)])
    next(stream)
    before = [t.clone() for t in loop.cache.state.values()]
    monkeypatch.setattr("specdec.loop.decide_batch", lambda *_: [Decided(path, 7, None)])
    with pytest.raises(ValueError, match=f"^path: slot 0 {message}"):
        next(stream)
    assert not loop.cache.has_pending
    assert all(torch.equal(a, b) for a, b in zip(loop.cache.state.values(), before, strict=True))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=1)])
def test_logits_that_are_not_numbers_are_an_error(sampling):
    model = random_model()
    model._final_norm = model._final_norm * float("nan")
    with pytest.raises(ValueError, match="logits: the model gave nan, want finite numbers"):
        Loop(model).run([Request(PROMPT, sampling=sampling)])


def test_nothing_is_decoded_where_one_request_is_wrong(model):
    class Started(StopAfter):
        def __init__(self) -> None:
            raise AssertionError("decoded")

    good = Request(PROMPT, stop=Started)
    for bad, message in (
        (Request([3, 61]), r"requests\[1\].prompt: got token ids from 3 to 61, want 0 to 60"),
        (Request([-1, 3]), r"requests\[1\].prompt: got token ids from -1 to 3"),
        (Request([2**70]), r"requests\[1\].prompt"),
        ([3, 4], r"requests\[1\]: got \[3, 4\], want a Request"),
    ):
        with pytest.raises(ValueError, match=message):
            Loop(model).run([good, bad])
        with pytest.raises(ValueError, match=message):
            Loop(model).stream([good, bad])  # before the first event is asked for
    with pytest.raises(ValueError, match="requests: got Request"):
        Loop(model).run(good)


def test_requests_may_come_from_an_iterator(model, text):
    request = Request(PROMPT, max_new_tokens=9, ignore_eos=True)
    results = Loop(model, slots=2).run(request for _ in range(3))
    assert [r.tokens for r in results] == [text[:9]] * 3
    assert Loop(model).run([]) == []


# --- interruptions: Ctrl-C and errors at every place of a run leave the loop and the drafter usable ---


class Interrupting:
    """Passes calls on to an object; KeyboardInterrupt in the n-th of one method, before or after its work."""

    def __init__(self, inner, method, call, *, after):
        self._inner, self._method, self._left, self._after = inner, method, call, after

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if name != self._method:
            return value

        def call(*args, **kwargs):
            self._left -= 1
            if self._left == 0 and not self._after:
                raise KeyboardInterrupt
            result = value(*args, **kwargs)
            if self._left == 0:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("model", "prefill"),
        ("model", "forward"),
        ("drafter", "begin"),
        ("drafter", "propose"),
        ("drafter", "observe"),
        ("drafter", "end"),
        ("cache", "take_pending"),
        ("cache", "defer"),
        ("cache", "flush"),
    ],
)
def test_an_interrupt_leaves_the_loop_usable(part, method, after, model, text):
    requests = [Request(PROMPT, max_new_tokens=20 - i, ignore_eos=True) for i in range(3)]
    for call in (1, 2, 5):
        loop = Loop(model, ModelDrafter(model, slots=2), slots=2, budget=DraftBudget(3, adaptive=False))
        whole = getattr(loop, part)
        setattr(loop, part, Interrupting(whole, method, call, after=after))
        results = []
        with contextlib.suppress(KeyboardInterrupt):  # some calls come fewer times than that
            for _ in loop.stream(requests, results):
                pass
        for result in results:
            assert result.tokens == text[: len(result.tokens)]
        setattr(loop, part, whole)
        again = loop.run(requests)
        assert [r.tokens for r in again] == [text[: r.max_new_tokens] for r in requests]
        assert [r.finish_reason for r in again] == ["length"] * 3


def test_an_interrupt_while_taking_a_slot_loses_none(model, text, monkeypatch):
    loop = Loop(model)
    enter = loop._enter

    def interrupted(sequences):
        monkeypatch.setattr(loop, "_enter", enter)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_enter", interrupted)
    request = Request(PROMPT, max_new_tokens=9, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        loop.run([request])
    assert loop.run([request])[0].tokens == text[:9]


def test_an_error_in_a_stop_condition_or_a_consumer_leaves_the_loop_usable(model, text):
    class Broken(StopAfter):
        def feed(self, token: int) -> bool:
            if super().feed(token):
                raise RuntimeError("broken")
            return False

    request = Request(PROMPT, max_new_tokens=9, ignore_eos=True)
    loop = Loop(model, oracle(text, model.vocab_size), budget=DraftBudget(3, adaptive=False))
    for count in (1, 2, 4):
        with pytest.raises(RuntimeError, match="broken"):
            loop.run([Request(PROMPT, stop=lambda count=count: Broken(count), ignore_eos=True)])

    def consume():
        for event in loop.stream([request]):
            raise RuntimeError(f"cannot show {event.tokens}")

    try:
        consume()
    except RuntimeError:  # while the error is handled, as in a server that goes on
        assert loop.run([request])[0].tokens == text[:9]


def test_a_stream_that_was_never_begun_blocks_nothing(model, text):
    loop = Loop(model)
    request = Request(PROMPT, max_new_tokens=9, ignore_eos=True)
    unused = loop.stream([request])
    assert loop.run([request])[0].tokens == text[:9]
    unused.close()
    closed = loop.stream([request])
    next(closed)
    closed.close()
    assert list(closed) == []
    assert loop.run([request])[0].tokens == text[:9]


def test_a_drafter_for_fewer_slots_is_named(model):
    loop = Loop(model, ModelDrafter(model), slots=2)
    with pytest.raises(ValueError, match="made with slots=1, want as many as the loop has"):
        loop.run([Request(PROMPT)] * 2)


def test_tokens_that_a_forward_pass_refuses_cost_no_pending_commit(model):
    cache, slots = model.new_cache(1), torch.zeros(1, dtype=torch.int32)
    model.prefill([PROMPT], cache=cache, slots=[0])
    _, factors = model.forward(torch.tensor([[5]]), cache=cache, slots=slots)
    cache.defer(factors, None, torch.ones(1, dtype=torch.int32))
    with pytest.raises(IndexError):
        model.forward(torch.tensor([[61]]), cache=cache, slots=slots)
    assert cache.has_pending


def test_a_prompt_of_many_thousand_tokens(model):
    """There is no context window: the state of a long prompt is as large as that of a short one."""
    request = Request([1 + i % 60 for i in range(20_001)], max_new_tokens=4, ignore_eos=True)
    short = Request(PROMPT, max_new_tokens=4, ignore_eos=True)
    together = Loop(model, NGramDrafter(), slots=2).run([request, short])
    assert [r.tokens for r in together] == [Loop(model).run([r])[0].tokens for r in (request, short)]
