"""The command line, through typer's runner and, where the process itself matters, in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec import __version__
from specdec.acceptance import SamplingParams
from specdec.cli.app import app
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import load_config, resolve_model, weights_sha256
from specdec.models.skip_file import SkipFile
from specdec.models.skipping import SkipSet
from specdec.models.tokenizer import Tokenizer

RUNNER = CliRunner()
PROMPT = "def fibonacci(n):\n"
COMMAND = [sys.executable, "-m", "specdec"]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


def _json(*args: str, stdin: str | None = None) -> dict:
    result = RUNNER.invoke(app, ["generate", "--json", *args], input=stdin)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    directory = resolve_model("gdn-code")
    return Tokenizer.from_directory(directory, load_config(directory).bos_token_id)


@pytest.mark.parametrize("sampling", [[], ["--drafter", "ngram", "--temperature", "0.8", "--seed", "3"]])
def test_compare_decodes_the_same_tokens_plainly(sampling: list[str]) -> None:
    record = _json(PROMPT, "--max-new-tokens", "24", "--compare", *sampling)
    plain = record["plain"]
    assert set(plain) == {"tokens_per_second", "speedup", "same_tokens"}
    assert plain["same_tokens"]
    speed = record["stats"]["tokens_per_second"]
    assert plain["speedup"] == pytest.approx(speed / plain["tokens_per_second"])
    result = RUNNER.invoke(app, ["generate", PROMPT, "--max-new-tokens", "24", "--compare", *sampling])
    assert "the same tokens" in result.stderr


def test_compare_of_one_token_has_no_speed() -> None:
    assert _json(PROMPT, "--max-new-tokens", "1", "--compare")["plain"]["speedup"] is None


def test_text_and_panel_in_one_file_do_not_share_a_line(tmp_path: Path) -> None:
    path = tmp_path / "both.txt"
    with path.open("w") as both:
        command = [*COMMAND, "generate", PROMPT, "--max-new-tokens", "8"]
        subprocess.run(command, stdout=both, stderr=subprocess.STDOUT, env=ENVIRONMENT, check=True)
    panel = next(line for line in path.read_text().splitlines() if "specla, adapted+ngram" in line)
    assert panel.startswith("\u256d")  # the panel's corner


def test_an_unknown_instruction_set_is_refused() -> None:
    environment = {**ENVIRONMENT, "SPECDEC_CPU_ISA": "avx1024"}
    done = subprocess.run([*COMMAND, "info"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("specdec: error: SPECDEC_CPU_ISA: got 'avx1024', want portable")


def test_json_schema_and_text(tokenizer: Tokenizer) -> None:
    record = _json(PROMPT, "--max-new-tokens", "40")
    assert set(record) == {"text", "tokens", "finish_reason", "stats"}
    assert record["text"] == tokenizer.decode(record["tokens"])
    assert record["finish_reason"] == "length"
    assert len(record["tokens"]) == 40
    stats = record["stats"]
    for name in ("rounds", "drafted", "accepted"):
        assert isinstance(stats[name], int)
    assert set(stats["seconds"]) == {"prefill", "draft", "verify", "accept", "commit"}
    assert stats["acceptance_rate"] == pytest.approx(stats["accepted"] / stats["drafted"])
    assert stats["mean_accepted_length"] == pytest.approx(39 / stats["rounds"])
    decode = sum(stats["seconds"].values()) - stats["seconds"]["prefill"]
    assert stats["tokens_per_second"] == pytest.approx(39 / decode)


def test_every_method_and_drafter_writes_the_same_greedy_text() -> None:
    plain = _json(PROMPT, "--max-new-tokens", "32", "--method", "autoregressive")
    assert plain["stats"]["drafted"] == 0
    for drafter in ("ngram", "adapted", "adapted+ngram", "model:gdn-code", "oracle"):
        for commit in ("deferred", "eager"):
            args = ["--max-new-tokens", "32", "--drafter", drafter, "--commit", commit]
            args += ["--oracle-p", "0.8"] if drafter == "oracle" else []
            assert _json(PROMPT, *args)["tokens"] == plain["tokens"], (drafter, commit)


def test_self_speculative_writes_the_same_text(tmp_path: Path) -> None:
    """With the set that comes with the model and with one of a file, whatever ends the drafts."""
    command = [PROMPT, "--max-new-tokens", "32", "--method"]
    plain = _json(*command, "autoregressive")
    path = tmp_path / "skip.json"
    digest = weights_sha256(resolve_model("gdn-code"))
    SkipFile(SkipSet.of([3, 4], [4, 5]), "gdn-code", digest, 10, "elsewhere", "bfloat16").write(path)
    for more in (
        ["--draft-exit", "fixed", "--fixed-draft"],
        ["--draft-exit", "adaptive"],
        ["--skip", "none"],
        ["--draft-int8"],
        ["--skip", str(path)],
    ):
        record = _json(*command, "self-speculative", "--max-draft", "4", *more)
        assert record["tokens"] == plain["tokens"]
        assert record["stats"]["drafted"] > 0
    result = RUNNER.invoke(app, ["generate", *command, "self-speculative", "--skip", str(path)])
    assert "--skip: chosen on elsewhere in bfloat16, this is" in result.stderr
    result = RUNNER.invoke(app, ["generate", *command, "self-speculative"])
    assert "self-speculative, skip exit adaptive drafter, gdn-code" in result.stderr
    sampled = _json(*command, "self-speculative", "--temperature", "0.8", "--seed", "5")
    assert (sampled["acceptance"], sampled["lossless"]) == ("block", True)


def test_a_single_token_needs_no_round() -> None:
    record = _json(PROMPT, "--max-new-tokens", "1")
    assert len(record["tokens"]) == 1
    assert record["stats"]["rounds"] == 0
    assert record["stats"]["tokens_per_second"] == 0.0


def test_stop_text_is_cut_off_at_every_place(tokenizer: Tokenizer) -> None:
    whole = _json(PROMPT, "--max-new-tokens", "40")["text"]
    for length, start in ((1, 12), (4, 20), (9, 31)):
        stop = whole[start : start + length]
        record = _json(PROMPT, "--max-new-tokens", "40", "--stop", stop, "--stop", "never \x00 written")
        assert record["finish_reason"] == "stop"
        assert record["text"] == whole[: whole.index(stop)]
        # The tokens end with the one that completed the stop string.
        assert stop in tokenizer.decode(record["tokens"])
        assert stop not in tokenizer.decode(record["tokens"][:-1])


def test_stop_texts_are_looked_for_after_the_prompt() -> None:
    """One that the prompt holds, or begins and the text goes on with, ends nothing."""
    whole = _json(PROMPT, "--max-new-tokens", "24")
    for stop in ("fibonacci", PROMPT[-3:] + whole["text"][:3]):
        record = _json(PROMPT, "--max-new-tokens", "24", "--stop", stop)
        assert stop not in whole["text"]
        assert record["tokens"] == whole["tokens"]
        assert record["finish_reason"] == "length"


def test_stdout_is_the_text_and_stderr_the_panel() -> None:
    text = _json(PROMPT, "--max-new-tokens", "24")["text"]
    for flag in ("--stream", "--no-stream"):
        result = RUNNER.invoke(app, ["generate", PROMPT, "--max-new-tokens", "24", flag])
        assert result.exit_code == 0
        assert result.stdout == text
        for word in ("tokens/s", "mean accepted length", "acceptance by position", "prefill", "verify"):
            assert word in result.stderr
        assert "\x1b" not in result.output


def test_panel_of_a_run_without_rounds_or_drafts() -> None:
    result = RUNNER.invoke(app, ["generate", PROMPT, "--max-new-tokens", "1"])
    assert result.exit_code == 0
    assert "1 written (length)" in result.stderr
    assert "acceptance by position" not in result.stderr


def test_prompt_from_stdin_is_taken_as_it_is() -> None:
    given = _json(PROMPT, "--max-new-tokens", "8")["tokens"]
    assert _json("--max-new-tokens", "8", stdin=PROMPT)["tokens"] == given
    assert _json("-", "--max-new-tokens", "8", stdin=PROMPT)["tokens"] == given


def test_an_empty_prompt_starts_from_the_beginning_of_text_token() -> None:
    assert len(_json("", "--max-new-tokens", "4")["tokens"]) == 4


def test_a_sampled_run_is_repeated_by_its_seed() -> None:
    args = (PROMPT, "--max-new-tokens", "24", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.95")
    first = _json(*args)
    again = _json(*args, "--seed", str(first["seed"]))
    assert again["tokens"] == first["tokens"]
    assert _json(*args, "--seed", str(first["seed"] ^ 1))["tokens"] != first["tokens"]


def test_edits_of_logits_are_those_of_the_library() -> None:
    model = load_model("gdn-code")
    tokenizer = load_tokenizer("gdn-code")
    plain = _json(PROMPT, "--max-new-tokens", "24")["tokens"]
    for args, fields in (
        (["--presence-penalty", "1.5"], {"presence_penalty": 1.5}),
        (["--frequency-penalty", "-0.5"], {"frequency_penalty": -0.5}),
        (["--logit-bias", f"{plain[3]}=-9", "--logit-bias", "7=2"], {"logit_bias": {plain[3]: -9, 7: 2}}),
        (["--banned-tokens", f"{plain[0]},5-9"], {"banned_tokens": [plain[0], *range(5, 10)]}),
        (["--allowed-tokens", "300-2000, 20"], {"allowed_tokens": [20, *range(300, 2001)]}),
    ):
        got = _json(PROMPT, "--max-new-tokens", "24", "--compare", *args)
        request = Request(tokenizer.encode(PROMPT), 24, SamplingParams(**fields))
        assert got["tokens"] == Loop(model).run([request])[0].tokens
        assert got["tokens"] != plain
        assert got["plain"]["same_tokens"]


def test_an_oracle_knows_what_comes_with_edits() -> None:
    args = ("--repetition-penalty", "1.3", "--frequency-penalty", "0.5", "--drafter", "oracle")
    stats = _json(PROMPT, "--max-new-tokens", "24", *args)["stats"]
    assert stats["drafted"] == stats["accepted"] > 0


def test_log_probabilities_are_in_the_json_alone() -> None:
    args = (PROMPT, "--max-new-tokens", "12")
    record = _json(*args, "--logprobs", "3", "--frequency-penalty", "0.4")
    assert [told["token"] for told in record["logprobs"]] == record["tokens"]
    for told in record["logprobs"]:
        assert len(told["top"]) == 3
        assert told["top"][0]["logprob"] >= told["logprob"]
    assert [told["top"] for told in _json(*args, "--logprobs", "0")["logprobs"]] == [[]] * 12
    assert "logprobs" not in _json(*args)


def test_a_lossy_rule_says_so() -> None:
    drafting = ("--drafter", "exit:1", "--max-new-tokens", "24")
    args = (PROMPT, "--temperature", "1.5", "--seed", "2", *drafting)
    record = _json(*args, "--acceptance", "typical")
    assert (record["acceptance"], record["lossless"]) == ("typical", False)
    exact = _json(*args)
    assert (exact["acceptance"], exact["lossless"]) == ("block", True)
    assert "lossless" not in _json(PROMPT, *drafting)  # greedy: no rule is at work
    for rule, words in (("typical", "typical: LOSSY"), ("speculative", "speculative"), ("auto", "block")):
        panel = RUNNER.invoke(app, ["generate", *args, "--acceptance", rule]).stderr
        assert re.search(f"acceptance +{words}", panel)


def test_what_decided_is_told_where_there_was_something_to_decide() -> None:
    args = (PROMPT, "--max-new-tokens", "3", "--temperature", "1", "--seed", "1")
    assert _json(*args)["acceptance"] == "block"  # the model drafts alone, and draws
    assert _json(*args, "--drafter", "ngram")["acceptance"] == "follow"
    tree = _json(*args, "--drafter", "exit:1", "--draft-tree", "2,1")
    assert (tree["acceptance"], tree["lossless"]) == ("traversal", True)
    plain = _json(*args, "--method", "autoregressive")
    assert (plain["acceptance"], plain["lossless"]) == (None, True)
    panel = RUNNER.invoke(app, ["generate", "x", *args[1:], "--drafter", "ngram"]).stderr
    assert re.search("acceptance +follow, but nothing was drafted", panel)


def test_the_panel_says_what_drawn_drafts_keep_and_that_they_did_not_pay() -> None:
    args = ["generate", PROMPT, "--max-new-tokens", "16", "--temperature", "1", "--seed", "1", "--compare"]
    args += ["--drafter", "exit:9"]  # nine of ten layers are too dear a drafter for the budget
    panel = RUNNER.invoke(app, args).stderr
    assert re.search(r"drafting +in 0 of 15 rounds: cut back", panel)
    panel = RUNNER.invoke(app, [*args, "--fixed-draft", "--max-draft", "3"]).stderr
    assert "cut back" not in panel
    assert "other tokens" in panel
    assert "drawn drafts keep the distribution" in panel


def test_help_has_an_example_everywhere() -> None:
    for command in ([], ["generate"], ["bench"], ["tune"], ["info"]):
        result = RUNNER.invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Example: specdec" in result.stdout


def test_version_and_info() -> None:
    assert RUNNER.invoke(app, ["--version"]).stdout == f"specdec {__version__}\n"
    result = RUNNER.invoke(app, ["info"])
    assert result.exit_code == 0
    for word in (__version__, "torch", "instruction set", "libspecdec_cpu", "portable", "CUDA", "threads"):
        assert word in result.stdout


def test_tune_writes_the_users_table_and_info_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.ops import strategy
    from specdec.tuning import kernels

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = functools.partial(kernels.measure_strategies, batches=(1,), nodes=(2, 4), widths=(64,))
    monkeypatch.setattr(kernels, "measure_strategies", small)
    path = tmp_path / "specdec" / "strategy.json"
    strategy.reload()
    try:
        assert str(path) not in RUNNER.invoke(app, ["info"]).stdout
        result = RUNNER.invoke(app, ["tune", "--kernels", "--seconds", "0"])
        assert result.exit_code == 0, result.output
        assert f"{path}: 4 shapes for " in result.stdout
        assert path.is_file()
        assert str(path) in RUNNER.invoke(app, ["info"]).stdout
    finally:
        strategy.reload()  # the tables of other tests are those of the package


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("specdec.cli.app", "torch"),
        ("specdec.training.pretrain", "specdec.ops"),
        ("specdec.models", "specdec.ops"),
    ],
)
def test_imports_stay_light(module: str, heavy: str) -> None:
    """--help answers without torch; configurations, tokenizers and training need no compiled library."""
    code = f"import sys; import {module}; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT).returncode == 0


def test_interrupt_ends_with_the_partial_text_and_its_statistics() -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "--max-new-tokens", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)  # decoding has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    panel = err.decode()
    assert process.returncode == 130
    assert first + out
    assert "(cancelled)" in panel
    assert re.search(r"tokens +[1-9][0-9]* written", panel)
    assert "Traceback" not in panel


def test_interrupt_while_comparing_keeps_the_finished_result() -> None:
    code = """
import os, signal, sys
import specdec.cli.generate as command
from specdec.cli import main

plainly = command._decode_plainly

def interrupted(*args):
    decode = command._decode
    def with_signal(loop, request):
        events = loop.stream
        def stream(*args):
            for event in events(*args):
                os.kill(os.getpid(), signal.SIGINT)
                yield event
        loop.stream = stream
        return decode(loop, request)
    command._decode = with_signal
    return plainly(*args)

command._decode_plainly = interrupted
sys.argv = ["specdec", "generate", "def f():", "--compare", "--max-new-tokens", "20", "--json"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    record = json.loads(done.stdout)
    assert len(record["tokens"]) == 20
    assert "plain" not in record


def test_a_closed_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "--max-new-tokens", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) == 1


def test_stdin_that_is_not_utf8_is_an_error() -> None:
    done = subprocess.run([*COMMAND, "generate"], input=b"\xff\xfe", capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert b"UTF-8" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("generate $'\\xff\\xfe'", "prompt: not UTF-8"),
        ("generate x --stop $'\\xff'", "--stop: not UTF-8"),
        ("generate <&-", "stdin is closed"),
        ("generate x >&-", "stdout is closed"),
        ("info >&-", "stdout is closed"),
    ],
)
def test_what_the_shell_may_hand_over_is_one_line(arguments: str, word: str) -> None:
    script = f'"{sys.executable}" -m specdec {arguments}'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert word in done.stderr


def test_with_stderr_closed_stdout_is_the_text_alone() -> None:
    text = _json(PROMPT, "--max-new-tokens", "4")["text"]
    script = f'"{sys.executable}" -m specdec generate - --max-new-tokens 4 --drafter oracle 2>&-'
    done = subprocess.run(
        ["bash", "-c", script], input=PROMPT, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert (done.returncode, done.stdout) == (0, text)


def test_a_terminal_without_utf8_gets_the_text_with_marks() -> None:
    """At a high temperature the bytes are no text: U+FFFD, which ASCII does not have."""
    args = ["generate", PROMPT, "--max-new-tokens", "60", "--temperature", "40", "--seed", "2"]
    outputs = [
        subprocess.run(
            [*COMMAND, *args], capture_output=True, env={**ENVIRONMENT, "PYTHONIOENCODING": encoding}
        )
        for encoding in ("utf-8", "ascii")
    ]
    assert [done.returncode for done in outputs] == [0, 0]
    text = outputs[0].stdout.decode("utf-8")
    assert not text.isascii()
    assert outputs[1].stdout == text.encode("ascii", errors="replace")


def test_bundled_prompts_are_of_four_kinds_and_fit_the_model(tokenizer: Tokenizer) -> None:
    from specdec.bench.prompts import load_prompts

    prompts = load_prompts()
    for kind in ("complete", "edit", "repeat", "free"):
        assert sum(p.kind == kind for p in prompts) >= 6
    assert len(prompts) >= 24
    for prompt in prompts:
        assert 40 <= len(tokenizer.encode(prompt.prompt)) <= 200, prompt.name


def test_prompt_files_are_checked(tmp_path: Path) -> None:
    from specdec.bench.prompts import load_prompts

    good = {"kind": "a", "name": "b", "prompt": "c"}
    for content, word in (
        ("[", "JSON"),
        ("{}", "list"),
        ("[]", "list"),
        (json.dumps([good, {"kind": "a", "name": "c"}]), "entry 1"),
        (json.dumps([good, good]), "two entries"),
    ):
        path = tmp_path / "prompts.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=word):
            load_prompts(path)
