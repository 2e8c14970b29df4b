"""`specdec bench`: what is measured, what is refused, and what is written."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specdec.acceptance import SamplingParams
from specdec.bench.contenders import BASELINE, MethodContender, ReferenceContender, Run, Tokens
from specdec.bench.harness import Unit, measure, rows_of
from specdec.bench.prompts import Prompt, groups_of
from specdec.bench.report import contender_label, over_reference, write_plot
from specdec.cli.app import app
from specdec.methods import DrafterSpec, MethodOptions
from specdec.models.reference import ReferenceGatedDeltaNet

RUNNER = CliRunner()


class Scripted:
    """A contender with given speeds, that writes the token `token` everywhere."""

    def __init__(
        self, method: str, seconds: list[float], token: int = 7, drafter: DrafterSpec | None = None
    ) -> None:
        self.method = method
        self.drafter = drafter
        self.acceptance = None
        self.order: list[str] = []
        self._seconds = iter([1.0, *seconds])  # the first run warms up
        self._token = token

    def run(self, prompts: Tokens, count: int, known: Tokens, turn: int = 0) -> Run:
        self.order.append(self.method)
        tokens = [[self._token] * count for _ in prompts]
        emitted = (count - 1) * len(prompts)
        return Run(tokens, next(self._seconds), emitted, emitted // 2, 10, 5)

    differences = MethodContender.differences


UNITS = [Unit("a", ["one"], [[0, 1]]), Unit("b", ["two"], [[0, 2]])]


def _baseline() -> Scripted:
    # Each unit: one untimed run, then three timed ones.
    return Scripted(BASELINE, [9.0, 1.0, 1.0, 10.0, 9.0, 2.0, 2.0, 2.0])


def test_speedups_are_medians_of_paired_ratios_and_geometric_means_of_prompts() -> None:
    other = Scripted("other", [0.5, 0.5, 1.0, 0.25, 0.5, 0.5])
    measured = measure([_baseline(), other], UNITS, count=11, repeats=3, greedy=True)
    rows = rows_of(measured, UNITS, model="m", batch=1)
    assert [(r["method"], r.get("kind")) for r in rows] == [
        (BASELINE, None),
        (BASELINE, "a"),
        (BASELINE, "b"),
        ("other", None),
        ("other", "a"),
        ("other", "b"),
    ]
    speedups = [r["speedup"] for r in rows]
    assert speedups == pytest.approx([1, 1, 1, math.sqrt(2 * 4), 2, 4])  # the interrupted run does not count
    assert rows[4]["tokens_per_second"] == pytest.approx(10 / 0.5)
    assert rows[3]["tokens_per_second"] == pytest.approx(math.sqrt(20 * 20))
    assert rows[4]["rounds_per_second"] == pytest.approx(5 / 0.5)
    assert rows[3]["mean_accepted_length"] == 2.0
    assert rows[3]["acceptance_rate"] == 0.5
    assert "kind" not in rows[3]


def test_contenders_take_turns_in_alternating_order() -> None:
    order: list[str] = []
    first, second = _baseline(), Scripted("other", [1.0] * 6)
    first.order = second.order = order
    measure([first, second], UNITS[:1], count=3, repeats=3, greedy=True)
    warm_up_and_truth = [BASELINE, "other", BASELINE]
    assert order == [*warm_up_and_truth, BASELINE, "other", "other", BASELINE, BASELINE, "other"]


def test_a_mismatch_refuses_every_speedup_of_the_contender() -> None:
    wrong = Scripted("other", [0.1] * 6, token=8, drafter=DrafterSpec.parse("oracle", p=0.5))
    measured = measure([_baseline(), wrong], UNITS, count=5, repeats=3, greedy=True)
    rows = rows_of(measured, UNITS, model="m", batch=1)
    assert [r["speedup"] for r in rows if r["method"] == "other"] == [None] * 3
    assert all(r["tokens_match"] is (r["method"] == BASELINE) for r in rows)
    assert {(r["drafter"], r["oracle_p"]) for r in rows if r["method"] == "other"} == {("oracle", 0.5)}
    texts = [str(m) for m in measured[1].mismatches]
    assert len(texts) == 2
    assert "other (oracle p=0.5)" in texts[0]
    assert "position 0 of a/one" in texts[0]


def test_sampled_tokens_are_not_compared() -> None:
    wrong = Scripted("other", [0.1] * 6, token=8)
    measured = measure([_baseline(), wrong], UNITS, count=5, repeats=3, greedy=False)
    rows = rows_of(measured, UNITS, model="m", batch=1)
    assert all(r["speedup"] is not None and r["tokens_match"] is None for r in rows)


def test_batches_are_of_one_kind_and_full() -> None:
    prompts = [Prompt(k, str(i), "x") for k, n in (("a", 5), ("b", 2)) for i in range(n)]
    for batch in (1, 2, 3, 8):
        groups = groups_of(prompts, batch)
        assert all(len(g) == batch and len({p.kind for p in g}) == 1 for g in groups)
        assert {p for g in groups for p in g} == set(prompts)
    assert [p.name for p in groups_of(prompts, 3)[1]] == ["3", "4", "0"]


@pytest.fixture(scope="module")
def reference() -> ReferenceContender:
    return ReferenceContender(ReferenceGatedDeltaNet.from_directory("gdn-code"))


def test_reference_writes_a_ragged_batch_like_single_prompts(reference: ReferenceContender) -> None:
    prompts = [[0, 300, 301], [0, 17, 18, 19, 20, 21]]
    together = reference.run(prompts, 6, [])
    alone = [reference.run([p], 6, []).tokens[0] for p in prompts]
    assert not reference.differences(prompts, alone, [])
    assert not reference.differences(prompts, together.tokens, [])
    assert (together.emitted, together.rounds) == (10, 10)


def test_reference_finds_the_first_token_that_is_not_the_best(reference: ReferenceContender) -> None:
    prompts = [[0, 300, 301], [0, 17, 18]]
    tokens = reference.run(prompts, 6, []).tokens
    tokens[1][3] = (tokens[1][3] + 1) % 4096
    assert reference.differences(prompts, tokens, []) == [(1, 3)]


def _prompt_file(tmp_path: Path) -> Path:
    entries = [
        {"kind": "edit", "name": "a", "prompt": "def add(a, b):\n    return a + b\n\n\ndef add(a, b"},
        {"kind": "free", "name": "b", "prompt": "# A short comment about"},
    ]
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(entries))
    return path


def test_command_writes_table_json_and_plot(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    args = [
        "--methods",
        "specla,reference",
        "--drafter",
        "ngram,oracle",
        "--oracle-p",
        "0.8",
        "--batch",
        "1,3",
    ]
    args += ["--prompts", str(_prompt_file(tmp_path)), "--max-new-tokens", "12", "--repeats", "1"]
    result = RUNNER.invoke(app, ["bench", *args, "--json", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    for word in (
        "tokens/s",
        "rounds/s",
        "speedup",
        "oracle p=0.8",
        "as fast as the reference model in plain PyTorch",
    ):
        assert word in result.stdout
    record = json.loads(out.read_text())
    assert set(record) == {"machine", "rows"}
    assert f"torch {torch.__version__}" in record["machine"]
    rows = record["rows"]
    assert len(rows) == 2 * 4 * 3  # batches, contenders (the baseline is added), all prompts and two kinds
    for row in rows:
        assert {"method", "drafter", "model", "batch", "tokens_per_second", "rounds_per_second"} <= set(row)
        assert {"speedup", "mean_accepted_length", "acceptance_rate"} <= set(row)
        assert row["tokens_match"] is True
        assert row["speedup"] > 0
        assert (row["acceptance_share"] is None) == (row["method"] == "reference")
        if row["method"] == BASELINE:
            assert (row["drafter"], row["speedup"], row["mean_accepted_length"]) == (None, 1.0, 1.0)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_command_exits_1_on_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = MethodContender.run

    def cheating(self: MethodContender, prompts: Tokens, count: int, known: Tokens, turn: int = 0) -> Run:
        run = honest(self, prompts, count, known, turn)
        return replace(run, tokens=[[*t[:-1], t[-1] ^ 1] for t in run.tokens]) if self.drafter else run

    monkeypatch.setattr(MethodContender, "run", cheating)
    args = ["--prompts", str(_prompt_file(tmp_path)), "--max-new-tokens", "6", "--repeats", "1"]
    result = RUNNER.invoke(app, ["bench", *args, "--plot", str(tmp_path / "out.svg")])
    assert result.exit_code == 1
    assert result.stdout.count("mismatch") == 3
    assert (
        "specla (adapted+ngram): another token than autoregressive's at position 5 of edit/a" in result.stderr
    )


def test_sampled_command_compares_nothing(tmp_path: Path) -> None:
    args = ["--prompts", str(_prompt_file(tmp_path)), "--max-new-tokens", "6", "--repeats", "1"]
    result = RUNNER.invoke(app, ["bench", *args, "--temperature", "1"])
    assert result.exit_code == 0
    assert "tokens were not compared" in result.stdout


def test_sampled_command_compares_rules(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    args = ["bench", "--prompts", str(_prompt_file(tmp_path)), "--max-new-tokens", "12", "--repeats", "2"]
    args += ["--temperature", "0.8", "--drafter", "exit:2,ngram", "--acceptance", "block,speculative"]
    result = RUNNER.invoke(app, [*args, "--json", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    rows = [r for r in json.loads(out.read_text())["rows"] if "kind" not in r]
    assert [(r["method"], r["drafter"], r["acceptance"]) for r in rows] == [
        ("autoregressive", None, None),
        ("specla", "exit:2", "block"),
        ("specla", "exit:2", "speculative"),
        ("specla", "ngram", "follow"),
    ]
    assert all(r["tokens_match"] is None and 0 < r["acceptance_share"] < 1 for r in rows)
    assert rows[0]["mean_accepted_length"] == 1.0
    assert 1.0 < rows[1]["mean_accepted_length"] <= 12.0
    assert contender_label(rows[1]) == "specla, exit:2, block"
    assert plot.stat().st_size > 1000
    assert "LOSSY" not in result.stdout
    # Off a terminal there is a line for each of the prompts.
    lines = result.stderr.splitlines()
    assert len(lines) == len(json.loads(_prompt_file(tmp_path).read_text()))
    assert re.match(rf"specdec: 1 of {len(lines)} measured, \d+ s: batch 1, ", lines[0])
    tree = ["--draft-tree", "2,2,1", "--acceptance", "auto,traversal,k-seq", "--drafter", "exit:2"]
    result = RUNNER.invoke(app, [*args[:-4], *tree])
    assert result.exit_code == 0, result.output
    assert "exit:2 tree 2,2,1" in result.stdout
    assert "k-seq" in result.stdout
    bold = [line for line in result.stdout.splitlines() if "exit:2 tree" in line and " all " in line]
    assert len(bold) == 2  # auto and traversal are one


def test_self_speculative_is_measured_with_every_exit(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    args = ["bench", "--prompts", str(_prompt_file(tmp_path)), "--max-new-tokens", "12", "--repeats", "1"]
    args += ["--methods", "specla,self-speculative", "--drafter", "ngram", "--max-draft", "3"]
    args += ["--draft-exit", "adaptive:alpha=0.9, eps=0.02,static:0.5,widen=2,fixed"]
    args += ["--json", str(out), "--plot", str(plot)]
    result = RUNNER.invoke(app, args)
    assert result.exit_code == 0, result.output
    rows = [r for r in json.loads(out.read_text())["rows"] if "kind" not in r]
    assert [(r["method"], r["drafter"], r.get("draft_exit")) for r in rows] == [
        ("autoregressive", None, None),
        ("specla", "ngram", None),
        ("self-speculative", "skip", "adaptive:alpha=0.9, eps=0.02"),
        ("self-speculative", "skip", "static:0.5,widen=2"),
        ("self-speculative", "skip", "fixed"),
    ]
    assert all(r["drafted"] > 0 for r in rows[2:])
    assert contender_label(rows[3]) == "self-speculative, skip exit static:0.5,widen=2"
    assert plot.stat().st_size > 1000


def test_a_lossy_rule_is_called_so_in_table_and_rows(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    args = ["bench", "--prompts", str(_prompt_file(tmp_path)), "--max-new-tokens", "6", "--repeats", "1"]
    args += ["--temperature", "0.8", "--drafter", "exit:2", "--acceptance", "typical,auto"]
    result = RUNNER.invoke(app, [*args, "--json", str(out), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "typical (LOSSY)" in result.stdout
    assert result.stdout.count("typical is LOSSY") == 1
    rows = [r for r in json.loads(out.read_text())["rows"] if "kind" not in r]
    assert [(r["acceptance"], r["lossless"]) for r in rows] == [
        (None, True),
        ("typical", False),
        ("block", True),
    ]
    assert contender_label(rows[1]) == "specla, exit:2, typical (LOSSY)"


def test_fixed_drafts_do_not_ask_what_pays(tmp_path: Path) -> None:
    """Nine of ten layers are too dear a drafter for the budget."""
    lengths = []
    for extra in ([], ["--fixed-draft"]):
        out = tmp_path / "out.json"
        args = ["bench", "--prompts", str(_prompt_file(tmp_path)), "--max-new-tokens", "10", "--repeats", "1"]
        args += ["--temperature", "0.8", "--drafter", "exit:9", "--max-draft", "3", "--json", str(out)]
        result = RUNNER.invoke(app, [*args, *extra])
        assert result.exit_code == 0, result.output
        lengths.append(json.loads(out.read_text())["rows"][3]["mean_accepted_length"])
    assert lengths[0] == 1.0
    assert lengths[1] > 1.5


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--temperature", "1", "--acceptance", "magic"], "--acceptance: got 'magic', want one of auto"),
        (
            [
                "--temperature",
                "1",
                "--acceptance",
                "auto,block",
                "--drafter",
                "exit:2",
                "--draft-tree",
                "2,1",
            ],
            "--acceptance: block is not exact for a tree",
        ),
        (["--acceptance", "block"], "--acceptance: at temperature 0 no rule is at work"),
        (["--temperature", "1", "--drafter", "exit:2", "--draft-tree", "0"], "--draft-tree: got"),
        (["--temperature", "1", "--drafter", "exit:10"], "--drafter: got exit:10, want at most 9"),
        (["--drafter", "model:nowhere"], "--drafter: model 'nowhere'"),
        (["--drafter", "ngram,oracle", "--draft-tree", "2"], "--draft-tree: got 2, but only"),
        (["--drafter", "ngram,exit:2", "--oracle-p", "0.5"], "--oracle-p: got 0.5, but only"),
        (["--methods", "autoregressive", "--temperature", "1", "--acceptance", "block"], "drafts anything"),
    ],
)
def test_rules_and_drafters_are_refused_before_anything_runs(extra: list[str], says: str) -> None:
    result = RUNNER.invoke(app, ["bench", *extra])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_method_contender_ignores_end_tokens_and_counts_without_the_prefill() -> None:
    from tests.loop.models import random_model

    model = random_model(1, eos_token_ids=tuple(range(61)))  # every token would end the text
    contender = MethodContender(
        BASELINE, None, model, MethodOptions(slots=2), sampling=SamplingParams(), dtype=torch.float32
    )
    run = contender.run([[0, 1], [0, 2, 3]], 5, [])
    assert [len(t) for t in run.tokens] == [5, 5]
    assert (run.emitted, run.rounds, run.drafted) == (8, 8, 0)
    assert run.seconds > 0


def test_over_reference_is_the_inverse_of_its_speedup_over_all_prompts() -> None:
    rows = [
        {"method": "reference", "batch": 4, "speedup": 0.25},
        {"method": "reference", "batch": 4, "kind": "a", "speedup": 0.1},
        {"method": "reference", "batch": 1, "speedup": None},
        {"method": "specla", "batch": 1, "speedup": 2.0},
    ]
    assert over_reference(rows) == [(4, 4.0)]


def test_plot_has_a_panel_for_each_batch(tmp_path: Path) -> None:
    rows = [
        {"method": "specla", "drafter": "ngram", "batch": b, "speedup": s, **kind}
        for b in (1, 4)
        for s, kind in ((2.0, {}), (None, {"kind": "edit"}))
    ]
    path = tmp_path / "plot.svg"
    write_plot(path, "a machine", rows)
    assert path.stat().st_size > 1000
