"""The advisor's figures, against computations by hand, and decoding in turn."""

from __future__ import annotations

import pytest

from loop.models import FAMILIES
from specdec.drafters.draft_exit import StaticThreshold
from specdec.methods.autoregressive import autoregressive
from specdec.methods.self_speculative import self_speculative
from specdec.models.skipping import SkipSet
from specdec.tuning.advisor import Decoded, advise, decode_in_turn, predicted_speedup, sentence, table_of
from specdec.tuning.round_times import TimedRound

PROMPTS = [[3, 5, 7], [8, 9, 8, 9, 8]]


@pytest.mark.parametrize("a", [0.3, 0.8])
@pytest.mark.parametrize("n", [1, 4])
def test_drafts_of_one_length_and_chance_have_the_closed_form(a: float, n: int) -> None:
    c, v = 0.3, 1.25
    told = predicted_speedup([a ** (j + 1) for j in range(n)], [7] * n, {n: 7}, c, {n: v})
    assert told == pytest.approx((1 - a ** (n + 1)) / ((1 - a) * (n * c + v)))


def test_rounds_of_several_lengths_count_as_often_as_they_come() -> None:
    """4 plain rounds, 6 of 1 and 2 drafts: depth 1 was drafted 6 times and kept 3, depth 2 twice and once."""
    told = predicted_speedup([0.5, 0.5], [6, 2], {0: 4, 1: 4, 2: 2}, 0.5, {0: 1.1, 1: 1.2, 2: 1.4})
    assert told == pytest.approx((10 + 3 + 1) / (4 * 1.1 + 4 * (0.5 + 1.2) + 2 * (1.0 + 1.4)))


def some_rounds() -> tuple[Decoded, Decoded]:
    plain = Decoded(rounds=[TimedRound(0, 1, 0.0, 2.0)] * 5, speedups=[[1.0, 1.0, 1.0]])
    rounds = [
        TimedRound(2, 3, 2.0, 3.0),
        TimedRound(2, 1, 2.0, 3.0),
        TimedRound(2, 2, 90.0, 99.0),  # interrupted: medians do not see it
        TimedRound(0, 1, 0.2, 2.2),
    ]
    drafts = Decoded(rounds=rounds, speedups=[[1.3, 1.1, 0.2], [1.2]], drafted_at=[3, 3], accepted_at=[2, 1])
    return plain, drafts


def test_advice_by_hand() -> None:
    advice = advise("some exit", *some_rounds())
    assert advice.draft_cost == pytest.approx(0.5)  # a second a draft, two a plain round
    assert advice.verify_cost == {2: pytest.approx(1.5), 0: pytest.approx(1.2)}
    assert advice.acceptance == pytest.approx([2 / 3, 1 / 3])
    assert advice.tokens == pytest.approx(7 / 4)
    assert advice.drafts == pytest.approx(1.5)
    assert advice.verifying == pytest.approx((3 * 1.5 + 1.2) / 4)
    assert advice.predicted == pytest.approx((4 + 3) / (3 * (2 * 0.5 + 1.5) + 1.2))
    assert advice.measured == pytest.approx((1.1 * 1.2) ** 0.5)
    assert advice.by_prompt == [1.1, 1.2]
    assert advice.as_dict()["verify_cost"] == {"0": pytest.approx(1.2), "2": pytest.approx(1.5)}
    shown = table_of([advice], "Does it pay?").markdown(2)
    assert "| some exit | 1.50 | 0.50 | 1.43 | 0.67 | 0.33 |  |  | 1.75 | 0.80x | 1.15x |" in shown


@pytest.mark.parametrize(
    ("speedup", "words"),
    [(1.2, "pays for a model"), (0.99, "makes no difference for"), (0.7, "does not pay for a model, decode")],
)
def test_one_sentence_says_whether_it_pays(speedup: float, words: str) -> None:
    plain, drafts = some_rounds()
    drafts.speedups = [[speedup]]
    rests = Decoded(rounds=[TimedRound(0, 1, 0.2, 2.2)], speedups=[[speedup - 0.01]])
    text = sentence("a model", [advise("rests", plain, rests), advise("drafts", plain, drafts)])
    assert words in text
    assert f": drafts has {speedup:.2f} times" in text
    assert "a draft takes 0.50 of a plain round and 67% of the first drafts are kept." in text
    # Where drafting paused, what it costs is told of the way that always drafts, and no gain is claimed.
    rests.speedups = [[speedup + 0.01]]
    text = sentence("a model", [advise("rests", plain, rests), advise("drafts", plain, drafts)])
    assert f": rests has {speedup + 0.01:.2f} times" in text
    assert "self-speculation pays" not in text
    assert f"drafting in every round {speedup:.2f} times, as a draft takes 0.50" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_in_turn_counts_what_was_drafted(family: str) -> None:
    model = FAMILIES[family](num_hidden_layers=4)
    told: list[str] = []
    skips = SkipSet.of([1], [2])
    found = decode_in_turn(
        lambda: autoregressive(model),
        {
            "all": lambda: self_speculative(model, SkipSet(), exit=StaticThreshold(0.0), adaptive=False),
            "some": lambda: self_speculative(model, skips, exit=StaticThreshold(0.3), adaptive=False),
        },
        PROMPTS,
        new_tokens=20,
        turns=2,
        on_run=told.append,
    )
    assert found is not None
    plain, others = found
    turn = ["plain decoding", "all", "some"]
    assert told == turn[::-1] + 2 * turn + 2 * turn[::-1]  # the first one warms up
    assert plain.speedups == [[1.0, 1.0], [1.0, 1.0]]
    assert plain.drafted_at == []
    assert sum(r.tokens for r in plain.rounds) == 2 * 2 * 19
    for decoded in others.values():
        assert [len(turns) for turns in decoded.speedups] == [2, 2]
        assert sum(r.drafted for r in decoded.rounds) == sum(decoded.drafted_at) > 0
        assert sum(r.tokens for r in decoded.rounds) == 2 * 2 * 19
        assert decoded.texts == plain.texts
    assert others["all"].drafted_at == others["all"].accepted_at
    assert sum(others["some"].accepted_at) < sum(others["some"].drafted_at)


def test_decoding_in_turn_stops_and_compares_texts() -> None:
    model, other = FAMILIES["llama"](), FAMILIES["llama"](1)
    makers = {"other": lambda: autoregressive(other)}
    assert (
        decode_in_turn(
            lambda: autoregressive(model), {}, PROMPTS, new_tokens=4, turns=1, should_stop=lambda: True
        )
        is None
    )
    with pytest.raises(RuntimeError, match="other: prompt 0 got another text"):
        decode_in_turn(lambda: autoregressive(model), makers, PROMPTS, new_tokens=12, turns=1)
