"""When drafting is left out: by the clock, and a drafter that rested knows what one that was told does."""

from __future__ import annotations

import pytest

from loop.models import random_model
from specdec import Loop, NGramDrafter, Request
from specdec.budget import DraftBudget
from specdec.resting import ENOUGH, EVERY, FIRST_REST, MEASURED, WINDOW, Rest


def rounds(rest: Rest, count: int, *, tokens: int, drafting: float, plain: float) -> list[bool]:
    """Plays rounds of one sequence; whether each of them was without the drafter."""
    rested = []
    for _ in range(count):
        rested.append(rest.due())
        rest.observe(rested[-1], 1, 1 if rested[-1] else tokens, plain if rested[-1] else drafting, 0.5)
    return rested


def test_a_drafter_that_pays_goes_on() -> None:
    rested = rounds(Rest(), 10_000, tokens=2, drafting=1.9, plain=1.0)
    assert sum(rested) <= MEASURED * (1 + 10_000 // EVERY)
    assert sum(rested[: 2 * WINDOW]) == MEASURED  # what plain rounds take is known early


def test_a_drafter_that_does_not_pay_rests_ever_longer() -> None:
    rested = rounds(Rest(), 10_000, tokens=2, drafting=2.1, plain=1.0)
    assert sum(rested) > 9_000
    assert sum(rested[: 2 * ENOUGH + FIRST_REST]) >= FIRST_REST  # and soon


def test_stretches_that_bring_much_pay_for_those_that_bring_nothing() -> None:
    """Plain decoding is 4% faster in three windows of four, and half as fast in the fourth."""
    rest, rested = Rest(), 0
    for _ in range(40):
        rested += sum(rounds(rest, 3 * WINDOW, tokens=1, drafting=1.04, plain=1.0))
        rested += sum(rounds(rest, WINDOW, tokens=2, drafting=1.04, plain=1.0))
    assert rested <= MEASURED * (1 + 160 * WINDOW // EVERY) + 2 * FIRST_REST


def test_a_drafter_that_comes_to_pay_is_asked_again() -> None:
    rest = Rest()
    assert sum(rounds(rest, 2000, tokens=1, drafting=1.2, plain=1.0)) > 1000
    rounds(rest, 4096, tokens=3, drafting=1.2, plain=1.0)
    assert sum(rounds(rest, 2 * EVERY, tokens=3, drafting=1.2, plain=1.0)) <= 3 * MEASURED


def test_a_new_text_is_tried_alone_and_not_in_a_batch() -> None:
    budget = DraftBudget()
    for _ in range(8 * WINDOW):
        for rows in (1, 16):
            rested = budget.rests(rows)
            budget.observe_round(rows, 1, 1.0, 1.0 if rested else 1.5, rows, rested)
    assert budget.rests(1)
    assert budget.rests(16)
    budget.begin(16)
    assert budget.rests(16)
    budget.begin(1)
    assert not budget.rests(1)


def test_batches_of_other_sizes_are_other_cases() -> None:
    budget = DraftBudget()
    for _ in range(4 * WINDOW):
        for rows, tokens in ((1, 4), (16, 16)):
            rested = budget.rests(rows)
            budget.observe_round(rows, 1, 1.0, 1.0 if rested else 1.5, rows if rested else tokens, rested)
    assert not budget.rests(1)
    assert budget.rests(16)


def test_fixed_drafts_never_rest() -> None:
    budget = DraftBudget(adaptive=False)
    for _ in range(4 * WINDOW):
        assert not budget.rests(1)
        budget.observe_round(1, 9, 1.0, 50.0, 1)


class Resting(Rest):
    """Rests in rounds that a list says, whatever the clock says."""

    def __init__(self, pattern: list[bool]) -> None:
        super().__init__()
        self.pattern = pattern
        self.round = 0

    def due(self) -> bool:
        self.round += 1
        return self.pattern[self.round % len(self.pattern)]


class Listening(NGramDrafter):
    """Keeps what it is told, in order, and checks that it is asked with all of it known."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[int, list[int]] = {}
        self.asked = 0

    def begin(self, slot, prompt, features=None):  # type: ignore[no-untyped-def]
        super().begin(slot, prompt, features)
        self.heard[slot] = list(prompt)

    def propose(self, requests):  # type: ignore[no-untyped-def]
        self.asked += 1
        for request in requests:
            assert len(self.heard[request.slot]) == request.position
        return super().propose(requests)

    def observe(self, slot, path, tokens, features=None):  # type: ignore[no-untyped-def]
        super().observe(slot, path, tokens, features)
        self.heard[slot] += tokens


@pytest.mark.parametrize("slots", [1, 3])
def test_a_rested_drafter_hears_everything(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    requests = [Request((5, 6, 7, 5, 6), 150, ignore_eos=True), Request((9,), 90, ignore_eos=True)] * 2
    want = [result.tokens for result in Loop(model).run(requests)]
    pattern = [True] * 70 + [False] * 5 + [True, False]
    monkeypatch.setattr("specdec.budget.Rest", lambda: Resting(pattern))
    drafter = Listening()
    loop = Loop(model, drafter, slots=slots)
    assert [result.tokens for result in loop.run(requests)] == want
    assert 0 < drafter.asked < loop.statistics.rounds
