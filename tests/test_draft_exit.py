"""When drafts end: the adaptive threshold by hand, the others, and how they are read."""

from __future__ import annotations

import pytest

from specdec.drafters.draft_exit import AdaptiveExit, FixedLength, StaticThreshold, parse_exit


def test_the_adaptive_threshold_by_hand() -> None:
    """Halves and quarters, so that every number is exact: rate and threshold after each round."""
    rule = AdaptiveExit(threshold=0.5, target=0.75, step=0.25, rate_memory=0.5, memory=0.5)
    threshold = rule.begin()
    assert threshold.value == 0.5
    rounds = [
        # drafted, accepted, most    rate                     moved          threshold
        ((4, 4, 4), 0.625),  #       0.5, too low             0.5 + 0.25     half way from 0.5 to it
        ((2, 2, 4), 0.75),  #        0.75, just the target    0.625 + 0.25
        ((4, 4, 4), 0.75),  #        0.875, and all drafted   stays
        ((2, 2, 4), 0.625),  #       0.9375, and not all      0.75 - 0.25
        ((4, 0, 4), 0.75),  #        0.46875                  0.625 + 0.25
    ]
    for (drafted, accepted, most), value in rounds:
        threshold.observe(drafted, accepted, most)
        assert threshold.value == value


def test_at_the_target_a_whole_draft_leaves_the_threshold() -> None:
    threshold = AdaptiveExit(threshold=0.5, target=0.5, step=0.25, rate_memory=0.5, memory=0.5).begin()
    threshold.observe(4, 4, 4)  # the rate is 0.5
    assert threshold.value == 0.5


def test_the_papers_numbers() -> None:
    """0.6, steps of 0.01 of which a tenth counts, rates of which a half counts, 0.85 to be kept."""
    threshold = AdaptiveExit().begin()
    want, rate = 0.6, 0.0
    for drafted, accepted in [(4, 3), (12, 12), (12, 12), (12, 12), (5, 5), (3, 0), (7, 6), (1, 1), (1, 1)]:
        threshold.observe(drafted, accepted, 12)
        rate = 0.5 * rate + 0.5 * accepted / drafted
        if rate <= 0.85:
            want = 0.9 * want + 0.1 * (want + 0.01)
        elif drafted < 12:
            want = 0.9 * want + 0.1 * (want - 0.01)
        assert threshold.value == pytest.approx(want, abs=1e-15)
    assert AdaptiveExit().begin().value == 0.6


def test_sequences_have_thresholds_of_their_own() -> None:
    rule = AdaptiveExit()
    one, other = rule.begin(), rule.begin()
    one.observe(2, 0, 12)
    assert (one.value > 0.6, other.value) == (True, 0.6)


def test_what_does_not_adapt() -> None:
    for rule, value in ((FixedLength(), 0.0), (StaticThreshold(0.3), 0.3)):
        threshold = rule.begin()
        threshold.observe(5, 0, 5)
        assert threshold.value == value


def test_exits_by_name() -> None:
    assert parse_exit("adaptive") == (AdaptiveExit(), 1)
    assert parse_exit(" static:0.45") == (StaticThreshold(0.45), 1)
    assert parse_exit("static") == (StaticThreshold(0.6), 1)
    assert parse_exit("fixed") == (FixedLength(), 1)
    assert parse_exit("priced") == (None, 1)


def test_settings_by_the_papers_names() -> None:
    every = parse_exit("adaptive:gamma0=0.5, alpha=0.9,eps = 0.02,beta1=0.4,beta2=0.8,widen=3")
    assert every == (AdaptiveExit(threshold=0.5, target=0.9, step=0.02, rate_memory=0.4, memory=0.8), 3)
    assert parse_exit("adaptive:alpha=0.9").exit == AdaptiveExit(target=0.9)
    assert parse_exit("static:0.5,widen=2") == (StaticThreshold(0.5), 2)
    assert parse_exit("static:widen=4") == (StaticThreshold(), 4)


@pytest.mark.parametrize(
    "text",
    [
        *("", "Fixed", "fixed:3", "fixed:widen=2", "priced:widen=2", "priced:"),
        *("static:", "static:2", "static:nan", "static:0.5,0.6", "static:alpha=0.5", "static:=0.5"),
        *("adaptive:", "adaptive:1", "adaptive:alpha", "adaptive:alpha=", "adaptive:alpha=2"),
        *("adaptive:target=0.9", "adaptive:alpha=0.8,alpha=0.9", "adaptive:alpha=0.8,", "adaptive:alpha=a=1"),
        *("adaptive:widen=1", "adaptive:widen=2.5", "adaptive:widen=1000", "static:widen=-1"),
    ],
)
def test_what_is_no_exit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"draft_exit: got .*, want priced, fixed, static:T or adaptive"):
        parse_exit(text)


def test_numbers_out_of_range_are_refused() -> None:
    for name in ("threshold", "target", "step", "rate_memory", "memory"):
        for value in (-0.1, 1.5, float("nan"), True):
            with pytest.raises(ValueError, match=f"{name}: got"):
                AdaptiveExit(**{name: value})
    with pytest.raises(ValueError, match="threshold: got 1"):
        StaticThreshold(1.01)
