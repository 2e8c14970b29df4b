"""bench/gpu without a GPU: the plan, the refusals, the bookkeeping, and the Python parts on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
GPU = ROOT / "bench" / "gpu"
PARTS = ["machine", "build", "gpu_tests", "pytest", "micro", "trees", "batch", "fla", "memcheck", "racecheck"]


def _run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "python"), **env}
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env, timeout=120)


def _fake_gpu(tmp_path: Path) -> str:
    """A PATH with an nvidia-smi that knows one card."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: Card (UUID: x)" || echo "Card, 1.0, 9.0"\n')
    smi.chmod(0o755)
    return f"{smi.parent}{os.pathsep}{os.environ['PATH']}"


def test_dry_run_prints_every_part_and_writes_nothing(tmp_path: Path) -> None:
    done = _run(GPU / "run_all.sh", "--dry-run", OUT=str(tmp_path / "out"), BUDGET="321")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    need = {words[0]: words[1] for words in lines if len(words) > 1 and words[1] in ("required", "optional")}
    assert list(need) == PARTS
    assert [name for name, kind in need.items() if kind == "optional"] == ["fla"]
    assert "parts, 321 s in all" in done.stdout
    assert "compute-sanitizer" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), [("ONLY", "trees,batch"), ("BUDGET", "abc"), ("BUDGET", "0")])
def test_wrong_settings_are_one_line_and_exit_status_2(name: str, value: str) -> None:
    done = _run(GPU / "run_all.sh", "--dry-run", **{name: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: got '{value}', want ")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_an_unknown_argument_is_refused() -> None:
    done = _run(GPU / "run_all.sh", "--help")
    assert done.returncode == 2
    assert "--dry-run" in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_without_a_gpu_one_line_and_exit_status_1(tmp_path: Path) -> None:
    done = _run(GPU / "run_all.sh", OUT=str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("no GPU: nothing was run")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    # No torch on the interpreter's path: trees.py cannot start, machine.py needs none.
    broken = tmp_path / "shadow" / "torch.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('no torch here')\n")
    out = tmp_path / "out"
    done = _run(
        GPU / "run_all.sh",
        OUT=str(out),
        ONLY="machine trees racecheck",
        PATH=_fake_gpu(tmp_path),
        PYTHONPATH=str(broken.parent),
    )
    assert done.returncode == 1
    assert "not well: trees" in done.stdout
    entries = {e["part"]: e for e in json.loads((out / "summary.json").read_text())}
    assert list(entries) == ["machine", "trees", "racecheck"]
    assert entries["machine"]["status"] == "ok"
    assert entries["trees"]["status"] == "failed, exit status 1"
    assert "no torch here" in entries["trees"]["tail"][-1]
    assert entries["racecheck"]["status"].startswith("not run: ")
    assert json.loads((out / "machine.json").read_text())["gpus"][0]["compute_cap"] == "9.0"
    for part in ("trees", "racecheck"):
        assert json.loads((out / f"{part}.json").read_text()) == entries[part]


def test_parts_that_no_time_is_left_for_are_not_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = _run(GPU / "run_all.sh", OUT=str(out), ONLY="machine", BUDGET="4", PATH=_fake_gpu(tmp_path))
    assert done.returncode == 1
    assert json.loads((out / "machine.json").read_text())["status"] == "not run: no time was left of the 4 s"


def test_test_results_become_json(tmp_path: Path) -> None:
    (tmp_path / "pytest.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="absent"><skipped/></testcase></testsuite></testsuites>'
    )
    record = GPU / "record.py"
    assert _run(sys.executable, record, "part", tmp_path, "pytest", "required", "ok", "3").returncode == 0
    entry = json.loads((tmp_path / "pytest.json").read_text())
    assert entry["tests"] == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["a.bad"]}
    assert not (tmp_path / "pytest.xml").exists()
    (tmp_path / "fla.json").write_text('{"rows": []}')  # what a part measured before it failed
    assert _run(sys.executable, record, "part", tmp_path, "fla", "optional", "failed", "3").returncode == 0
    assert json.loads((tmp_path / "fla.json").read_text())["status"] == "failed"
    assert json.loads((tmp_path / "fla.partial.json").read_text()) == {"rows": []}
    done = _run(sys.executable, record, "summary", tmp_path)
    assert done.returncode == 0  # only an optional part failed
    assert "1 passed, 1 failed, 1 skipped" in done.stdout


@pytest.mark.parametrize("script", ["trees", "batch", "compare_fla"])
def test_benchmarks_run_on_a_cpu(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    target = tmp_path / "rows.json"
    import_module(script).main(["--device", "cpu", "--quick", "--json", str(target)])
    written = json.loads(target.read_text())
    assert written["about"]["device"] == "cpu"
    rows = written["rows"]
    assert all(row["us"] > 0 for row in rows)
    names = {row["name"] for row in rows}
    if script == "trees":
        assert {"serial", "solve", "hybrid", "commit exact", "commit fast", "round fused"} <= names
    elif script == "batch":
        assert names == {"serial", "solve", "serial deferred", "solve deferred"}
    else:
        assert names == {"specdec serial", "specdec solve"}


def test_peer_kernels_are_called_as_flash_linear_attention_defines_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own code needs a GPU; a stand-in with its signatures and its layout of the state shows the rest."""
    import torch

    from specdec.ops import reference

    monkeypatch.syspath_prepend(str(GPU))
    import compare_fla
    import measure

    def kernel(
        q: Any, k: Any, v: Any, *, g: Any, beta: Any, initial_state: Any, output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        state = initial_state.mT.contiguous().double()
        out, factors = reference.verify(
            q, k, v, g, beta, state=state, qk_l2norm=use_qk_l2norm_in_kernel, dtype=torch.float64
        )
        reference.commit(state, factors, dtype=torch.float64)
        return out.to(v.dtype), state.mT.float() if output_final_state else None

    class Module:
        fused_recurrent_gated_delta_rule = staticmethod(kernel)
        chunk_gated_delta_rule = staticmethod(kernel)

    run = measure.Options("cpu", True, None)
    rows = compare_fla.rows_of(measure.TINY, 2, 4, Module, run)
    assert [row["name"] for row in rows[:3]] == [
        "fla steps, snapshots",
        "fla fused, replay",
        "fla chunk, replay",
    ]
    assert len(rows) == 5


@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 12, 16), (4, 4, 32), (4, 8, 64)])
def test_trees_have_the_shape_of_their_name(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    import trees

    top_k, depth, nodes = shape
    parents = trees.grow(*shape)
    assert len(parents) == nodes
    assert parents[0] == -1
    assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
    assert max(parents.count(i) for i in range(nodes)) <= top_k
    paths = trees.paths_of(parents)
    assert max(len(path) for path in paths) == depth
    assert {node for path in paths for node in path} == set(range(nodes))
    for path in paths:
        assert [parents[node] for node in path] == [-1, *path[:-1]]
