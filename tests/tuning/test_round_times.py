"""Times of rounds: the line through them, and rounds told apart."""

from __future__ import annotations

import pytest

from loop.models import FAMILIES
from specdec.drafters.draft_exit import FixedLength
from specdec.generation import Request
from specdec.methods.self_speculative import self_speculative
from specdec.models.skipping import SkipSet
from specdec.tuning.round_times import (
    Case,
    TimedRound,
    _fitted,
    _rising,
    evenly_skipped,
    measure_times,
    timed_rounds,
)

CASES = [Case(mixers, mlps, 1.0, n) for mixers in (2, 6) for mlps in (2, 6) for n in (1, 2, 4)]
REDUCED = [Case(kept, kept, 0.125, n) for kept in (2, 6) for n in (1, 4)]
PLAIN = [TimedRound(0, 1, 0.0, 0.5)] * 2


def test_a_line_is_found_again() -> None:
    once, each, mixer, mlp, head = line = (0.1, 0.2, 0.03, 0.05, 0.16)  # in plain rounds, of half a second
    found = {}
    for case in [*CASES, *REDUCED]:
        n = case.drafts
        one = each + mixer * case.mixers + mlp * case.mlps + head * case.part
        rounds = [TimedRound(n, 1, 0.5 * (once + n * one), 0.5 + 0.05 * n)] * 2
        found[case] = [TimedRound(n, 1, 90.0, 90.0), *rounds]  # an interruption
    times = _fitted(found, PLAIN, 5)
    assert times.draft == pytest.approx(line)
    # Where nothing was measured with a part of the head, its time is in that of each draft.
    whole = _fitted({case: found[case] for case in CASES}, PLAIN, 5)
    assert whole.draft == pytest.approx((once, each + head, mixer, mlp, 0.0))
    # 3 did not occur, nor did 5: a line between the neighbours, and the last one.
    assert times.verify == pytest.approx((1.0, 1.1, 1.2, 1.3, 1.4, 1.4))
    assert times.plain_seconds == 0.5


def test_nothing_takes_less_than_no_time() -> None:
    # Fewer mixers seem to take longer.
    found = {c: [TimedRound(c.drafts, 1, c.drafts * (1.0 - 0.05 * c.mixers), 1.0)] for c in CASES}
    times = _fitted(found, PLAIN, 2)
    assert min(times.draft) == 0.0
    assert max(times.draft) > 0.0


def test_verifications_do_not_fall_with_their_length() -> None:
    assert _rising([1.0, 1.2, 1.1, 1.5]) == pytest.approx([1.0, 1.15, 1.15, 1.5])
    assert _rising([3.0, 2.0, 1.0]) == pytest.approx([2.0] * 3)
    assert _rising([1.0, 4.0, 3.0, 2.0, 5.0]) == pytest.approx([1.0, 3.0, 3.0, 3.0, 5.0])


def test_sets_are_spread_over_the_layers() -> None:
    assert evenly_skipped(8, 2, 8) == SkipSet.of([1, 2, 3, 5, 6, 7], [])
    assert evenly_skipped(3, 1, 2) == SkipSet.of([1, 2], [2])


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_are_told_apart(family: str) -> None:
    model = FAMILIES[family]()
    loop = self_speculative(model, SkipSet.of([1]), exit=FixedLength(), max_draft=3, adaptive=False)
    rounds, tokens = timed_rounds(loop, Request([3, 5, 7], 20, ignore_eos=True))
    stats = loop.statistics
    assert len(tokens) == 20
    assert len(rounds) == stats.rounds
    assert sum(r.tokens for r in rounds) == stats.emitted == 19
    assert sum(r.drafted for r in rounds) == stats.drafted
    assert sum(r.draft for r in rounds) == pytest.approx(stats.seconds.draft)
    assert all(r.draft > 0.0 and r.rest > 0.0 for r in rounds)
    first, text = timed_rounds(loop, Request([3, 5, 7], 20, ignore_eos=True), 2)
    assert [r[:2] for r in first] == [r[:2] for r in rounds[:2]]
    assert text == tokens[: len(text)]


def test_times_are_measured_for_every_length() -> None:
    times = measure_times(FAMILIES["llama"](), [[3, 5, 7], [8, 9]], 3, 0.0, vocabulary=range(1, 60, 8))
    assert len(times.verify) == 4
    assert times.verify[0] == 1.0
    assert min(times.verify) > 0.0
    assert min(times.draft) >= 0.0
    assert max(times.draft) > 0.0
    assert times.plain_seconds > 0.0
