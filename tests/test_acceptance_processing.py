"""Logits processing: against a naive float64 twin, against transformers, row by row to the bit; the batched
edits and the operator against it.
"""

from __future__ import annotations

import doctest
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.acceptance.processing
from lossless.reference import distribution, edits
from specdec import ops
from specdec.acceptance import (
    SamplingParams,
    SequenceRows,
    TokenHistory,
    edit_logits,
    process_logits,
    token_logprobs,
)
from specdec.acceptance.processing import edited

# float32 keeps 24 bits. A score enters exp() after one subtraction and one division, each off by half a step
# of a score of at most S in size: p is off by a factor exp(2 S 2^-24), and by a few steps more for exp, the
# sum and the quotient.
EPS = 2.0**-24


def tolerance(scores: float) -> float:
    return (2 * scores + 8) * EPS


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.1, repetition_penalty=1.4),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
    SamplingParams(temperature=2.0, top_p=0.999, repetition_penalty=0.8),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, presence_penalty=0.9),
    SamplingParams(temperature=0.9, frequency_penalty=-0.4, top_k=3),
    SamplingParams(temperature=1.0, logit_bias={0: 3.5, 3: -40.0}),
    SamplingParams(temperature=1.0, banned_tokens=[1], top_p=0.9),
    SamplingParams(temperature=1.0, allowed_tokens=[0, 2, 3], banned_tokens=[2]),
    SamplingParams(frequency_penalty=2.0, logit_bias={2: 1.0}, allowed_tokens=range(4)),
    SamplingParams(
        temperature=0.8,
        top_k=9,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        logit_bias={1: -2.0, 2: 0.25},
        banned_tokens=[0],
    ),
]
# Those that transformers has under the same definition.
SHARED = [p for p in PARAMS if not p.greedy and not (replace(p, repetition_penalty=1.0)).edited]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [4, 63, 1000, 4099])
def test_equals_the_naive_twin(params: SamplingParams, vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=g, dtype=torch.float64) * 3
    tokens = torch.randint(vocab, (20,), generator=g).tolist()
    history = TokenHistory(vocab, tokens[:9], tokens[9:])
    got = process_logits(logits, params, history)
    assert got.dtype == torch.float64
    want = np.stack([distribution(row, params, tokens[:9], tokens[9:]) for row in logits.tolist()])
    # The sum of V terms is off by at most V steps; both sides round.
    np.testing.assert_allclose(got.numpy(), want, rtol=(2 * vocab + 200) * 2.0**-53, atol=0)

    low = process_logits(logits.float(), params, history)
    assert low.dtype == torch.float32
    want = np.stack([distribution(row, params, tokens[:9], tokens[9:]) for row in logits.float().tolist()])
    # Penalties and bias round once each; the largest logit and the smallest may lie on both sides of zero.
    largest = 2 * float(logits.abs().max()) + 20 * abs(params.frequency_penalty) + 48
    scores = 2 * largest / (params.temperature or 1.0)
    np.testing.assert_allclose(low.numpy(), want, rtol=tolerance(scores), atol=0)


def test_half_precision_is_the_float32_of_the_same_logits() -> None:
    params = SamplingParams(temperature=0.8, top_k=7)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(process_logits(logits, params), process_logits(logits.float(), params))


@pytest.mark.parametrize("vocab", [7, 4096, 4099, 151_936])
@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[6]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(params: SamplingParams, vocab: int) -> None:
    rows = 9 if vocab < 10_000 else 3
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=g) * 4
    history = TokenHistory(vocab, range(0, vocab, 5))
    together = process_logits(logits, params, history)
    for i in range(rows):
        assert torch.equal(process_logits(logits[i], params, history), together[i])
        assert torch.equal(process_logits(logits[i : i + 2], params, history), together[i : i + 2])
    strided = torch.randn(rows, vocab + 3, generator=g)
    strided[:, :vocab] = logits
    assert torch.equal(process_logits(strided[:, :vocab], params, history), together)


@pytest.mark.parametrize("params", SHARED, ids=str)
def test_transformers_agrees(params: SamplingParams) -> None:
    tf = pytest.importorskip("transformers.generation.logits_process")
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 500, generator=g, dtype=torch.float64) * 3
    ids = torch.randint(500, (4, 30), generator=g)
    chain = [tf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    chain.append(tf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(tf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(tf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(tf.MinPLogitsWarper(params.min_p))
    want = logits.clone()
    for step in chain:
        want = step(ids, want)
    got = torch.stack(
        [
            process_logits(row, params, TokenHistory(500, seen))
            for row, seen in zip(logits, ids.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(got, want.softmax(-1), rtol=1000 * 2.0**-53, atol=0)


def test_ties_go_to_the_lower_index() -> None:
    flat = torch.zeros(10)
    assert process_logits(flat, SamplingParams(temperature=1.0, top_k=3)).nonzero().flatten().tolist() == [
        0,
        1,
        2,
    ]
    nucleus = process_logits(flat, SamplingParams(temperature=1.0, top_p=0.35))
    assert nucleus.nonzero().flatten().tolist() == [0, 1, 2, 3]  # 0.3 is short of 0.35: the fourth crosses
    wide = process_logits(torch.zeros(4096), SamplingParams(temperature=1.0, top_p=0.5))
    assert wide.nonzero().flatten().tolist() == list(range(2048))  # reaches exactly one half
    assert process_logits(flat, SamplingParams()).argmax() == 0


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 1.0), st.floats(0.1, 30.0))
@settings(max_examples=40, deadline=None)
def test_the_nucleus_is_the_smallest_prefix(seed: int, top_p: float, scale: float) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(700, generator=g, dtype=torch.float64) * scale).round(decimals=1)  # many ties
    params = SamplingParams(temperature=1.0, top_p=top_p)
    kept = process_logits(logits, params).nonzero().flatten()
    full = logits.softmax(0)
    ranked = sorted(range(700), key=lambda i: (-float(logits[i]), i))
    assert sorted(ranked[: len(kept)]) == kept.tolist()
    mass = full[ranked].cumsum(0)
    slack = 700 * 2.0**-52
    assert mass[len(kept) - 1] >= top_p - slack
    assert len(kept) == 1 or mass[len(kept) - 2] < top_p + slack


def test_extreme_scores_stay_finite() -> None:
    logits = torch.tensor([-3e38, 30.0, 29.0, -float("inf")])
    for temperature in (1e-30, 1e-3, 1.0, 1e30):
        for more in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
            row = process_logits(logits, SamplingParams(temperature=temperature, **more))
            assert torch.isfinite(row).all()
            assert row[3] == 0
            assert row.sum().item() == pytest.approx(1.0, abs=4 * EPS)
    assert process_logits(logits, SamplingParams(temperature=1e-30)).tolist() == [0, 1, 0, 0]


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = torch.randn(5, 33, generator=torch.Generator().manual_seed(2)).round()
    one = process_logits(logits, SamplingParams(temperature=5.0, top_k=1))
    assert torch.equal(one, process_logits(logits, SamplingParams()))


def test_greedy_takes_the_penalised_argmax() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0], [-0.5, -1.0, -0.9]])
    history = TokenHistory(3, [0])
    params = SamplingParams(repetition_penalty=2.0)
    assert process_logits(logits, params, history).argmax(-1).tolist() == [1, 2]
    assert process_logits(logits, SamplingParams()).argmax(-1).tolist() == [0, 0]


def test_history_counts_a_token_once_and_forgets_rejected_drafts() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    logits = torch.tensor([4.0, 4.0, -4.0, 4.0])
    once, often = TokenHistory(4, [0]), TokenHistory(4, [0, 0, 0])
    often.extend([0])
    assert torch.equal(once.seen, often.seen)
    assert edited(logits, params, once.with_path([2, 0, 2])).tolist() == [2.0, 4.0, -8.0, 4.0]
    assert edited(logits, params, once).tolist() == [2.0, 4.0, -4.0, 4.0]  # the path left no trace
    with pytest.raises(ValueError, match=r"got 4, want tokens in \[0, 4\)"):
        once.extend([1, 4])
    assert once.seen.tolist() == [True, False, False, False]
    with pytest.raises(ValueError, match="got -1"):
        once.with_path([-1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("presence_penalty", 2.1),
        ("presence_penalty", "1"),
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", -3),
        ("logit_bias", 5),
        ("logit_bias", [1, 2]),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {"a": 0.5}),
        ("logit_bias", {True: 0.5}),
        ("allowed_tokens", []),
        ("allowed_tokens", "12"),
        ("allowed_tokens", [1.0]),
        ("allowed_tokens", 7),
        ("banned_tokens", [-3]),
        ("banned_tokens", None),
        ("logits_processor", "upper"),
    ],
)
def test_bad_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: got"):
        SamplingParams(**{name: value})


def test_a_penalty_needs_its_history() -> None:
    params = SamplingParams(repetition_penalty=1.1)
    with pytest.raises(ValueError, match="history: got None"):
        process_logits(torch.zeros(4), params)
    with pytest.raises(ValueError, match="history: got one over 3 tokens"):
        process_logits(torch.zeros(4), params, TokenHistory(3))


def test_a_bias_names_its_token_and_what_excludes_one() -> None:
    with pytest.raises(ValueError, match=r"logit_bias\[7\]: got nan, want a number"):
        SamplingParams(logit_bias={7: float("nan")})
    with pytest.raises(ValueError, match=r"logit_bias\[7\]: got -inf, .*banned_tokens excludes"):
        SamplingParams(logit_bias={7: -math.inf})
    with pytest.raises(ValueError, match="allowed_tokens: got all of them banned"):
        SamplingParams(allowed_tokens=[1, 2], banned_tokens={1, 2, 3})


def test_tokens_outside_the_vocabulary_are_named() -> None:
    for name, value in (("logit_bias", {4: 1.0}), ("allowed_tokens", [0, 4]), ("banned_tokens", [4])):
        params = SamplingParams(**{name: value})
        with pytest.raises(ValueError, match=f"{name}: got token 4, want 0 to 3"):
            process_logits(torch.zeros(4), params)
        process_logits(torch.zeros(5), params)
    with pytest.raises(ValueError, match="banned_tokens: got the whole vocabulary"):
        process_logits(torch.zeros(4), SamplingParams(banned_tokens=range(4)))


def test_parameters_are_frozen_hashable_and_equal_by_value() -> None:
    bias = {3: 1.0, 1: 2}
    params = SamplingParams(logit_bias=bias, allowed_tokens=[1, 3], banned_tokens=(9,))
    bias[3] = 5.0  # nobody changes them afterwards
    same = SamplingParams(logit_bias={1: 2.0, 3: 1.0}, allowed_tokens={3, 1}, banned_tokens=[9, 9])
    assert params == same
    assert hash(params) == hash(same)
    assert replace(params, seed=4) == replace(same, seed=4) != params
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]


def test_presence_and_frequency_count_the_output_alone() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    history = TokenHistory(4, [0, 0, 1], [1, 2, 2])
    assert edited(torch.zeros(4), params, history).tolist() == [0.0, -0.75, -1.0, 0.0]
    # A node's own path counts as output, each time.
    assert edited(torch.zeros(4), params, history.with_path([1, 3])).tolist() == [0.0, -1.0, -1.0, -0.75]
    assert history.tokens == [0, 0, 1, 1, 2, 2]


def favour_next(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A pure callback: bans the last token and favours the one after it."""
    logits[tokens[-1]] = -math.inf
    logits[(tokens[-1] + 1) % len(logits)] += 0.5 * len(tokens)
    return logits


def random_rows(g: np.random.Generator, params: SamplingParams, vocab: int, nodes: int) -> SequenceRows:
    """A random tree of drafts after a random history; it repeats tokens, and siblings repeat tokens."""
    history = TokenHistory(vocab, g.integers(vocab, size=9).tolist(), g.integers(vocab, size=200).tolist())
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < nodes:
        parent = paths[int(g.integers(len(paths)))]
        paths.append((*parent, int(g.integers(6 if g.random() < 0.5 else vocab))))
    return SequenceRows(params, history, paths)


EDITED = [*PARAMS, SamplingParams(), SamplingParams(logits_processor=favour_next, presence_penalty=1.0)]


@pytest.mark.parametrize("vocab", [11, 4099])
def test_batched_edits_have_the_bits_of_a_row_alone(vocab: int) -> None:
    """All sequences of a round in one call, on strided rows; padding (NaN) is neither read nor written."""
    g = np.random.default_rng(vocab)
    sequences = [random_rows(g, params, vocab, int(g.integers(1, 9))) for params in EDITED]
    wide = 8
    base = 3 * torch.randn(len(EDITED), wide + 1, vocab + 3, generator=torch.Generator().manual_seed(vocab))
    for row, s in zip(base, sequences, strict=True):
        row[len(s.paths) :] = math.nan
    rows = base.clone()[:, :wide, :vocab]
    edit_logits(rows, sequences)
    for b, s in enumerate(sequences):
        n = len(s.paths)
        want = torch.stack(
            [edited(base[b, i, :vocab], s.params, s.history.with_path(p)) for i, p in enumerate(s.paths)]
        )
        reached = [i for i, p in enumerate(s.paths) if s.params.logits_processor is None or reachable(s, p)]
        assert torch.equal(rows[b, reached], want[reached]), s.params
        assert rows[b, n:].isnan().all()
        alone = base.clone()[b : b + 1, :n, :vocab]
        edit_logits(alone, [s])
        assert torch.equal(alone[0], rows[b, :n])
        # What a drafter asks for: one row a sequence, which follows its own path.
        for i in reached:
            drafted = base[b, i : i + 1, :vocab].clone()
            edit_logits(drafted, [s._replace(paths=[s.paths[i]])])
            assert torch.equal(drafted[0], want[i])


def reachable(s: SequenceRows, path: tuple[int, ...]) -> bool:
    """Whether `favour_next` lets the path be: it bans a repetition of the last token."""
    last = s.history.tokens[-1]
    for token in path:
        if token == last:
            return False
        last = token
    return True


@pytest.mark.parametrize("params", [p for p in PARAMS if p.edited], ids=str)
def test_batched_edits_equal_the_naive_twin(params: SamplingParams) -> None:
    s = random_rows(np.random.default_rng(3), params, 63, 7)
    logits = 3 * torch.randn(1, 7, 63, generator=torch.Generator().manual_seed(3))
    rows = logits.clone()
    edit_logits(rows, [s])
    history = s.history
    prompt, output = history.tokens[:9], history.tokens[9:]
    for i, path in enumerate(s.paths):
        want = edits(logits[0, i].tolist(), params, prompt, [*output, *path])
        # Four operations, each off by half a step of what it works on: the logit, times 1.5 at most, and
        # what is taken from it, 2 for each of some 20 occurrences; 40 is the largest bias.
        size = 1.5 * float(logits.abs().max()) + 2 * 20 + 40
        np.testing.assert_allclose(rows[0, i].numpy(), want, rtol=0, atol=4 * size * EPS)


def test_rows_without_edits_are_left_alone() -> None:
    rows = torch.full((3, 2, 5), math.nan)
    edit_logits(rows, [None, SequenceRows(SamplingParams(temperature=1.0, top_k=2), None), None])
    assert rows.isnan().all()


def test_edits_name_what_is_wrong() -> None:
    biased = SamplingParams(logit_bias={1: 1.0})
    with pytest.raises(ValueError, match=r"logits: got torch\.float64"):
        edit_logits(torch.zeros(1, 4, dtype=torch.float64), [None])
    with pytest.raises(ValueError, match=r"logits: got torch\.float32 \[4\]"):
        edit_logits(torch.zeros(4), [None])
    for process in (lambda x: edit_logits(x, [None]), lambda x: process_logits(x, biased)):
        with pytest.raises(ValueError, match="logits: got a tensor on meta, want one on the CPU"):
            process(torch.zeros(1, 4, device="meta"))
    with pytest.raises(ValueError, match="sequences: got 2, want 1"):
        edit_logits(torch.zeros(1, 4), [None, None])
    with pytest.raises(ValueError, match=r"sequences\[0\].paths: got 2, want at most 1"):
        edit_logits(torch.zeros(1, 4), [SequenceRows(biased, None, [(), (1,)])])
    with pytest.raises(ValueError, match=r"sequences\[0\].history: got None"):
        edit_logits(torch.zeros(1, 4), [SequenceRows(SamplingParams(presence_penalty=1.0), None)])


def test_the_callback_is_asked_once_about_what_can_come() -> None:
    """Not below an excluded token, nor after one that ends the sequence; what it is given is its own."""
    asked = []

    def callback(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (6,)
        assert logits.dtype == torch.float32
        asked.append(tuple(tokens))
        if tokens == [0, 1, 4]:
            logits[2] = -math.inf
        tokens.clear()
        return logits.double()

    params = SamplingParams(logits_processor=callback, banned_tokens=[3])
    history = TokenHistory(6, [0], [1])
    paths = [(), (3,), (4,), (5,), (3, 1), (4, 2), (4, 1), (5, 1), (4, 2, 2), (4, 1, 1)]
    rows = torch.zeros(1, 12, 6)
    edit_logits(rows, [SequenceRows(params, history, paths, ends=frozenset([5]))])
    assert asked == [(0, 1), (0, 1, 4), (0, 1, 4, 1), (0, 1, 4, 1, 1)]
    assert history.tokens == [0, 1]
    assert rows[0, 2].tolist() == [0, 0, -math.inf, -math.inf, 0, 0]


@pytest.mark.parametrize("wrong", [None, torch.zeros(3), torch.zeros(4, dtype=torch.long), torch.zeros(1, 4)])
def test_a_callback_has_to_give_a_row(wrong: object) -> None:
    params = SamplingParams(logits_processor=lambda tokens, logits: wrong)
    with pytest.raises(ValueError, match=r"logits_processor: it returned .*, want the logits \[4\]"):
        edit_logits(torch.zeros(1, 4), [SequenceRows(params, TokenHistory(4, [0]))])
    with pytest.raises(ValueError, match="logits_processor: it returned"):
        process_logits(torch.zeros(4), params, TokenHistory(4, [0]))


@pytest.mark.parametrize("vocab", [11, 4099])
def test_the_operator_makes_the_same_rows(vocab: int) -> None:
    """The loop samples from `edit_logits` and the operator; `process_logits` in float64 is what is right."""
    g = np.random.default_rng(vocab)
    chosen = [p for p in PARAMS if p.logits_processor is None]
    sequences = [random_rows(g, params, vocab, 1) for params in chosen]
    logits = 3 * torch.randn(len(chosen), vocab, generator=torch.Generator().manual_seed(vocab + 1))
    rows = logits.clone()
    edit_logits(rows, sequences)
    got = ops.sampling_probs(
        rows,
        temperature=torch.tensor([p.temperature for p in chosen]),
        top_k=torch.tensor([p.top_k for p in chosen], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in chosen]),
        min_p=torch.tensor([p.min_p for p in chosen]),
    )
    for b, s in enumerate(sequences):
        want = process_logits(logits[b].double(), s.params, s.history).numpy()
        # As `tolerance`, and one more step of the score for each of edits (4) and the temperature in float32
        # and its inverse (2); weights below e^-87 are 0.
        largest = 2 * (1.5 * float(logits.abs().max()) + 2 * 40 + 40)
        scores = largest / (s.params.temperature or 1.0)
        np.testing.assert_allclose(got[b].numpy(), want, rtol=4 * tolerance(scores), atol=math.exp(-86))


def test_log_probabilities_do_not_depend_on_their_neighbours() -> None:
    logits = 4 * torch.randn(9, 4099, generator=torch.Generator().manual_seed(8)).round(decimals=1)  # ties
    tokens = list(range(9))
    together = token_logprobs(logits, tokens, 5)
    for i, (row, got) in enumerate(zip(logits, together, strict=True)):
        assert token_logprobs(row[None], [i], 5) == [got]
        want = row.double().log_softmax(0)
        # Two subtractions and a logarithm, each off by a step; the sum of V terms by at most V.
        atol = (3 * abs(float(want.min())) + 4099) * 2.0**-53
        assert got.logprob == pytest.approx(float(want[i]), abs=atol)
        ranked = sorted(range(4099), key=lambda t, row=row: (-float(row[t]), t))[:5]
        assert [t for t, _ in got.top] == ranked
        assert [p for _, p in got.top] == pytest.approx(want[ranked].tolist(), abs=atol)
    assert [t.top for t in token_logprobs(logits, tokens, 0)] == [()] * 9
    assert len(token_logprobs(logits, tokens, 10_000)[0].top) == 4099


def test_docstring_examples() -> None:
    assert doctest.testmod(specdec.acceptance.processing).failed == 0
