"""Sets of skipped sub-layers that change while a model decodes: the text is as ever, the time bounded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import specdec
from loop.models import FAMILIES
from specdec.acceptance import SamplingParams
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.cache import Steps
from specdec.drafters import online_skips
from specdec.drafters.draft_exit import AdaptiveExit, FixedLength
from specdec.drafters.online_skips import SHARE, WINDOW, OnlineSkipDrafter, neighbours, worth
from specdec.generation import Request
from specdec.loop import Loop
from specdec.methods.autoregressive import autoregressive
from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet

PROMPTS = [[3, 5, 7], [8, 9, 8, 9, 8], [4], [11, 12, 13, 11, 12], [2, 2], [30, 31]]
ALWAYS = 1e9  # a share that affords everything
SAMPLED = SamplingParams(temperature=0.9, top_k=20, presence_penalty=0.2, seed=5)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> SkippableLM:
    return FAMILIES[request.param](num_hidden_layers=4)


def requests(sampling: SamplingParams | None = None, tokens: int = 60) -> list[Request]:
    sampling = SamplingParams() if sampling is None else sampling
    return [
        Request(p, tokens - 4 * i, replace(sampling, seed=i), ignore_eos=True) for i, p in enumerate(PROMPTS)
    ]


def loop_with(model, drafter, slots=1, *, most=5, observer=None):  # type: ignore[no-untyped-def]
    budget = DraftBudget(most, adaptive=False, whole=drafter.exit is not None)
    return Loop(model, drafter, slots=slots, budget=budget, observer=observer, cache=drafter.cache)


class Restless(OnlineSkipDrafter):
    """Takes every challenger, good or bad."""

    def _read_both(self, window, trial):  # type: ignore[no-untyped-def]
        taken = self.refinement.switches
        super()._read_both(window, trial)
        if self.refinement.switches == taken:
            self._switch(trial)


@pytest.mark.parametrize(
    ("sampling", "vocabulary", "slots"),
    [(None, None, 1), (None, tuple(range(0, 61, 2)), 4), (SAMPLED, None, 4), (SAMPLED, (1, 5, 7, 9), 1)],
)
def test_texts_and_memory_are_plain_decodings(model, sampling, vocabulary, slots):
    """Token for token, sampled ones too, although sets are tried and taken all the time."""
    asked = requests(sampling)
    drafter = Restless(
        model,
        SkipSet.of(range(4), range(4)),
        model.new_cache(slots),
        vocabulary=vocabulary,
        share=ALWAYS,
        exit=AdaptiveExit(threshold=0.3),
    )
    got = loop_with(model, drafter, slots, observer=CacheAuditor(model, slots)).run(asked)
    assert [r.tokens for r in got] == [r.tokens for r in autoregressive(model, slots=4).run(asked)]
    told = drafter.refinement
    assert told.readings >= 6
    assert told.switches >= 3
    assert drafter.view.vocabulary is None or drafter.view.vocabulary.tolist() == list(vocabulary)


def test_a_bad_set_is_left_for_one_that_drafts_better():
    """The first layers of the embedded model, without which next to nothing that it drafts is right."""
    model, tokenizer = specdec.load_model("gdn-code"), specdec.load_tokenizer("gdn-code")
    bad = SkipSet.of(range(6), range(6))
    prompt = tokenizer.encode("class Stack:\n    def __init__(self):\n        self.items = []\n\n    def ")
    asked = [Request(prompt, 300, ignore_eos=True)]

    def accepted(drafter: OnlineSkipDrafter) -> float:
        loop = loop_with(model, drafter, most=3)
        loop.run(asked)
        return loop.statistics.acceptance_rate

    before = accepted(OnlineSkipDrafter(model, bad, model.new_cache(1), share=0.0, exit=FixedLength()))
    drafter = OnlineSkipDrafter(model, bad, model.new_cache(1), share=ALWAYS, exit=FixedLength())
    accepted(drafter)
    found = drafter.skips
    after = accepted(OnlineSkipDrafter(model, found, model.new_cache(1), share=0.0, exit=FixedLength()))
    assert before < 0.3
    assert after > before + 0.3
    assert len(found) > 0


def test_it_begins_without_a_set(model):
    """Plain decoding until similarity has proposed one."""
    drafter = Restless(model, SkipSet(), model.new_cache(1), share=ALWAYS, exit=FixedLength())
    loop = loop_with(model, drafter)
    loop.run(requests())
    assert len(drafter.skips) > 0
    assert 0 < loop.statistics.drafting_rounds < loop.statistics.rounds
    idle = OnlineSkipDrafter(model, SkipSet(), model.new_cache(1), share=0.0, exit=FixedLength())
    loop = loop_with(model, idle)
    loop.run(requests()[:1])
    assert loop.statistics.drafted == 0


def test_without_time_nothing_is_read(model):
    drafter = OnlineSkipDrafter(model, SkipSet.of([1], [2]), model.new_cache(2), share=0.0)
    loop_with(model, drafter, 2).run(requests())
    assert drafter.refinement.readings == 0
    assert drafter.skips == SkipSet.of([1], [2])


def test_time_is_bounded_by_the_share(model, monkeypatch):
    """By a clock on which a round takes a second and a pass of a view some: over long runs the share is kept,
    at any time but for what one pair of readings takes.
    """
    now = 0.0
    monkeypatch.setattr(online_skips, "perf_counter", lambda: now)
    reading = 0.6
    most = 0.0

    class Clocked(OnlineSkipDrafter):
        def _right(self, window, view):  # type: ignore[no-untyped-def]
            nonlocal now
            now += reading
            return super()._right(window, view)

        def observe(self, slot, path, tokens, features=None):  # type: ignore[no-untyped-def]
            nonlocal now, most
            now += 1.0
            super().observe(slot, path, tokens, features)
            told = self.refinement
            most = max(most, told.seconds - SHARE * told.decode_seconds)

    drafter = Clocked(model, SkipSet.of([1], [2]), model.new_cache(1), exit=FixedLength())
    loop_with(model, drafter).run(requests(tokens=200) * 2)
    told = drafter.refinement
    assert told.readings > 10
    assert told.seconds == pytest.approx(reading * told.readings)
    assert told.share < 1.1 * SHARE
    assert most <= 2 * reading


def test_it_is_not_there_where_it_is_not_asked_for():
    code = (
        "import sys; from specdec.cli.app import app\n"
        "try: app(['generate', 'x = 1', '--method', 'self-speculative', '--max-new-tokens', '4'])\n"
        "except SystemExit: pass\n"
        "assert 'specdec.drafters.layer_skip' in sys.modules\n"
        "assert not [m for m in sys.modules if 'online_skips' in m or m.startswith('specdec.tuning')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reading_is_what_the_view_would_draft(model):
    """Step by step from the memory before, whatever the target has read since."""
    cache, slots = model.new_cache(2), torch.tensor([1], dtype=torch.int32)
    text = [(7 * i) % 61 for i in range(WINDOW + 1)]
    model.prefill([[5], [6, 7, 8]], cache=cache, slots=[0, 1])
    view = model.skipping(SkipSet.of([1], [2]))
    frozen, steps, drafted = cache.frozen(1), Steps(), []
    for token in text[:WINDOW]:
        logits, round = view.forward(
            torch.tensor([[token]]), cache=cache, slots=slots, prefix=steps if len(steps) else None
        )
        steps.extend(round)
        drafted.append(int(logits[0, -1].argmax()))
    for _ in range(20):  # past the room that keys and values had
        _, round = model.forward(torch.tensor([text[:16]]), cache=cache, slots=slots)
        cache.commit(round, None, torch.tensor([16], dtype=torch.int32))
    drafter = OnlineSkipDrafter(model, SkipSet.of([1], [2]), cache)
    window = online_skips._Window(1, frozen, text)
    assert drafter._right(window, drafter.view) == [a == b for a, b in zip(drafted, text[1:], strict=True)]
    expected = [True, False, *[True] * (WINDOW - 2)]
    window.tokens[1:] = [a if good else (a + 1) % 61 for a, good in zip(drafted, expected, strict=True)]
    first = drafter._right(online_skips._Window(1, frozen, [text[0], *window.tokens[1:]]), drafter.view)
    assert first[0]  # the first is read from the memory alone, whatever comes after it


def test_neighbours_differ_in_a_sub_layer_or_a_layer():
    skips = SkipSet.of([0, 1], [1])
    found = neighbours(skips, 3)
    assert len(found) == len(set(found)) == 2 * 3 + 2  # layers 1 and 2 are all in or all out
    assert SkipSet.of([0], []) in found
    assert SkipSet.of([0, 1, 2], [1, 2]) in found
    assert SkipSet.of([0, 1], [0, 1]) in found
    assert skips not in found


def test_what_a_set_is_worth():
    assert worth(1.0, 1.0) == pytest.approx(2 / 2.1)
    assert worth(1.0, 0.4) == pytest.approx(13 / (1 + 12 * 0.5))
    assert worth(0.0, 0.5) == pytest.approx(1 / 1.6)
    assert worth(0.8, 0.3) == pytest.approx((1 - 0.8**3) / 0.2 / (1 + 2 * 0.4))
    assert worth(1.2, 0.3) == worth(1.0, 0.3)
