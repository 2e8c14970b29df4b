"""What a `Loop` refuses when it is made, rather than in its first round."""

from __future__ import annotations

import pytest

import specdec
from specdec.budget import DraftBudget
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM


def test_a_name_or_a_class_is_no_model_and_no_drafter() -> None:
    model = specdec.load_model("gdn-code")
    for wrong in ("gdn-code", GatedDeltaNetForCausalLM, None):
        with pytest.raises(TypeError, match=r"^model: got .*, want a CausalLM"):
            specdec.Loop(wrong)  # type: ignore[arg-type]
    for wrong in ("ngram", specdec.NGramDrafter):
        with pytest.raises(TypeError, match=r"^drafter: got .*, want a Drafter"):
            specdec.Loop(model, wrong)  # type: ignore[arg-type]


def test_a_number_is_no_budget_and_no_observer() -> None:
    model = specdec.load_model("gdn-code")
    for wrong in (16, 0, DraftBudget):
        with pytest.raises(TypeError, match=r"^budget: got .*, want a DraftBudget"):
            specdec.Loop(model, budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^observer: got 5, want a RoundObserver"):
        specdec.Loop(model, observer=5)  # type: ignore[arg-type]
