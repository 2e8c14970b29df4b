"""What a `Loop` refuses when it is made, rather than in its first round."""

from __future__ import annotations

import pytest

import specdec
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM


def test_a_name_or_a_class_is_no_model_and_no_drafter() -> None:
    model = specdec.load_model("gdn-code")
    for wrong in ("gdn-code", GatedDeltaNetForCausalLM, None):
        with pytest.raises(TypeError, match=r"^model: got .*, want a CausalLM"):
            specdec.Loop(wrong)  # type: ignore[arg-type]
    for wrong in ("ngram", specdec.NGramDrafter):
        with pytest.raises(TypeError, match=r"^drafter: got .*, want a Drafter"):
            specdec.Loop(model, wrong)  # type: ignore[arg-type]
