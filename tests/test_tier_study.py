"""`specdec bench --study hispec`: plumbing and arithmetic, on tiny sizes; never times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from specdec.bench.studies import tier_costs, tier_memory, tiers
from specdec.cli.app import app
from specdec.drafters.plan import FixedPlan, Plan
from specdec.drafters.stage import Work

PROMPTS = [{"kind": "edit", "name": "a", "prompt": "def add(a, b):\n    return a + b\n\n\ndef add(a, b"}]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One quick run of the whole command, and what it wrote."""
    folder = tmp_path_factory.mktemp("study")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    out = folder / "results"
    arguments = ["bench", "--study", "hispec", "--quick", "--out", str(out), "--prompts", str(prompts)]
    return out, CliRunner().invoke(app, arguments)


def read(study: tuple[Path, Result]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((study[0] / "hispec.json").read_text())
    return found


def test_writes_json_page_and_plots(study: tuple[Path, Result]) -> None:
    out, result = study
    assert result.exit_code == 0, result.output
    names = {"hispec.json", "hispec.md", "hispec-tiers.png", "hispec-memory.png"}
    assert {path.name for path in out.iterdir()} == names
    found, page = read(study), (out / "hispec.md").read_text()
    assert found["machine"] in page
    assert found["command"].startswith("specdec bench --study hispec --quick")
    assert found["command"] in page


def test_adapters_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    given = ["bench", "--study", "hispec", "--out", str(tmp_path), "--exit-adapters", "nowhere"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "specdec: error: --exit-adapters: nowhere/config.json: cannot be read" in result.stderr
    assert not list(tmp_path.iterdir())


def test_every_setting_writes_plain_decodings_texts(study: tuple[Path, Result]) -> None:
    rows = read(study)["tiers"]["rows"]
    assert [row["name"] for row in rows] == [
        "2x2", "5x2", "2x2/5x4", tiers.CHOSEN, f"{tiers.CHOSEN}, head in int8"
    ]  # fmt: skip
    assert [row["tiers"] for row in rows] == [2, 2, 3, 0, 0]
    for row in rows:
        assert row["different_tokens"] == 0
        assert sum(row["rounds_of_tiers"].values()) == row["rounds"]


def test_layer_passes_are_those_of_the_formula_but_for_the_ends_of_texts(study: tuple[Path, Result]) -> None:
    rows = {row["name"]: row for row in read(study)["tiers"]["rows"]}
    for name, exit, length in (("2x2", 2, 2), ("5x2", 5, 2)):
        row = rows[name]
        plain, drafting = row["rounds_of_tiers"]["1"], row["rounds_of_tiers"]["2"]
        full = 10 * plain + drafting * (length * exit + 10)
        assert row["formula_passes_per_round"] == pytest.approx(full / row["rounds"])
        # One text, one end of it: the last round drafts less.
        assert full - length * exit <= row["passes_per_round"] * row["rounds"] <= full
    row = rows["2x2/5x4"]
    checks = row["checks_per_round"] * row["rounds"]
    assert checks >= 2 * row["rounds"] - 1  # a check brings 3 tokens at most, of the 4 wanted but at the end
    full = row["formula_passes_per_round"] * row["rounds"]
    assert full - 2 * (2 * 2 + 5) <= row["passes_per_round"] * row["rounds"] <= full
    assert 0.0 < row["passed_middle"] <= 1.0
    assert 0.0 < row["passed_target"] <= 1.0
    assert rows["2x2"]["passed_middle"] is None


def test_speedups_are_over_the_best_of_two_tiers(study: tuple[Path, Result]) -> None:
    found = read(study)["tiers"]
    two = max((row for row in found["rows"] if row["tiers"] == 2), key=lambda row: row["speedup"])
    assert found["best"] == {"2": two["name"], "3": "2x2/5x4"}
    assert two["over_two"] == 1.0
    (prompt,) = found["prompts"]
    assert (prompt["kind"], prompt["name"]) == ("edit", "a")
    assert prompt["two"] == pytest.approx(two["speedup"])
    three = next(row for row in found["rows"] if row["tiers"] == 3)
    assert prompt["three_over_two"] == pytest.approx(three["over_two"])
    assert prompt["passed_target"] == three["passed_target"]


def test_tiers_keep_hidden_states_and_no_more(study: tuple[Path, Result]) -> None:
    rows = read(study)["memory"]["memory"]
    assert [row["name"] for row in rows] == [
        "plain decoding",
        "plain verification of 2 drafts", "tiers 2x2",
        "plain verification of 6 drafts", "tiers 2x2/5x4",
    ]  # fmt: skip
    for chain, exits in (rows[1:3], rows[3:5]):
        assert rows[0]["bytes"] < chain["bytes"]
        assert exits["bytes"] <= chain["bytes"] + exits["hidden_bytes"]
    assert rows[4]["hidden_bytes"] == 2 * (1 + 6) * 256 * 4


def test_passes_by_hand() -> None:
    assert tiers.passes_of(None, 3, 0, 10) == 30
    assert tiers.passes_of(Plan(2, 3), 4, 0, 10) == 4 * (2 * 3 + 10)
    assert tiers.passes_of(Plan(2, 2, 5, 4), 3, 7, 10) == 7 * (2 * 2 + 5) + 3 * 10


def test_watch_counts_by_plan_and_tells_the_planner() -> None:
    class Told(FixedPlan):
        def __init__(self, plan: Plan) -> None:
            super().__init__(plan)
            self.heard: list[Any] = []

        def accepted(self, *given: int) -> None:
            self.heard.append(given)

        def observe(self, *given: Any) -> None:
            self.heard.append(given)

    plan, work = Plan(2, 2, 5, 4), Work()
    planner = Told(plan)
    watch = tiers.Watch(planner, work)
    assert watch.choose(1) == plan
    assert watch.plans == planner.plans
    for checks, given in ((2, (2, 2)), (3, (1, 2))):
        work.checks += checks
        watch.accepted(2, 5, *given)
        watch.observe(1, 5, 4, 0.5, False)
    watch.observe(1, 1, 1, 0.5, True)
    assert watch.rounds == {plan: 2, None: 1}
    assert watch.checks == {plan: 5}
    assert watch.passed == {(2, 5): (3, 4)}
    assert planner.heard == [
        (2, 5, 2, 2),
        (1, 5, 4, 0.5, False),
        (2, 5, 1, 2),
        (1, 5, 4, 0.5, False),
        (1, 1, 1, 0.5, True),
    ]


def test_account_says_where_three_tiers_win() -> None:
    rows = [
        {"name": "2x2", "tiers": 2, "speedup": 1.25, "over_two": 1.0, "by_operators": 1.5},
        {"name": "2x2/5x4", "tiers": 3, "speedup": 1.5, "over_two": 1.2, "by_operators": 1.8},
        {"name": tiers.CHOSEN, "tiers": 0, "speedup": 1.2, "over_two": 0.96},
    ]
    prompts = [{"passed_target": p, "three_over_two": r} for p, r in ((0.9, 1.3), (0.8, 1.1), (0.7, 0.8))]
    result: dict[str, Any] = {"best": {"2": "2x2", "3": "2x2/5x4"}, "rows": rows, "prompts": prompts}
    said = tiers.account(result)
    assert said[0].startswith(
        "The best of three tiers, 2x2/5x4, is 1.20 times as fast as the best of two, 2x2"
    )
    assert said[1].endswith("on 2 of 3 prompts, it is 1.10 to 1.30 times as fast.")
    assert "would be 1.20 times as fast as the best of two (1.80 and 1.50 times plain" in said[2]
    assert "is 0.96 times as fast as the better of plain decoding" in said[3]
    assert tiers.account(result | {"prompts": prompts[2:]})[1].endswith("on none of these prompts.")
    rows[0]["speedup"] = 0.8  # then plain decoding is the better one
    assert "is 1.20 times as fast" in tiers.account(result)[3]


def test_a_round_costs_what_its_passes_cost() -> None:
    layer, head = 1.0, 2.0  # of a node each; every further one takes a tenth of that
    seconds = {
        f"{a}-{b}": {1: (b - a) * layer, 11: 2 * (b - a) * layer}
        for a, b in ((0, 2), (2, 5), (5, 10), (2, 10), (0, 10))
    }
    seconds |= {f"head {n}": {1: head, 11: 2 * head} for n in (2, 5, 10)}
    costs = tier_costs.PassCosts(seconds, 10)
    assert costs.plain == 10 + 2
    # Two drafts; the last of them again; three nodes through the layers above and the head.
    assert costs.round(Plan(2, 2), 0.0) == pytest.approx(2 * (2 + 2) + 2 + 1.2 * (8 + 2))
    inner = 2 * (2 + 2) + 2 + 1.2 * (3 + 2)
    assert costs.round(Plan(2, 2, 5, 4), 2.0) == pytest.approx(2 * inner + 2 + 3 + 1.4 * (5 + 2))


def test_alive_counts_every_piece_of_memory_once() -> None:
    before = torch.zeros(1000)
    sparse = before.to_sparse()  # of the program around the study: it has no storage
    alive = tier_memory.Alive()
    kept = [torch.zeros(50), before[:10]]
    kept.append(kept[0][10:20])
    alive.look()
    assert alive.most == 200
    kept.clear()
    alive.look()
    assert alive.most == 200
    assert sparse.layout is torch.sparse_coo


def test_a_model_is_as_it_was_after_looking() -> None:
    class Model:
        def forward(self) -> int:
            return 1

        run_layers = readout = forward

        def prefill(self) -> int:
            return 1 + self.forward()

    model, looks = Model(), []
    with tier_memory.looking(model, lambda: looks.append(1)):  # type: ignore[arg-type]
        assert model.prefill() == 2
        assert not looks
        assert model.forward() == 1
    assert len(looks) == 1
    assert not vars(model)
