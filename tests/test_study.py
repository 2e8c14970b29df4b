"""`specdec bench --study specla`: plumbing and arithmetic, on tiny sizes; never times."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import specdec
from specdec.bench.operators import Workload
from specdec.bench.studies import acceptance, commits, decoding, draft_costs, exits, specla, tree_verification
from specdec.bench.studies.lab import Lab
from specdec.bench.studies.report import Report
from specdec.bench.studies.section import Section
from specdec.bench.timing import interleaved
from specdec.bench.trees import grow, paths_of
from specdec.cli.app import app
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

PROMPTS = [
    {"kind": "edit", "name": "a", "prompt": "def add(a, b):\n    return a + b\n\n\ndef add(a, b"},
    {"kind": "edit", "name": "b", "prompt": "x = 1\nx = 1\nx ="},
]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One quick run of the whole command, and what it wrote."""
    folder = tmp_path_factory.mktemp("study")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    out = folder / "new" / "results"
    arguments = ["--study", "specla", "--quick", "--out", str(out), "--prompts", str(prompts)]
    return out, invoke(*arguments, "--drafter", "ngram,exit:2,exit:99")


def test_writes_json_page_and_plots(study: tuple[Path, Result]) -> None:
    out, result = study
    assert result.exit_code == 0, result.output
    names = {"specla.json", "specla.md", *(f"specla-{part}.png" for part in specla.STUDY.parts)}
    assert {path.name for path in out.iterdir()} == names
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in names if name.endswith("png"))


def test_json_says_machine_and_command_and_has_every_part(study: tuple[Path, Result]) -> None:
    found = json.loads((study[0] / "specla.json").read_text())
    assert "torch" in found["machine"]
    assert found["command"].startswith("specdec bench --study specla --quick --out ")
    assert found["command"].endswith("--drafter ngram,exit:2,exit:99")
    grid = found["acceptance"]["rows"]
    assert {(row["p"], row["n"]) for row in grid} == {(p, n) for p in (0.5, 1.0) for n in (1, 4)}
    sure = next(row for row in grid if (row["p"], row["n"]) == (1.0, 4))
    assert sure["acceptance_rate"] == 1.0
    assert sure["expected_tokens"] == 5.0
    assert all(row["different_tokens"] == 0 for row in grid)
    assert {tuple(row[k] for k in ("top_k", "depth", "nodes")) for row in found["trees"]["rows"]} == set(
        tree_verification.SHAPES
    )
    assert all(row["us"].keys() == {"verify", *commits.WAYS} for row in found["commits"]["rows"])
    names = [row["name"] for row in found["decoding"]["rows"]]
    assert {"ngram", "exit:2", "tree, pruned", "hybrid, tree 4,2,1, 16 nodes", "eager, chain of 8"} <= set(
        names
    )
    exact = [row for row in found["decoding"]["rows"] if row["strategy"] != "solve"]
    assert len(exact) < len(found["decoding"]["rows"])
    assert all(row["different_tokens"] == 0 for row in exact)


def test_what_is_not_available_is_said_and_left_out(study: tuple[Path, Result]) -> None:
    page = (study[0] / "specla.md").read_text()
    skipped = json.loads((study[0] / "specla.json").read_text())["decoding"]["skipped"]
    assert [why.partition(":")[0] for why in skipped] == ["exit"]
    assert all(why in page for why in skipped)


@pytest.fixture(scope="module")
def self_speculative(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One quick run of the other study."""
    folder = tmp_path_factory.mktemp("study")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    out = folder / "results"
    return out, invoke("--study", "self-speculative", "--quick", "--out", str(out), "--prompts", str(prompts))


def test_self_speculative_study_has_every_exit(self_speculative: tuple[Path, Result]) -> None:
    out, result = self_speculative
    assert result.exit_code == 0, result.output
    names = {f"self-speculative{end}" for end in (".json", ".md", "-costs.png", "-exits.png")}
    assert {path.name for path in out.iterdir()} == names
    rows = json.loads((out / "self-speculative.json").read_text())["exits"]["rows"]
    assert {row["group"] for row in rows} == {
        "Every round drafts",
        "Rounds draft where it pays",
        "Drafts from int8 weights",
    }
    assert {"fixed, 2 tokens", "static, 0.6", "adaptive, alpha 0.85", "priced"} <= {r["name"] for r in rows}
    for row in rows:
        assert row["different_tokens"] == 0
        assert row["speedup_by_kind"].keys() == {"edit"}
    passes = json.loads((out / "self-speculative.json").read_text())["costs"]["passes"]
    assert [p["name"] for p in passes] == ["plain", "set", "set, int8", "nothing skipped, int8"]
    assert all(p["bytes"] < passes[0]["bytes"] for p in passes[1:])
    # int8 copies of all sub-layers draft nearly as the model itself does.
    assert passes[3]["accepted"][0] > 0.9
    fixed = rows[0]
    assert fixed["levels"] == fixed["drafted"] == sum(fixed["drafted_at"])
    assert fixed["accepted"] == sum(fixed["accepted_at"])
    assert fixed["rounds"] - 1 <= fixed["drafting_rounds"] <= fixed["rounds"]  # one token may be left over


@pytest.mark.parametrize("name", ["study", "self_speculative"])
def test_page_has_the_numbers_that_were_printed(name: str, request: pytest.FixtureRequest) -> None:
    out, result = request.getfixturevalue(name)
    (path,) = out.glob("*.json")
    page = path.with_suffix(".md").read_text()
    found = json.loads(path.read_text())
    assert found["machine"] in page
    assert found["command"] in page
    shown = set(result.output.split())
    for line in page.splitlines():
        if line.startswith("| ") and "---" not in line:
            for cell in line.strip("| ").split(" | "):
                assert set(cell.split()) <= shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--study", "other"], "--study: got 'other', want one of specla, self-speculative"),
        (["--study", "specla", "--batch", "4"], "--batch: the study specla takes none, only --quick"),
        (["--study", "specla", "--skip", "f"], "--skip: the study specla takes none"),
        (
            ["--study", "self-speculative", "--drafter", "ngram"],
            "--drafter: the study self-speculative takes",
        ),
        (["--study", "self-speculative", "--skip", "f"], "--skip: f: cannot be read"),
        (["--study", "specla", "--max-draft", "4"], "--max-draft: the study specla takes none"),
        (["--study", "specla", "--prompts", "missing.json"], "--prompts: missing.json cannot be read"),
        (
            ["--study", "specla", "--drafter", "ngram,none"],
            "--drafter: got 'none', want one of ngram",
        ),
        (["--study", "specla", "--drafter", ","], "--drafter: got ',', want at least one entry"),
        (["--quick"], "--quick: only a --study takes it"),
        (["--out", "somewhere"], "--out: only a --study takes it"),
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


def test_a_check_leaves_no_file(tmp_path: Path) -> None:
    arguments = ["--study", "specla", "--json", str(tmp_path / "a.json"), "--out", str(tmp_path)]
    assert invoke(*arguments, "--model", "missing").exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_file_that_lies_in_out_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".specdec").write_text("kept")
    # Refused behind the check of the directory, before anything is measured.
    result = invoke("--study", "specla", "--out", str(tmp_path), "--model", "missing")
    assert "model 'missing': neither" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".specdec"]
    assert (tmp_path / ".specdec").read_text() == "kept"


def test_only_the_strategy_solve_may_give_other_tokens(tmp_path: Path) -> None:
    report = Report(specla.STUDY, tmp_path, "specla", None, machine="m", command=["c"], about="a")
    rows = [
        {"group": "strategies", "name": "solve, chain of 8", "strategy": "solve", "different_tokens": 2},
        {"group": "drafters", "name": "adapted:solved", "strategy": "exact", "different_tokens": 3},
        {"group": "drafters", "name": "ngram", "strategy": "exact", "different_tokens": 0},
    ]
    report._result["decoding"] = {"rows": rows}
    assert report.mismatches == ["drafters, adapted:solved: 3 tokens differ"]


def test_out_must_be_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    result = invoke("--study", "specla", "--out", str(file))
    assert result.exit_code == 2
    assert "--out: cannot write" in result.stderr
    assert file.read_text() == "kept"


def test_steps_are_as_many_as_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(specdec.load_model("gdn-code"), specdec.load_tokenizer("gdn-code"), [], [], quick=True)
    told: list[str] = []
    commits.measure(lab, told.append)
    assert len(told) == commits.steps(lab)


# --- arithmetic ---


def test_chance_that_a_speedup_needs() -> None:
    verify = {"1": 1.1, "3": 1.3}
    assert draft_costs.best(1.0, 0.5, verify) == (pytest.approx(4 / 2.8), 3)
    chance = draft_costs.needed(0.5, verify, 1.1)
    assert chance is not None
    assert draft_costs.best(chance, 0.5, verify)[0] == pytest.approx(1.1)
    assert draft_costs.needed(2.0, verify, 1.1) is None
    assert draft_costs._chance([0.8, 0.64]) == pytest.approx(0.8)


def test_costs_of_rounds_by_hand() -> None:
    """In the fastest turns ten rounds, four of them with drafts of two levels in mean, half a plain round a
    level; a verification 1.5 plain rounds. In all turns 36 of 48 were accepted, and 18 of 24 rounds kept
    their drafts to the end.
    """
    row = {"fastest_rounds": 10, "fastest_drafting_rounds": 4, "fastest_levels": 8, "accepted_at": [24, 12]}
    row |= {"drafting_rounds": 24, "complete_rounds": 18}
    row |= {"plain_seconds_per_round": 2.0, "draft_seconds": 8.0, "round_seconds": 8.0 + 6 * 2.0 + 4 * 3.0}
    costs = exits.costs_of(row)
    assert (costs["c"], costs["v"], costs["n"]) == pytest.approx((0.5, 1.5, 2.0))
    assert costs["a"] == pytest.approx(6 / 7)  # one of seven was refused
    tokens = 6 + 4 * (1 - (6 / 7) ** 3) / (1 - 6 / 7)
    assert costs["predicted_speedup"] == pytest.approx(tokens / (6 + 4 * (2 * 0.5 + 1.5)))
    idle = exits.costs_of(row | {"fastest_drafting_rounds": 0, "fastest_levels": 0})
    assert (idle["predicted_speedup"], idle["c"]) == (1.0, 0.0)


def grid_row(p: float, n: int, speedup: float, predicted: float) -> dict[str, float]:
    expected = n + 1.0
    return {
        "p": p,
        "n": n,
        "speedup": speedup,
        "predicted_speedup": predicted,
        "expected_tokens": expected,
        "tokens_per_round": expected,
        "predicted_round_cost": expected / predicted,
        "round_cost": expected / speedup,
    }


def test_break_even_is_where_the_curve_stays_above_one() -> None:
    rows = [grid_row(p, 4, s, 1.0) for p, s in ((0.5, 0.8), (0.6, 1.1), (0.7, 0.9), (0.8, 1.1))]
    assert acceptance.break_even(rows, 4, "speedup") == pytest.approx(0.75)
    assert acceptance.break_even(rows[:3], 4, "speedup") is None
    assert acceptance.break_even(rows, 4, "predicted_speedup") == 0.5


def test_account_says_where_every_length_gains_and_what_the_difference_is() -> None:
    rows = [grid_row(0.6, 1, 0.9, 1.0), grid_row(0.6, 4, 0.7, 1.0)]
    rows += [grid_row(0.8, 1, 1.2, 1.2), grid_row(0.8, 4, 1.6, 2.0)]
    text = " ".join(acceptance.account({"rows": rows}))
    assert "below 0.7 from 0.70x to 0.90x; every length gains from p = 0.8 on" in text
    assert "at least 0.70x (p = 0.6, n = 4) and at most 1.60x (p = 0.8, n = 4)" in text
    assert "Measured over predicted speedup: 0.70 to 1.00" in text
    assert "tokens a round over E, 1.00 to 1.00" in text
    # At p = 0.8 and n = 4 a round costs 5 / 2 plain rounds; at n = 1 no cost would do for the paper's ratio.
    assert "3.71x asks for rounds of as many plain rounds as (n + 1) / 3.71: n = 4: 1.35, here 2.50." in text


def test_round_times_lie_on_a_line_of_what_is_folded_in() -> None:
    times = acceptance.RoundTimes({0: (10.0, 10.0), 4: (20.0, 28.0)})
    assert times(0, 1.0) == 10.0
    assert [times(4, folded) for folded in (1.0, 3.0, 5.0)] == [20.0, 24.0, 28.0]


def test_parts_of_one_thing_are_timed_one_by_one_and_added(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        return now

    def takes(seconds: float) -> Any:
        def run() -> None:
            nonlocal now
            now += seconds

        return run

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "thread_time", clock)
    us = interleaved({"one": takes(3e-6), "two": [takes(1e-6), takes(5e-6)]}, 0.0, layers=1)
    assert us == pytest.approx({"one": 3.0, "two": 6.0})


# --- operators ---


def test_replays_give_what_the_tree_gives() -> None:
    parents = grow(2, 4, 8)
    paths = paths_of(parents)
    work = Workload.random(1, 8, 2, parents, width=64)
    out, _ = work.verify(1)
    before = work.states[1].clone()
    for replay in (tree_verification.PathReplay(work, paths), tree_verification.DecodeReplay(work, paths)):
        for path, got in zip(paths, replay.outputs(1), strict=True):
            assert torch.equal(got, out[:, path])
        calls = replay.calls()
        assert len(calls) == (
            len(paths) if isinstance(replay, tree_verification.PathReplay) else sum(map(len, paths))
        )
        work.turn = 0
        for call in calls:
            call()
        assert work.turn == 1
    assert torch.equal(work.states[1], before)


def test_commits_that_leave_another_state_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = commits.Rounds(Workload.random(1, commits.NODES, 1, width=64))
    rounds._check(3)
    monkeypatch.setattr(commits.ops, "prefill", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="commit, prefill: relative error"):
        rounds._check(3)


def test_trees_differ_by_seed() -> None:
    assert grow(4, 4, 32, seed=0) == grow(4, 4, 32)
    assert len({tuple(grow(4, 4, 32, seed=seed)) for seed in range(4)}) == 4


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    loaded = specdec.load_model("gdn-code")
    assert isinstance(loaded, GatedDeltaNetForCausalLM)
    return loaded


def rounds_of(model: GatedDeltaNetForCausalLM) -> list[torch.Tensor]:
    """Logits of two rounds of two trees, the second with a pending path, and of a step below a prefix."""
    cache = model.new_cache(2)
    model.prefill([[0, 300, 301], [0, 17]], cache=cache, slots=[0, 1])
    slots = torch.tensor([0, 1], dtype=torch.int32)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 1]], dtype=torch.int32)
    first, factors = model.forward(tokens, cache=cache, slots=slots, parents=parents)
    path = torch.tensor([[0, 2, 3], [0, 1, 0]], dtype=torch.int32)
    cache.defer(factors, path, torch.tensor([3, 2], dtype=torch.int32))
    second, factors = model.forward(tokens, cache=cache, slots=slots, parents=parents)
    steps = specdec.cache.Steps()
    steps.extend(factors)
    third, _ = model.forward(
        tokens[:, :1], cache=cache, slots=slots, parents=parents[:, 3:].contiguous(), prefix=steps
    )
    return [first, second, third]


def test_forced_strategies_compute_the_same(model: GatedDeltaNetForCausalLM) -> None:
    plain = rounds_of(model)
    for strategy in ("serial", "hybrid", "exact"):
        assert all(map(torch.equal, rounds_of(model.with_strategy(strategy)), plain))
    solved = rounds_of(model.with_strategy("solve"))
    # float32 in another order: some hundred roundings of logits, through the layers.
    assert all((a - b).norm() < 1e-4 * b.norm() for a, b in zip(solved, plain, strict=True))
    assert not all(map(torch.equal, solved, plain))
    with pytest.raises(ValueError, match="strategy: got 'fast', want 'exact', 'serial', 'hybrid' or 'solve'"):
        model.with_strategy("fast")


def test_section_is_the_same_in_both_forms() -> None:
    section = Section("Of [x]", ["Before [b]."], ["a|b", "[c]"], [["d[/x]|[red]e", "1.00x"]])
    assert section.markdown(2) == (
        "## Of [x]\n\nBefore [b].\n\n| a\\|b | [c] |\n| --- | ---: |\n| d[/x]\\|[red]e | 1.00x |"
    )
    console = Console(width=80, file=io.StringIO(), highlight=False)
    section.print(console)
    assert console.file.getvalue().split() == [  # type: ignore[attr-defined]
        "Of", "[x]", "Before", "[b].", "a|b", "[c]", "d[/x]|[red]e", "1.00x"
    ]  # fmt: skip
    assert decoding.sections({"rows": [], "skipped": ["y: none"]})[0].markdown(3).endswith("- y: none")
