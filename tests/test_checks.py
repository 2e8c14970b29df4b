"""Arguments that comparisons alone let through: True as a number, NaN, infinity, floats as counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loop.models import random_model
from specdec import DraftBudget, Loop, NGramDrafter, OracleDrafter, Request, SamplingParams
from specdec._checks import check_integer, check_number, shown
from specdec.cache import DecodingCache, LayerSpec
from specdec.methods import DrafterSpec
from specdec.models.config import GatedDeltaNetConfig
from specdec.training.loop import TrainingOptions
from specdec.tuning.kernels import measure_strategies

NAN, INF = float("nan"), float("inf")
SPEC = LayerSpec(heads=1, value_dim=32, key_dim=32)
MODEL = random_model(num_hidden_layers=1)
CONFIG = GatedDeltaNetConfig(61, 64, 1, 2, 2, 32, 1.0, 96)


def training(**options: Any) -> TrainingOptions:
    return TrainingOptions(CONFIG, **{"tokens": 1000, **options})


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (SamplingParams, "temperature", [True, False, NAN, INF, -1.0, 1e-31, 5e-324, 1e31, 10**400, "1"]),
        (SamplingParams, "top_k", [True, 1.0, -1, NAN, None]),
        (SamplingParams, "top_p", [True, NAN, 0.0, 0, 1.5, "1"]),
        (SamplingParams, "min_p", [True, NAN, -0.1, 1.5]),
        (SamplingParams, "repetition_penalty", [True, NAN, 0.0, INF, 1e-40, 1e40]),
        (SamplingParams, "seed", [True, 1.0, -1, 2**64]),
        (lambda **o: Request([1], **o), "max_new_tokens", [True, 1.5, 0, NAN, None]),
        (lambda **o: Request([1], **o), "sampling", [0.7, None]),
        (lambda **o: Request([1], **o), "stop", ["\n", ["a"]]),
        (Request, "prompt", [[True], [1.0], "text", [None], 5, None, []]),
        (lambda **o: Loop(MODEL, **o), "slots", [True, 1.5, 0, NAN, "1"]),
        (lambda **o: Loop(MODEL, **o), "commit", ["late", None]),
        (lambda **o: DecodingCache([SPEC], **o), "slots", [True, 1.5, 0, -1]),
        (DraftBudget, "max_draft", [True, 2.5, -1, NAN]),
        (NGramDrafter, "min_match", [True, 1.5, 0, NAN]),
        (NGramDrafter, "max_match", [True, 8.5, 1, 2**40]),
        (NGramDrafter, "branches", [True, 1.5, 0, 2**40]),
        (lambda **o: OracleDrafter([], **{"vocab_size": 8, **o}), "p", [True, NAN, 1.5]),
        (lambda **o: OracleDrafter([], **o), "vocab_size", [True, 2.5, 1]),
        (lambda oracle_p: DrafterSpec.parse("oracle", p=oracle_p), "oracle_p", [True, NAN, -0.5]),
        (training, "tokens", [True, 10.5, 0]),
        (training, "batch_size", [True, 1.5, 0, NAN]),
        (training, "seq_len", [True, 1.5, 0, NAN]),
        (training, "lr", [True, NAN, 0.0, 1.0]),
        (training, "layer_dropout", [True, NAN, -0.1, 1.0]),
        (training, "exit_weight", [True, NAN, INF, -1.0]),
        (training, "seed", [True, 0.5, -1, 2**31]),
        (measure_strategies, "budget", [True, NAN, INF, -1.0]),
    ],
)
def test_each_is_one_error_that_names_the_argument(
    make: Callable[..., object], name: str, values: list[object]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name}\b.*: got .+, want ") as error:
            make(**{name: value})
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 200


def test_what_is_right_passes() -> None:
    SamplingParams(temperature=1, top_k=0, top_p=5e-324, min_p=1, repetition_penalty=2, seed=2**64 - 1)
    SamplingParams(temperature=1e-30, repetition_penalty=1e30)
    check_integer("n", -3, -3)
    check_integer("n", 4, 0, 4)
    check_number("x", 2**70, 0.0)
    check_number("x", 5e-324, above=0.0, below=1.0)


@pytest.mark.parametrize(
    ("value", "bounds", "wanted"),
    [
        (0, {"above": 0.0, "below": 1.0}, "a number above 0 and below 1"),
        (1.0, {"low": 0.0, "below": 1.0}, "a number of at least 0 and below 1"),
        (2, {"above": 0.0, "high": 1.0}, "a number above 0 and at most 1"),
        (2, {"low": 0.0, "high": 1.0}, "a number from 0 to 1"),
        (INF, {"low": 0.0}, "a finite number of at least 0"),
        (0.5, {"low": 1.0, "other": "0"}, "0 or a finite number of at least 1"),
        (-INF, {"below": 0.0}, "a number below 0"),
    ],
)
def test_bounds_are_said(value: float, bounds: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=f"^x: got {value}, want {wanted}$"):
        check_number("x", value, **bounds)


def test_values_are_shown_on_one_short_line() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown([1] * 1000).endswith("...")
    assert len(shown([1] * 1000)) == 80
    assert shown(10**5000) == "a very large int"  # Python refuses to write it out


def test_slots_that_a_cache_does_not_have_are_refused() -> None:
    cache = DecodingCache([SPEC], 2)
    cache.state[0].fill_(1.0)
    for slots in ([2], [-1], [0, 1.0], [True]):
        with pytest.raises(ValueError, match="slots: got"):
            cache.reset(slots)
        with pytest.raises(ValueError, match="slot: got"):
            cache.snapshot(slots[-1])
    assert bool((cache.state[0] == 1.0).all())  # nothing was written
