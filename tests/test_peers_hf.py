"""The comparison with `transformers`: what it makes of turns and texts."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.drafters.draft_exit import AdaptiveExit
from specdec.models import load_model
from specdec.models.checkpoint import weights_sha256
from specdec.models.skip_file import SkipFile, shipped_skip_file
from specdec.models.skipping import SkipSet

SPEC = importlib.util.spec_from_file_location("peers_hf", Path(__file__).parents[1] / "bench" / "peers_hf.py")
assert SPEC is not None
assert SPEC.loader is not None
peers_hf: Any = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = peers_hf  # dataclasses look their module up
SPEC.loader.exec_module(peers_hf)


def contender(name: str, seconds: list[float]) -> Any:
    return SimpleNamespace(name=name, seconds=seconds)


def test_ratios_are_taken_within_a_turn() -> None:
    """A machine that is busy for a turn slows both: the median of ratios, not the ratio of medians."""
    seconds = {
        "plain": [1.0, 10.0, 1.0],
        "hf generate": [2.0, 20.0, 2.0],
        "n-gram": [1.0, 1.0, 1.0],
        "hf prompt lookup": [1.1, 1.3, 1.1],
        "self-speculative": [2.0, 2.0, 2.0],
        "hf early exit": [8.0, 9.0, 10.0],
    }
    everybody = [contender(name, values) for name, values in seconds.items()]
    tables, ratios = peers_hf.report(everybody, 100)
    assert [r["ratio"] for r in ratios] == [2.0, pytest.approx(1.1), 4.5]
    assert [r["asked_for"] for r in ratios] == [1.3, 1.2, 4.0]
    assert len(tables) == 2
    missed = list(tables[1].columns[4].cells)
    assert [("missed" in cell) for cell in missed] == [False, True, False]
    peers_hf.report([contender(name, values[:1]) for name, values in seconds.items()], 100)  # of one turn


def test_everybody_takes_every_turn_and_first_runs_do_not_count() -> None:
    calls: list[tuple[str, int, int]] = []

    def run(name: str) -> Any:
        def new(prompt: list[int], tokens: int) -> list[int]:
            calls.append((name, prompt[0], tokens))
            return [prompt[0]] * tokens

        return new

    everybody = [peers_hf.Contender(name, run(name)) for name in "abc"]
    peers_hf.take_turns(everybody, [[7], [8]], 5, 2)
    assert len(calls) == 3 + 3 * 2 * 2
    for c in everybody:
        assert len(c.seconds) == 4
        assert c.texts == {0: [7] * 5, 1: [8] * 5}


def test_first_difference_is_told_with_the_peers_preference() -> None:
    """The peer reads the prompt and what both texts share."""
    read: list[list[int]] = []

    def peer(tokens: torch.Tensor) -> Any:
        read.append(tokens[0].tolist())
        logits = torch.zeros(1, tokens.shape[1], 10)
        logits[0, -1, 4], logits[0, -1, 6] = 2.0, 1.5
        return SimpleNamespace(logits=logits)

    assert peers_hf.first_difference(peer, [1], [3, 6, 9], [3, 4, 5]) == (1, 0.5)
    assert read == [[1, 3]]
    assert peers_hf.first_difference(peer, [1], [3, 4], [3, 4]) is None


def test_ours_drafts_for_itself_as_users_do(tmp_path: Path) -> None:
    model = load_model("gdn-code")
    assert model.source is not None
    shipped = SkipFile.read(shipped_skip_file(weights_sha256(model.source)))
    loop, told = peers_hf.drafting_itself(model, None)
    view = loop.drafter.model
    assert view.num_parameters == model.skipping(shipped.skips, shipped.vocabulary, int8=True).num_parameters
    assert loop.drafter.exit == AdaptiveExit()
    assert told.startswith(f"skipped {shipped.skips}, int8 weights, ")
    replace(shipped, skips=SkipSet.of([4]), vocabulary=(0, 5, 7), int8=False).write(tmp_path / "skip.json")
    loop, told = peers_hf.drafting_itself(model, tmp_path / "skip.json")
    assert loop.drafter.model.vocabulary.tolist() == [0, 5, 7]
    assert told == "skipped mixers 4; mlps none, the same weights, 3 tokens"
