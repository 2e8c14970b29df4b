"""What the command line refuses: one line on stderr that names the option, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli.app import app

RUNNER = CliRunner()


def _error(*args: str) -> str:
    result = RUNNER.invoke(app, list(args))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


SELF = ["--method", "self-speculative"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "x", "--model", "nowhere"], ["nowhere", "gdn-code"]),
        (["generate", "x", "--method", "magic"], ["--method", "magic", "autoregressive", "specla"]),
        (["generate", "x", "--drafter", "magic"], ["--drafter", "adapted", "model:DIR", "oracle"]),
        (["generate", "x", "--drafter", "model:nowhere"], ["--drafter: model 'nowhere'"]),
        (["generate", "x", "--drafter", "exit:10"], ["--drafter: got exit:10, want at most 9"]),
        (["generate", "x", "--drafter", ""], ["--drafter: got ''", "want one of ngram"]),
        (["bench", "--drafter", ""], ["--drafter: got ''"]),
        (
            ["generate", "x", "--method", "autoregressive", "--drafter", "ngram"],
            ["--drafter", "autoregressive"],
        ),
        (
            ["generate", "x", "--max-new-tokens", "0"],
            ["--max-new-tokens: got 0, want an integer, at least 1"],
        ),
        (["generate", "x", "--max-new-tokens", "many"], ["--max-new-tokens"]),
        (["generate", "x", "--temperature", "-1"], ["--temperature: got -1.0, want 0 (greedy) or"]),
        (["generate", "x", "--temperature", "nan"], ["--temperature"]),
        (["generate", "x", "--temperature", "1e-310"], ["--temperature: got 1e-310, want 0 (greedy) or"]),
        (["generate", "x", "--temperature", "inf"], ["--temperature"]),
        (["generate", "x", "--min-p", "nan"], ["--min-p"]),
        (["generate", "x", "--top-p", "nan"], ["--top-p: got nan"]),
        (["generate", "x", "--repetition-penalty", "nan"], ["--repetition-penalty: got nan"]),
        (["generate", "x", "--repetition-penalty", "1e300"], ["--repetition-penalty: got 1e+300"]),
        (["generate", "x", "--drafter", "oracle", "--oracle-p", "nan"], ["--oracle-p"]),
        (["generate", "x", "--max-new-tokens", "2.5"], ["--max-new-tokens"]),
        (["generate", "x", "--top-p", "0"], ["--top-p"]),
        (["generate", "x", "--repetition-penalty", "0"], ["--repetition-penalty"]),
        (["generate", "x", "--seed", "-1"], ["--seed: got -1"]),
        (["generate", "x", "--top-k", "-1"], ["--top-k: got -1"]),
        (["generate", "x", "--max-draft", "64"], ["--max-draft: got 64, want an integer, from 1 to 63"]),
        (["generate", "x", "--method", "autoregressive", "--fixed-draft"], ["--fixed-draft: no method"]),
        (["generate", "x", "--drafter", "exit:0"], ["--drafter: got 'exit:0', want exit:N, N from 1"]),
        (["generate", "x", "--presence-penalty", "2.5"], ["--presence-penalty: got 2.5", "-2 to 2"]),
        (["generate", "x", "--frequency-penalty", "nan"], ["--frequency-penalty: got nan"]),
        (["generate", "x", "--logit-bias", "5"], ["--logit-bias: got '5', want TOKEN=BIAS"]),
        (["generate", "x", "--logit-bias", "a=1"], ["--logit-bias: got 'a=1'"]),
        (["generate", "x", "--logit-bias", "-4=1"], ["--logit-bias: got '-4=1', want TOKEN=BIAS"]),
        (["generate", "x", "--logit-bias", "7=inf"], ["--logit-bias: got '7=inf'", "--banned-tokens"]),
        (
            ["generate", "x", "--logit-bias", "7=1", "--logit-bias", "7=2"],
            ["--logit-bias: got the token 7 twice"],
        ),
        (["generate", "x", "--logit-bias", "4096=1"], ["--logit-bias: got token 4096, want 0 to 4095"]),
        (["generate", "x", "--allowed-tokens", ""], ["--allowed-tokens: got ''"]),
        (["generate", "x", "--allowed-tokens", "9-5"], ["--allowed-tokens: got '9-5'"]),
        (["generate", "x", "--allowed-tokens", "5", "--banned-tokens", "1-9"], ["--allowed-tokens: got all"]),
        (["generate", "x", "--banned-tokens", "3-x"], ["--banned-tokens: got '3-x'"]),
        (["generate", "x", "--banned-tokens", "1-99999999999"], ["--banned-tokens: got '1-99999999999'"]),
        (["generate", "x", "--banned-tokens", "0-4095"], ["--banned-tokens: got the whole vocabulary"]),
        (["generate", "x", "--acceptance", "magic"], ["--acceptance", "magic", "speculative", "typical"]),
        (
            [
                *["generate", "x", "--temperature", "1", "--acceptance", "block"],
                *["--drafter", "model:gdn-code", "--draft-tree", "2"],
            ],
            ["--acceptance: block is not exact for a tree drawn without replacement", "traversal"],
        ),
        (["generate", "x", "--acceptance", "block"], ["--acceptance: at temperature 0 no rule is at work"]),
        (
            ["generate", "x", "--method", "autoregressive", "--temperature", "1", "--acceptance", "block"],
            ["--acceptance: got block, but no method here drafts"],
        ),
        (
            ["generate", "x", "--drafter", "ngram", "--draft-tree", "2,2"],
            ["--draft-tree: got 2,2, but only", "exit:N"],
        ),
        (["generate", "x", "--skip", "f"], ["--skip: got f, but only the method self-speculative"]),
        (["generate", "x", "--draft-int8"], ["--draft-int8: only the methods self-speculative and"]),
        (["generate", "x", "--tiers", "2x3"], ["--tiers: got 2x3, but only the method hispec takes it"]),
        (["generate", "x", "--method", "hispec", "--tiers", "5x3/2x4"], ["--tiers: 5x3/2x4: middle: got 2"]),
        (
            ["generate", "x", "--method", "hispec", "--tiers", "12x3"],
            ["--tiers: exit: got 12, want at most 9"],
        ),
        (
            ["generate", "x", "--exit-adapters", "d"],
            ["--exit-adapters: got d, but only the method hispec takes it"],
        ),
        *(
            ([*command, "--exit-adapters", "nowhere"], ["--exit-adapters: nowhere/config.json: cannot be"])
            for command in (["generate", "x", "--method", "hispec"], ["bench", "--methods", "hispec"])
        ),
        (["tune", "--model", "gdn-code", "--exit-adapters", "d"], ["--exit-adapters: only for --method"]),
        (
            ["bench", "--study", "specla", "--exit-adapters", "none"],
            ["--exit-adapters: the study specla takes none"],
        ),
        (
            ["generate", "x", *SELF, "--skip", "none", "--no-draft-int8"],
            ["--skip: got 'none', which drafts as dearly"],
        ),
        (["bench", "--draft-exit", "fixed"], ["--draft-exit: got fixed, but only"]),
        (["generate", "x", *SELF, "--draft-exit", "late"], ["--draft-exit: got 'late', want priced"]),
        (["generate", "x", *SELF, "--draft-exit", "static:7"], ["--draft-exit: got 'static:7'"]),
        (
            ["generate", "x", *SELF, "--draft-exit", "adaptive:alpha=2"],
            ["--draft-exit: got 'adaptive:alpha=2'"],
        ),
        (
            ["generate", "x", *SELF, "--draft-exit", "static:widen=2", "--draft-tree", "2"],
            ["--draft-exit: got 'static:widen=2', but only chains are widened, not the tree 2"],
        ),
        (["generate", "x", *SELF, "--drafter", "ngram"], ["--drafter: got 'ngram', but with self-spec"]),
        (["generate", "x", *SELF, "--skip", "nowhere.json"], ["--skip: nowhere.json: cannot be read"]),
        (["generate", "x", *SELF, "--skip", ""], ["--skip"]),
        (["bench", "--methods", "self-speculative", "--draft-exit", ","], ["--draft-exit: got ','"]),
        (["generate", "x", "--draft-tree", "2;2"], ["--draft-tree: got '2;2', want auto or"]),
        (["generate", "x", "--drafter", "adapted:nowhere"], ["--drafter: nowhere", "config.json"]),
        (["generate", "x", "--oracle-p", "0.5"], ["--oracle-p: got 0.5, but only"]),
        (["generate", "x", "--logprobs", "-1", "--json"], ["--logprobs: got -1"]),
        (["generate", "x", "--logprobs", "2"], ["--logprobs", "--json"]),
        (["generate", "x", "--dtype", "float64"], ["--dtype", "float32", "bfloat16"]),
        (["generate", "x", "--oracle-p", "2"], ["--oracle-p: got 2.0"]),
        (["generate", "x", "--stop", ""], ["--stop"]),
        (["generate", "x", "y"], ["y"]),
        (["generate", "--nonsense"], ["--nonsense"]),
        (["nonsense"], ["nonsense"]),
        (["tune"], ["--kernels"]),
        (["tune", "--kernels", "--seconds", "nan"], ["--seconds"]),
        (["tune", "--kernels", "--seconds", "inf"], ["--seconds: got inf"]),
        (["bench", "--temperature", "nan"], ["--temperature"]),
        (["bench", "--drafter", "oracle", "--oracle-p", "nan"], ["--oracle-p"]),
        (["bench", "--batch", "1.5"], ["--batch"]),
        (["bench", "--methods", "magic"], ["--methods", "magic", "reference"]),
        (["bench", "--batch", "0"], ["--batch"]),
        (["bench", "--repeats", "0"], ["--repeats: got 0"]),
        (["bench", "--max-new-tokens", "1"], ["--max-new-tokens: got 1, want an integer, at least 2"]),
        (["bench", "--methods", "autoregressive", "--fixed-draft"], ["--fixed-draft: no method"]),
        (["bench", "--prompts", "nowhere.json"], ["--prompts", "nowhere.json"]),
        (["bench", "--json", "nowhere/out.json"], ["--json", "nowhere"]),
        (["bench", "--plot", "out.txt"], ["--plot", ".png"]),
    ],
)
def test_errors_are_one_line_that_names_the_option(args: list[str], words: list[str]) -> None:
    line = _error(*args)
    for word in words:
        assert word in line


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("two\nlines")])
def test_errors_of_the_machine_are_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.cli import info

    def fail() -> None:
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert _error("info") in ("specdec: error: MemoryError", "specdec: error: two lines")


def test_outputs_are_tried_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.cli import bench
    from specdec.tuning import kernels

    def measure(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(kernels, "measure_point", measure)
    monkeypatch.setattr(bench, "measure", measure)
    file = tmp_path / "file"
    file.write_text("kept")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert str(file) in _error("tune", "--kernels", "--seconds", "0")
    dangling = tmp_path / "dangling.png"
    dangling.symlink_to(tmp_path / "nowhere" / "x.png")  # in a directory that can be written
    for option in ("--json", "--plot"):
        assert f"{option}: cannot write" in _error("bench", option, str(dangling))
    assert file.read_text() == "kept"


def test_an_empty_directory_of_adapters_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the working directory."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["generate", "x", "--method", "hispec", "--exit-adapters", ""])
    assert result.exit_code == 2
    assert "''" in result.stderr
