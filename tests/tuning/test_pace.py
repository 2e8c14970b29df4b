"""The pace of a set: against a plain simulation of the rounds, and by hand."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.models.skipping import SkipSet
from specdec.tuning.pace import THRESHOLDS, Policy, RoundTimes, best_policy
from specdec.tuning.reading import Outcomes

VERIFY = (1.0, 1.1, 1.3, 1.4)  # K = 3


def simulated(right, confidence, length, threshold, once, each) -> tuple[float, float, float]:  # type: ignore[no-untyped-def]
    """Round after round through every text, from each of the first places as the loop would go on."""
    time = tokens = drafts = rounds = 0.0
    kept_at = [
        [_kept(r, c, length, threshold) for r, c in zip(texts, confidences, strict=True)]
        for texts, confidences in zip(right, confidence, strict=True)
    ]
    most = max(max(kept for kept, _ in row) for row in _all_kept(right, confidence))
    for row in kept_at:
        for start in range(min(most + 1, len(row))):
            place = start
            while place < len(row):
                kept, drafted = row[place]
                time += once + each * drafted + VERIFY[drafted]
                tokens += kept + 1
                drafts += drafted
                rounds += 1
                place += kept + 1
    return time / tokens, tokens / rounds, drafts / rounds


def _all_kept(right, confidence):  # type: ignore[no-untyped-def]
    """With the longest drafts there are: from how many places rounds begin is one number for all policies."""
    return [
        [_kept(r, c, 3, 0.0) for r, c in zip(texts, confidences, strict=True)]
        for texts, confidences in zip(right, confidence, strict=True)
    ]


def _kept(right: list[bool], confidence: list[float], length: int, threshold: float) -> tuple[int, int]:
    drafted = 0
    while drafted < length:
        drafted += 1
        if confidence[drafted - 1] < threshold:
            break
    kept = 0
    while kept < drafted and right[kept]:
        kept += 1
    return kept, drafted


@pytest.mark.parametrize("seed", range(6))
def test_the_best_policy_is_the_best_of_all_simulated_ones(seed: int) -> None:
    chance = random.Random(seed)
    confidence = torch.rand(2, 9, 3, generator=torch.Generator().manual_seed(seed))
    right = confidence > chance.uniform(0.1, 0.7)  # what is surer is right
    once, each = chance.uniform(0.0, 0.3), chance.uniform(0.05, 0.5)
    found = best_policy(Outcomes(right, confidence), once, each, VERIFY)
    every = {
        (n, threshold): simulated(right.tolist(), confidence.tolist(), n, threshold, once, each)
        for n in (1, 2, 3)
        for threshold in THRESHOLDS
    }
    pace, tokens, drafts = every[found.length, found.threshold]
    assert found.pace == pytest.approx(min(p for p, _, _ in every.values()))
    assert (found.pace, found.tokens, found.drafts) == pytest.approx((pace, tokens, drafts))


def test_a_pace_by_hand() -> None:
    """Every draft is right: 4 tokens a round of 3 drafts take 0.1 + 3 * 0.2 + 1.4 plain rounds."""
    outcomes = Outcomes(torch.ones(1, 8, 3, dtype=torch.bool), torch.ones(1, 8, 3))
    policy = best_policy(outcomes, 0.1, 0.2, VERIFY)
    assert policy == Policy(pytest.approx(2.1 / 4), 3, 0.0, 4.0, 3.0)
    # None is: the shortest draft is the least loss.
    policy = best_policy(Outcomes(~outcomes.right, outcomes.confidence), 0.1, 0.2, VERIFY)
    assert policy == Policy(pytest.approx(0.1 + 0.2 + 1.1), 1, 0.0, 1.0, 1.0)


def test_times_of_a_set_follow_from_what_it_leaves() -> None:
    times = RoundTimes(0.01, VERIFY, (0.1, 0.2, 0.03, 0.05, 0.16))
    skips = SkipSet.of([0, 1], [1, 2, 3])
    assert times.drafting(skips, 4, 1.0) == pytest.approx((0.1, 0.2 + 2 * 0.03 + 0.05 + 0.16))
    assert times.drafting(skips, 4, 0.25) == pytest.approx((0.1, 0.2 + 2 * 0.03 + 0.05 + 0.04))
    assert RoundTimes.read(times.as_dict()) == times
    policy = Policy(0.8, 3, 0.5, 2.5, 2.0)
    assert Policy.read(policy.as_dict()) == policy


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"plain_seconds": 1.0, "verify": [1.0, 1.0], "draft": [0.0, 1.0]},
        {"plain_seconds": 1.0, "verify": [1.0, 1.0], "draft": [0.0] * 4},
        {"plain_seconds": 1.0, "verify": [1.0], "draft": [0.0] * 5},
        {"plain_seconds": float("nan"), "verify": [1.0, 1.0], "draft": [0.0] * 5},
        {"plain_seconds": 1.0, "verify": [1.0, "1"], "draft": [0.0] * 5},
        {"plain_seconds": 1.0, "verify": 1.0, "draft": [0.0] * 5},
    ],
)
def test_times_that_are_none_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="times"):
        RoundTimes.read(values)


@pytest.mark.parametrize("change", [{"length": 0}, {"pace": -1.0}, {"pace": "x"}, {"other": 1}])
def test_policies_that_are_none_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="policy"):
        Policy.read({**Policy(0.8, 3, 0.5, 2.5, 2.0).as_dict(), **change})
