"""`specdec tune --model`, on the embedded model and at sizes that take seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import specdec.cli.tune_skips as command
from specdec.cli.errors import INTERRUPTED
from specdec.cli.tune_skips import Options
from specdec.methods import DrafterSpec, load_drafter_model, load_skip_file
from specdec.models import load_model
from specdec.models.skip_file import SkipFile
from specdec.tuning.pace import RoundTimes

LINE = "def function_{0}(argument, other={0}):\n    total = argument + other\n    return total * {0}\n\n\n"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "DEPTH": 4,
        "PLACES": 16,
        "SEARCHED": 2,
        "HELD_OUT": 1,
        "PROPOSED": 4,
        "FINALISTS": 1,
        "TIMING": 0.0,
    }
    sizes |= {
        "CONTEST_TOKENS": 8,
        "CONTEST_TURNS": 1,
        "CONTEST_SECONDS": 0.0,
        "ADVICE_SECONDS": 0.0,
        "ADVICE_TOKENS": 12,
        "ADVICE_TURNS": 1,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(f"specdec.tuning.skips.{name}", value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(6):
        (text / f"{i}.py").write_text("".join(LINE.format(9 * i + j) for j in range(20)), encoding="utf-8")
    return text


def options(tmp_path: Path, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "model": "gdn-code",
        "text": tmp_path / "text",
        "out": tmp_path / "skip.json",
        "dtype": "float32",
        "draft_int8": False,
        "seconds": 600.0,
        "trials": 8,
        "resume": False,
        "warm_start_only": False,
        "json": tmp_path / "all.json",
        "plot": None,
        **changes,
    }
    return Options(**values)


def test_a_search_writes_a_set_that_drafts(tmp_path, folder, capsys, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    assert command.run(options(tmp_path, plot=tmp_path / "all.png")) == 0
    out = capsys.readouterr().out
    assert "8 sets tried" in out
    assert "Does it pay?" in out
    (sentence,) = [line for line in out.splitlines() if line.startswith("On this machine")]
    report = json.loads((tmp_path / "all.json").read_text())
    assert report["sentence"] == sentence
    assert [t["number"] for t in report["trials"]] == list(range(8))
    assert [t["source"] for t in report["trials"][:4]] == ["similarity"] * 4
    assert (tmp_path / "all.png").stat().st_size > 1000
    assert report["vocabularies"] == [4096, 2048, 1024, 512, 256]
    assert [t["vocabulary"] for t in report["trials"][:4]] == [None] * 4

    file = SkipFile.read(tmp_path / "skip.json")
    model = load_model("gdn-code")
    spec = DrafterSpec.skipping(str(tmp_path / "skip.json"), exit="priced")
    assert load_skip_file(spec, model) == file
    chosen = report["trials"][report["chosen"]]
    assert (sorted(file.skips.mixers), sorted(file.skips.mlps)) == (chosen["mixers"], chosen["mlps"])
    assert (file.vocabulary and len(file.vocabulary)) == chosen["vocabulary"]
    assert file.measured["trials"] == 8
    assert file.measured["policy"] == chosen["policy"]
    fastest = max(report["contest"], key=lambda row: row["measured_speedup"])
    assert fastest["trial"] == report["chosen"]

    # Again: a search that is there is not begun anew, but goes on, with the times that it has.
    with pytest.raises(ValueError, match=r"--out: there is a search in .*skip.study already; add --resume"):
        command.run(options(tmp_path))
    monkeypatch.setattr("specdec.tuning.skips.times_of", None)
    assert command.run(options(tmp_path, resume=True, trials=10)) == 0
    again = json.loads((tmp_path / "all.json").read_text())
    assert again["trials"][:8] == report["trials"]
    assert len(again["trials"]) == 10
    assert again["times"] == report["times"]

    for path in folder.iterdir():
        path.write_text("another text\n" * 50 + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match="a search with texts"):
        command.run(options(tmp_path, resume=True))


def test_the_vocabulary_that_is_chosen_is_told_and_drafted(tmp_path, folder, capsys, monkeypatch) -> None:
    """A small one wins where layers cost nothing to keep and the head is all of the time."""
    pytest.importorskip("matplotlib")
    costly = RoundTimes(0.001, (1.0,) * 5, (0.0, 0.0, 0.0, 0.0, 0.9))
    monkeypatch.setattr("specdec.tuning.skips.times_of", lambda target, seconds: costly)
    monkeypatch.setattr("specdec.tuning.skip_search.OTHER_VOCABULARY", 1.0)
    monkeypatch.setattr("specdec.tuning.skips.finalists", lambda trials: [min(trials, key=lambda t: t.pace)])
    given = options(tmp_path, trials=12, draft_int8=True, plot=tmp_path / "all.png")
    assert command.run(given) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "all.json").read_text())
    chosen = report["trials"][report["chosen"]]
    size = chosen["vocabulary"]
    assert size in (2048, 1024, 512, 256)
    assert f"drafts of {size} of 4096 tokens" in out
    file = SkipFile.read(tmp_path / "skip.json")
    model = load_model("gdn-code")
    assert file.vocabulary is not None
    assert len(file.vocabulary) == size
    assert model.eos_token_ids <= set(file.vocabulary)
    spec = DrafterSpec.skipping(str(tmp_path / "skip.json"), exit="priced")
    view = load_drafter_model(spec, model, dtype=model.dtype)
    assert view.vocabulary.tolist() == list(file.vocabulary)


def test_a_search_that_the_machine_cut_off_goes_on(tmp_path, folder, capsys) -> None:
    assert command.run(options(tmp_path, trials=5)) == 0
    done = json.loads((tmp_path / "all.json").read_text())["trials"]
    with (tmp_path / "skip.study").open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"ab')
    capsys.readouterr()
    assert command.run(options(tmp_path, trials=6, resume=True)) == 0
    assert "skip.study: its last line was incomplete" in capsys.readouterr().err
    assert json.loads((tmp_path / "all.json").read_text())["trials"][:5] == done


def test_the_warm_start_alone_keeps_no_search(tmp_path, folder, capsys) -> None:
    assert command.run(options(tmp_path, warm_start_only=True)) == 0
    assert "4 sets tried, " in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.json", "skip.json", "text"]
    report = json.loads((tmp_path / "all.json").read_text())
    assert report["chosen"] == report["warm_start"]
    assert report["contest"] == []
    assert len(report["advice"]) == 3  # not the same set twice


def test_a_set_for_int8_drafts_says_so_and_is_used_so(tmp_path, folder, capsys) -> None:
    assert command.run(options(tmp_path, draft_int8=True, warm_start_only=True)) == 0
    assert "drafts with int8 weights" in capsys.readouterr().out
    file = SkipFile.read(tmp_path / "skip.json")
    assert file.int8
    model = load_model("gdn-code")
    spec = DrafterSpec.skipping(str(tmp_path / "skip.json"), exit="priced")
    view = load_drafter_model(spec, model, dtype=model.dtype)
    assert view.num_parameters == model.skipping(file.skips, int8=True).num_parameters
    assert view.num_parameters < model.skipping(file.skips).num_parameters
    report = json.loads((tmp_path / "all.json").read_text())
    assert (report["trials"][0]["mixers"], report["trials"][0]["mlps"]) == ([], [])  # nothing left out


def interrupted_when(trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Ctrl-C come after so many trials."""
    asked: list[bool] = [True] * (trials == 0)

    @contextmanager
    def interruptible() -> Iterator[list[bool]]:
        yield asked

    seen = command.SkipSearch._try

    def tried(self: Any, evaluate: Any) -> Any:
        trial = seen(self, evaluate)
        if len(self.trials) + 1 >= trials:
            asked.append(True)
        return trial

    monkeypatch.setattr(command, "interruptible", interruptible)
    monkeypatch.setattr(command.SkipSearch, "_try", tried)


def test_ctrl_c_keeps_the_search_and_the_best_set(tmp_path, folder, capsys, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        interrupted_when(3, patch)
        assert command.run(options(tmp_path)) == INTERRUPTED
    assert "go on with --resume" in capsys.readouterr().err
    assert SkipFile.read(tmp_path / "skip.json").measured["advice"] == []
    report = json.loads((tmp_path / "all.json").read_text())
    assert report["sentence"] is None
    done = report["trials"]
    assert command.run(options(tmp_path, resume=True)) == 0
    report = json.loads((tmp_path / "all.json").read_text())
    assert report["trials"][: len(done)] == done
    assert len(report["trials"]) == 8


def test_ctrl_c_before_any_trial_leaves_the_set_alone(tmp_path, folder, capsys, monkeypatch) -> None:
    interrupted_when(0, monkeypatch)
    assert command.run(options(tmp_path)) == INTERRUPTED
    assert "stopped before a set was tried" in capsys.readouterr().err
    assert not (tmp_path / "skip.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": None}, "--text: missing"),
        ({"out": None}, "--out: missing"),
        ({"seconds": -1.0}, "--seconds: got -1"),
        ({"trials": 0}, "--trials: got 0"),
        ({"resume": True}, "--resume: there is no search in"),
        ({"resume": True, "warm_start_only": True}, "--resume: not with --warm-start-only"),
        ({"plot": Path("a.txt")}, "--plot: got a.txt"),
        ({"out": Path("/no/such/folder/skip.json")}, "--out: cannot write"),
        ({"json": Path("/no/such/folder/all.json")}, "--json: cannot write"),
        ({"out": Path("a.study")}, "--out: got a.study, the name that the search"),
        ({"out": Path("a.json"), "json": Path("./a.json")}, "--json: got a.json, want another file"),
        ({"text": Path("/no/such/folder")}, "--text: .* is not a folder"),
        ({"model": "none"}, "model 'none': neither"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(tmp_path, folder, changes, message) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        command.run(options(tmp_path, **changes))
    assert [p.name for p in tmp_path.iterdir()] == ["text"]
