"""`specdec tune --method hispec`, on the embedded model and at sizes that take seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specdec.cli.app import app
from specdec.drafters.plan import Plan
from specdec.models import load_model
from specdec.tuning import tier_sweep
from specdec.tuning.tier_sweep import Found

LINE = "def function_{0}(argument, other={0}):\n    total = argument + other\n    return total * {0}\n\n\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(3):
        (text / f"{i}.py").write_text("".join(LINE.format(9 * i + j) for j in range(20)), encoding="utf-8")
    return text


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", "--method", "hispec", *arguments])


def test_command_measures_every_setting(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PROMPTS": 1, "TOKENS": 8, "TURNS": 1}.items():
        monkeypatch.setattr(tier_sweep, name, value)
    out, plot = tmp_path / "tiers.json", tmp_path / "tiers.png"
    given = ["--model", "gdn-code", "--text", str(folder), "--seconds", "0", "--exit-adapters", "none"]
    result = invoke(*given, "--json", str(out), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    plans = tier_sweep.plans_of(load_model("gdn-code"))
    assert [row["tiers"] for row in found["rows"]] == [*map(str, plans), "auto"]
    assert {(p.exit, p.middle) for p in plans} == {(2, 0), (5, 0), (2, 5)}
    for row in found["rows"]:
        assert len(row["speedup_by_prompt"]) == 1
        assert 1.0 <= row["tokens_per_round"] <= 8.0
        assert row["tiers"] in result.stdout
    assert found["sentence"] in result.stdout
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gdn-code"], "--text: missing, want one with --model"),
        (["--model", "gdn-code", "--text", "none"], "--text: 'none' is not a folder"),
        (["--model", "gdn-code", "--text", ".", "--out", "a"], "--out: only for --method self-speculative"),
        (["--model", "gdn-code", "--text", ".", "--trials", "3"], "--trials: only for --method"),
        (["--model", "gdn-code", "--text", ".", "--resume"], "--resume: only for --method"),
        (["--model", "gdn-code", "--text", ".", "--warm-start-only"], "--warm-start-only: only for --method"),
        (["--model", "gdn-code", "--text", ".", "--seconds", "-1"], "--seconds: got -1"),
        (["--model", "gdn-code", "--text", ".", "--plot", "a.txt"], "--plot: got a.txt"),
        (["--model", "gdn-code", "--text", ".", "--exit-adapters", "a"], "--exit-adapters: a/config.json: "),
        (["--kernels"], "--method: only with --model"),
    ],
)
def test_refusals(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert f"specdec: error: {message}" in result.stderr
    assert not list(tmp_path.iterdir())


def found(plan: Plan | None, speedup: float) -> Found:
    return Found(plan, speedup, [speedup], 2.0, 0.5)


def test_the_fastest_is_named_by_what_tiers_takes() -> None:
    two, three = found(Plan(2, 3), 1.1), found(Plan(2, 2, 5, 4), 1.2)
    every = [found(Plan(5, 1), 0.9), two, three, found(None, 1.3)]
    assert tier_sweep.best_of(every) is three
    assert tier_sweep.sentence(every) == (
        "--tiers 2x2/5x4 is fastest, 1.20x over plain decoding; chosen for each round (auto): 1.30x"
    )
    slow = [found(Plan(5, 1), 0.9), found(None, 0.99)]
    assert tier_sweep.sentence(slow) == (
        "nothing beats plain decoding; the best, 5x1, is 0.90x; chosen for each round (auto): 0.99x"
    )


def test_a_sweep_that_is_stopped_gives_nothing() -> None:
    model = load_model("gdn-code")
    assert tier_sweep.sweep(model, [[0, 5, 6]], should_stop=lambda: True) is None
