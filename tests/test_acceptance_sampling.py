"""Logits processing: against a naive float64 twin, against transformers, row by row to the bit."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.acceptance.processing
from lossless.reference import distribution
from specdec.acceptance import SamplingParams, TokenHistory, greedy_tokens, process_logits
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
]


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
    scores = 2 * 2 * float(logits.abs().max()) / (params.temperature or 1.0)
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


@pytest.mark.parametrize("params", [p for p in PARAMS if not p.greedy], ids=str)
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
    assert greedy_tokens(flat, SamplingParams()).item() == 0


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
    assert greedy_tokens(logits, params, history).tolist() == [1, 2]
    assert greedy_tokens(logits, SamplingParams()).tolist() == [0, 0]


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
    ],
)
def test_bad_parameters_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: got"):
        SamplingParams(**{name: value})


def test_a_penalty_needs_its_history() -> None:
    params = SamplingParams(repetition_penalty=1.1)
    with pytest.raises(ValueError, match="history: got None"):
        process_logits(torch.zeros(4), params)
    with pytest.raises(ValueError, match="history: got one over 3 tokens"):
        process_logits(torch.zeros(4), params, TokenHistory(3))


def test_docstring_examples() -> None:
    assert doctest.testmod(specdec.acceptance.processing).failed == 0
