"""`specdec generate`: a prompt in, text out as it comes, then the statistics of the run."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, TextIO, cast

import torch

from specdec._checks import check_integer
from specdec._rules import is_lossless
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.rules import check_rule
from specdec.cli.drafting import check_drafting, check_useful, note_other_machine, skip_spec, tiers_spec
from specdec.cli.errors import INTERRUPTED, as_option, note
from specdec.cli.panel import Chance, Comparison, print_panel
from specdec.cli.text import TextWriter
from specdec.generation import Request, Result, Statistics
from specdec.loop import Loop
from specdec.methods import (
    DrafterSpec,
    Method,
    MethodOptions,
    build_drafter,
    default_drafter,
    get_method,
)
from specdec.models import load_model, load_tokenizer
from specdec.models.base import CausalLM

if TYPE_CHECKING:
    from specdec.drafters.online_skips import OnlineSkipDrafter

MAX_TOKEN = 2**24  # far beyond any vocabulary; a longer range would only fill memory


@dataclass(frozen=True)
class Options:
    """The command's options, named as on the command line."""

    model: str
    method: str
    drafter: str | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[str, ...]
    allowed_tokens: str | None
    banned_tokens: str | None
    acceptance: str
    logprobs: int | None
    seed: int | None
    stop: tuple[str, ...]
    dtype: str
    max_draft: int
    commit: str
    oracle_p: float
    draft_tree: str | None
    fixed_draft: bool
    skip: Path | None
    draft_exit: str | None
    draft_int8: bool | None
    tiers: str | None
    exit_adapters: str | None
    compare: bool
    json: bool
    stream: bool


def run(prompt: str | None, options: Options) -> int:
    """Runs the command; returns the exit code: 0, or 130 when it was interrupted."""
    method, spec, sampling = _checked(options)
    if prompt is not None:
        _check_utf8("prompt", prompt)
    tokenizer = load_tokenizer(options.model)
    text = prompt if prompt is not None and prompt != "-" else _read_stdin()
    tokens = tokenizer.encode(text)
    if not tokens:
        raise ValueError("prompt: got no text, and this model has no beginning-of-text token to start from")

    model = load_model(options.model, dtype=getattr(torch, options.dtype))
    # Without --no-stream the text is written while it comes; --json keeps stdout for its one object.
    writer = TextWriter(tokenizer, options.stop, sys.stdout if options.stream and not options.json else None)
    try:
        sampling.check_vocabulary(model.vocab_size)
    except ValueError as error:
        raise as_option(error) from None
    request = Request(
        tokens, options.max_new_tokens, sampling, stop=lambda: writer, logprobs=options.logprobs
    )
    loop = _loop(model, method, spec, request, options)
    if not options.json and sys.stdout.isatty():
        _echo_prompt(text)
    result, interrupted = _decode(loop, request, writer)
    writer.finish()
    plain = None
    if options.compare and not interrupted:
        plain, interrupted = _decode_plainly(model, request, result)

    chance = None
    if not sampling.greedy:
        chance = Chance(result.seed, None if spec is None else spec.decided_by(options.acceptance))
    refined = cast("OnlineSkipDrafter", loop.drafter) if spec is not None and spec.online else None
    if options.json:
        _print_json(writer.text, result, loop.statistics, chance, plain, refined)
    else:
        if not options.stream:
            sys.stdout.write(writer.text)
        if sys.stdout.isatty() or _stderr_is_stdout():
            sys.stdout.write("\n")
        sys.stdout.flush()
        title = options.method if spec is None else f"{options.method}, {spec.label} drafter"
        print_panel(
            f"{title}, {options.model}",
            loop.statistics,
            result,
            len(tokens),
            chance,
            plain,
            refined,
            drafts=spec is not None,
            as_it_pays=spec is not None and spec.has_model and not options.fixed_draft,
        )
    return INTERRUPTED if interrupted else 0


def _decode_plainly(model: CausalLM, request: Request, result: Result) -> tuple[Comparison | None, bool]:
    """The same number of tokens, one a round: the autoregressive method. None, True after a Ctrl-C."""
    loop = get_method("autoregressive").build(model, None, MethodOptions())
    sampling = replace(request.sampling, seed=result.seed)
    plain = Request(request.prompt, len(result.tokens), sampling, ignore_eos=True)
    again, interrupted = _decode(loop, plain)
    if interrupted:
        return None, True
    return Comparison(loop.statistics.tokens_per_second, again.tokens == result.tokens), False


def _stderr_is_stdout() -> bool:
    """Whether both write to one file or pipe, where the panel would begin in the text's last line."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something without a descriptor
        return False


def _checked(options: Options) -> tuple[Method, DrafterSpec | None, SamplingParams]:
    """Everything that can be refused before a model is read."""
    try:
        method = get_method(options.method)
        check_integer("max_new_tokens", options.max_new_tokens, 1)
        check_drafting(options.max_draft, options.oracle_p)
        if options.logprobs is not None:
            check_integer("logprobs", options.logprobs, 0)
        sampling = SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=_biases(options.logit_bias),
            allowed_tokens=_token_ids("allowed_tokens", options.allowed_tokens),
            banned_tokens=_token_ids("banned_tokens", options.banned_tokens) or (),
            seed=options.seed,
        )
        check_rule(options.acceptance)
        spec = None
        if method.skips or method.tiers:
            if options.drafter is not None:
                raise ValueError(
                    f"drafter: got {options.drafter!r}, but with {options.method} the target itself drafts"
                )
            if method.tiers:
                spec = tiers_spec(
                    options.tiers, options.exit_adapters, options.draft_tree, int8=options.draft_int8
                )
            else:
                spec = skip_spec(
                    options.skip, options.draft_exit, options.draft_tree, int8=options.draft_int8
                )
        elif method.drafts:
            name = default_drafter(options.model) if options.drafter is None else options.drafter
            spec = DrafterSpec.parse(name, p=options.oracle_p, tree=options.draft_tree)
        elif options.drafter is not None:
            raise ValueError(
                f"drafter: got {options.drafter!r}, but the method {options.method} drafts nothing"
            )
        if spec is not None and not sampling.greedy:
            spec.check_acceptance(options.acceptance)
    except ValueError as error:
        raise as_option(error) from None
    check_useful(
        [spec] if spec is not None else [],
        sampling,
        [options.acceptance],
        options.draft_tree,
        options.oracle_p,
        fixed_draft=options.fixed_draft,
        skip=options.skip,
        draft_exit=options.draft_exit,
        draft_int8=options.draft_int8,
        tiers=options.tiers,
        exit_adapters=options.exit_adapters,
    )
    if options.logprobs is not None and not options.json:
        raise ValueError("--logprobs: they are part of the JSON, want --json as well")
    if "" in options.stop:
        raise ValueError("--stop: got an empty text, want at least one character")
    for stop in options.stop:
        _check_utf8("--stop", stop)
    return method, spec, sampling


def _biases(given: tuple[str, ...]) -> dict[int, float]:
    """Reads TOKEN=BIAS entries."""
    biases: dict[int, float] = {}
    for entry in given:
        token, _, bias = entry.partition("=")
        try:
            new = dict(SamplingParams(logit_bias={int(token): float(bias)}).logit_bias)
        except ValueError:
            raise ValueError(
                f"logit_bias: got {entry!r}, want TOKEN=BIAS such as 42=-1.5, a token id and a bias from "
                "-1e30 to 1e30 (--banned-tokens excludes a token)"
            ) from None
        if biases.keys() & new.keys():
            raise ValueError(f"logit_bias: got the token {int(token)} twice, want one bias for it")
        biases |= new
    return biases


def _token_ids(name: str, given: str | None) -> list[int] | None:
    """Reads token ids and ranges, such as 7,20-39."""
    if given is None:
        return None
    tokens: list[int] = []
    for entry in given.split(","):
        first, dash, last = entry.strip().partition("-")
        last = last if dash else first
        numbers = first.isdecimal() and last.isdecimal()
        if not numbers or not int(first) <= int(last) <= MAX_TOKEN:
            raise ValueError(f"{name}: got {entry!r}, want token ids and ranges such as 7,20-39")
        tokens += range(int(first), int(last) + 1)
    return tokens


def _check_utf8(name: str, text: str) -> None:
    """Bytes of the command line that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: not UTF-8 (character {error.start})") from None


def _read_stdin() -> str:
    if sys.stdin is None:  # started with it closed
        raise ValueError("prompt: stdin is closed")
    if sys.stdin.isatty():
        note("the prompt comes from the terminal; end it with Ctrl-D")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt: stdin is not UTF-8 (byte {error.start})") from None


def _loop(
    model: CausalLM, method: Method, spec: DrafterSpec | None, request: Request, options: Options
) -> Loop:
    commit = cast(Literal["deferred", "eager"], options.commit)
    settings = MethodOptions(
        commit=commit,
        max_draft=options.max_draft,
        adaptive=not options.fixed_draft,
        acceptance=options.acceptance,
    )
    drafter = None
    if spec is not None:
        continuations = []
        if spec.needs_continuations:
            note("oracle drafter: decoding the prompt greedily first to know the answer")
            baseline = get_method("autoregressive").build(model, None, MethodOptions())
            sampling = replace(request.sampling, temperature=0.0)
            greedy = Request(request.prompt, request.max_new_tokens, sampling)
            continuations = [(request.prompt, baseline.run([greedy])[0].tokens)]
        try:
            drafter = build_drafter(
                spec, model, settings, dtype=getattr(torch, options.dtype), continuations=continuations
            )
            note_other_machine(spec, model, options.dtype)
        except ValueError as error:
            raise as_option(error) from None
    return method.build(model, drafter, settings)


def _decode(loop: Loop, request: Request, writer: TextWriter | None = None) -> tuple[Result, bool]:
    """Decodes to the end or to the first Ctrl-C; a second one does not wait for the round to end."""
    results: list[Result] = []
    with _interruptible() as interrupted:
        events = loop.stream([request], results)
        for _ in events:
            if writer is not None:
                writer.flush()
            if interrupted:
                break
        events.close()  # its slots are freed now
    return results[0], bool(interrupted)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collects SIGINT in a list instead of raising in the middle of a round."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


def _echo_prompt(text: str) -> None:
    """On a terminal the text continues its prompt, which is shown dimmed."""
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text(text, style="dim"), end="")
    sys.stdout.flush()


def _print_json(
    text: str,
    result: Result,
    statistics: Statistics,
    chance: Chance | None,
    plain: Comparison | None,
    refined: OnlineSkipDrafter | None,
) -> None:
    record: dict[str, object] = {
        "text": text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "stats": statistics.as_dict(),
    }
    if chance is not None:
        record["seed"] = chance.seed
        record["acceptance"] = chance.rule
        record["lossless"] = is_lossless(chance.rule)
    if result.logprobs is not None:
        record["logprobs"] = [
            {
                "token": token,
                "logprob": told.logprob,
                "top": [{"token": other, "logprob": logprob} for other, logprob in told.top],
            }
            for token, told in zip(result.tokens, result.logprobs, strict=True)
        ]
    if plain is not None:
        record["plain"] = {
            "tokens_per_second": plain.tokens_per_second,
            "speedup": plain.speedup(statistics),
            "same_tokens": plain.same_tokens,
        }
    if refined is not None:
        record["refinement"] = refined.refinement.as_dict() | {
            "mixers": sorted(refined.skips.mixers),
            "mlps": sorted(refined.skips.mlps),
        }
    stdout: TextIO = sys.stdout
    stdout.write(json.dumps(record) + "\n")
