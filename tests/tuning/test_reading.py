"""Readings: what they say a view would draft is what the loop drafts with it and accepts."""

from __future__ import annotations

import pytest
import torch

from loop.models import FAMILIES
from specdec.drafters.draft_exit import FixedLength
from specdec.generation import Request
from specdec.methods.autoregressive import autoregressive
from specdec.methods.self_speculative import self_speculative
from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet
from specdec.tuning.reading import Outcomes, Reading, places_of

PROMPTS = [[3, 5, 7], [8, 9, 8, 9, 8], [4], [11, 12, 13, 11, 12]]
DEPTH, NEW = 3, 35
SETS = [SkipSet.of([1], []), SkipSet.of([], [2]), SkipSet.of([1, 2], [1, 2]), SkipSet.of([0, 3], [])]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> SkippableLM:
    return FAMILIES[request.param](num_hidden_layers=4, eos_token_ids=())  # drafts stop at an end token


@pytest.fixture(scope="module")
def texts(model: SkippableLM) -> list[tuple[list[int], list[int]]]:
    results = autoregressive(model, slots=4).run([Request(p, NEW, ignore_eos=True) for p in PROMPTS])
    return [(p, r.tokens) for p, r in zip(PROMPTS, results, strict=True)]


@pytest.mark.parametrize(
    ("skips", "vocabulary"), [*((s, None) for s in SETS), (SETS[0], range(1, 61, 2))], ids=str
)
def test_a_reading_says_what_the_loop_accepts(model, texts, skips, vocabulary) -> None:
    reading = Reading(model, texts, DEPTH)
    assert reading.places == 32
    right, confidence = reading.outcomes(model.skipping(skips, vocabulary))
    assert right.shape == confidence.shape == (4, 32, DEPTH)
    lengths = right.long().cumprod(-1).sum(-1).tolist()
    accepted = 0
    for row, (prompt, _) in enumerate(texts):
        loop = self_speculative(
            model, skips, exit=FixedLength(), max_draft=DEPTH, adaptive=False, vocabulary=vocabulary
        )
        place = 0
        for i, event in enumerate(loop.stream([Request(prompt, NEW, ignore_eos=True)])):
            if i == 0:
                continue  # of the prefill
            if place >= 32 - DEPTH:
                break
            assert len(event.tokens) == lengths[row][place] + 1, place
            accepted += lengths[row][place]
            place += len(event.tokens)
        assert loop.statistics.drafted > 0
    assert accepted > 0


def test_skipping_nothing_drafts_the_text(model, texts) -> None:
    right, confidence = Reading(model, texts, DEPTH).outcomes(model.skipping(SkipSet()))
    assert bool(right.all())
    assert bool((confidence > 0).all())
    assert bool((confidence <= 1).all())


def test_confidences_are_the_views_probabilities(model, texts) -> None:
    skips = SETS[0]
    _, confidence = Reading(model, texts, DEPTH).outcomes(model.skipping(skips))
    prompt, text = texts[1]
    cache = model.new_cache(1)
    model.prefill([[*prompt, *text[:5]]], cache=cache, slots=[0])
    logits, _ = model.skipping(skips).forward(
        torch.tensor([text[5 : 5 + DEPTH]]), cache=cache, slots=torch.zeros(1, dtype=torch.int32)
    )
    expected = logits.softmax(-1).amax(-1)[0]
    # The memory came from one prefill of the same tokens here and from a verification there.
    assert torch.allclose(confidence[1, 5], expected, rtol=1e-3)


def test_a_small_vocabulary_is_surer_and_never_right_beyond_it(model, texts) -> None:
    reading, vocabulary = Reading(model, texts, DEPTH), [*range(1, 61, 2)]
    right, confidence = reading.outcomes(model.skipping(SETS[0]))
    fewer, surer = reading.outcomes(model.skipping(SETS[0], vocabulary))
    known = torch.isin(reading._tokens, torch.tensor(vocabulary)).unfold(1, DEPTH + 1, 1)[..., 1:]
    known = known.reshape(right.shape)
    assert not bool((fewer & ~known).any())
    # What is likeliest of all tokens is likeliest of these, with more of the probability.
    both = right & known
    assert bool(both.any())
    assert bool(fewer[both].all())
    assert bool((surer[both] > confidence[both]).all())


def test_readings_of_parts_of_the_texts_are_parts(model, texts) -> None:
    view = model.skipping(SETS[2])
    whole = Reading(model, texts, DEPTH).outcomes(view)
    parts = [Reading(model, texts[i : i + 2], DEPTH).outcomes(view) for i in (0, 2)]
    assert torch.equal(Outcomes.joined(parts).right, whole.right)
    assert torch.allclose(Outcomes.joined(parts).confidence, whole.confidence, rtol=1e-3)


def test_similar_sets_are_of_every_size(model, texts) -> None:
    found = Reading(model, texts, DEPTH).similar(4)
    assert [len(s.skipped) for s in found] == [1, 2, 3, 4, 2, 4]
    assert all(-1.0 <= s.similarity <= 1.0 for s in found)


def test_texts_that_are_no_good_are_refused(model, texts) -> None:
    assert places_of(NEW, DEPTH) == 32
    assert places_of(18, DEPTH) == 0
    with pytest.raises(ValueError, match=r"texts: got continuations of \[18\], want one length from 19 on"):
        Reading(model, [([1], [2] * 18)], DEPTH)
    with pytest.raises(ValueError, match=r"texts: got continuations of \[19, 20\]"):
        Reading(model, [([1], [2] * 19), ([1], [2] * 20)], DEPTH)
    with pytest.raises(ValueError, match="depth: got 0"):
        Reading(model, texts, 0)
