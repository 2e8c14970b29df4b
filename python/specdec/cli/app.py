"""Commands and their options. Nothing here imports torch, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec import __version__
from specdec.cli.errors import CommandGroup
from specdec.cli.options import (
    DEFAULT_DRAFTER_TEXT,
    DRAFTERS_TEXT,
    EXITS_TEXT,
    METHODS_TEXT,
    RULES_TEXT,
    Acceptance,
    Commit,
    CommitOption,
    DraftInt8,
    DraftTree,
    Dtype,
    DtypeOption,
    ExitAdapters,
    FixedDraft,
    MaxDraft,
    Model,
    OracleP,
    Seed,
    Skip,
    Temperature,
    Tiers,
    TunedMethod,
)
from specdec.cli.train_commands import train_drafter, train_exits
from specdec.methods import DRAFT_EXIT

app = typer.Typer(
    cls=CommandGroup,
    help="Exact, fast speculative decoding for models with a recurrent state.",
    epilog='Example: specdec generate "def fibonacci(n):"',
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _given(context: typer.Context) -> list[str]:
    """Names of the parameters that the command line gives."""
    return [
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"specdec {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog="Example: specdec generate 'def fibonacci(n):' --max-new-tokens 96 --stop $'\\n\\n\\n'\n\n"
    "Example: specdec generate 'def fibonacci(n):' --method hispec --exit-adapters my-exits --compare\n\n"
    "Example: specdec generate '# A queue' --temperature 0.8 --frequency-penalty 0.3 --logprobs 3 --json"
)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; '-' or nothing reads it from stdin.")
    ] = None,
    model: Model = "gdn-code",
    method: Annotated[str, typer.Option(help=f"{METHODS_TEXT}.")] = "specla",
    drafter: Annotated[
        str | None, typer.Option(help=f"{DRAFTERS_TEXT}. {DEFAULT_DRAFTER_TEXT}", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens to write, at least 1; never exceeded.")
    ] = 128,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens, from 1; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens of this mass, above 0; 1 is off.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share, up to 1, of the likeliest; 0 is off.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 disfavours tokens seen before, 1e-30 to 1e30; 1 is off.")
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(help="Subtracted from the logit of every token already written, -2 to 2; 0 is off."),
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted as often as the token was written, -2 to 2; 0 is off.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN=BIAS",
            help="Added to a token's logit, -1e30 to 1e30; may be given several times, once a token.",
        ),
    ] = None,
    allowed_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="IDS", help="Only these tokens: ids and ranges, such as 7,20-39.", show_default=False
        ),
    ] = None,
    banned_tokens: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Never these tokens, also where allowed.", show_default=False),
    ] = None,
    acceptance: Acceptance = "auto",
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: every token's log-probability and the N likeliest, under the model's own "
            "distribution (before temperature and all else).",
            show_default=False,
        ),
    ] = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    max_draft: MaxDraft = 16,
    commit: CommitOption = Commit.deferred,
    oracle_p: OracleP = 1.0,
    draft_tree: DraftTree = None,
    fixed_draft: FixedDraft = False,
    skip: Skip = None,
    draft_exit: Annotated[
        str | None,
        typer.Option(
            help=f"When drafts of self-speculative end. {EXITS_TEXT}. Default: {DRAFT_EXIT}.",
            show_default=False,
        ),
    ] = None,
    draft_int8: DraftInt8 = None,
    tiers: Tiers = None,
    exit_adapters: ExitAdapters = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Decode as many tokens one by one too, and say how much faster this was."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text and panel.")
    ] = False,
    stream: Annotated[
        bool, typer.Option(help="Write the text while it comes, or all of it at the end.")
    ] = True,
) -> None:
    """Continue a text. The text goes to stdout, the statistics of the run to stderr."""
    from specdec.cli import generate as command

    options = command.Options(
        model=model,
        method=method,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple(logit_bias or ()),
        allowed_tokens=allowed_tokens,
        banned_tokens=banned_tokens,
        acceptance=acceptance,
        logprobs=logprobs,
        seed=seed,
        stop=tuple(stop or ()),
        dtype=dtype.value,
        max_draft=max_draft,
        commit=commit.value,
        oracle_p=oracle_p,
        draft_tree=draft_tree,
        fixed_draft=fixed_draft,
        skip=skip,
        draft_exit=draft_exit,
        draft_int8=draft_int8,
        tiers=tiers,
        exit_adapters=exit_adapters,
        compare=compare,
        json=json,
        stream=stream,
    )
    raise typer.Exit(command.run(prompt, options))


@app.command(
    epilog="Example: specdec bench --drafter ngram,oracle --oracle-p 0.8 --json out.json --plot out.png\n\n"
    "Example: specdec bench --study self-speculative --out docs/results"
)
def bench(
    context: typer.Context,
    methods: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated. {METHODS_TEXT}; reference: the model in plain PyTorch, token by token."
        ),
    ] = "autoregressive,specla",
    model: Model = "gdn-code",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSON list of {"kind", "name", "prompt"}. Default: the bundled prompts.', show_default=False
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Comma-separated numbers of sequences decoded together.")] = "1",
    drafter: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated. {DRAFTERS_TEXT}. {DEFAULT_DRAFTER_TEXT}", show_default=False),
    ] = None,
    oracle_p: OracleP = 1.0,
    draft_tree: DraftTree = None,
    acceptance: Annotated[
        str,
        typer.Option(
            help="Comma-separated rules for drafts that are drawn at random (temperature above 0). "
            f"{RULES_TEXT}."
        ),
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens written for every prompt, at least 2.")] = 128,
    temperature: Temperature = 0.0,
    repeats: Annotated[
        int, typer.Option(help="Runs of every method on every prompt, at least 1; medians count.")
    ] = 3,
    dtype: DtypeOption = Dtype.float32,
    max_draft: MaxDraft = 16,
    fixed_draft: FixedDraft = False,
    skip: Skip = None,
    draft_exit: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated; when drafts of self-speculative end. {EXITS_TEXT}. "
            f"Default: {DRAFT_EXIT}.",
            show_default=False,
        ),
    ] = None,
    draft_int8: DraftInt8 = None,
    tiers: Tiers = None,
    exit_adapters: ExitAdapters = None,
    commit: CommitOption = Commit.deferred,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the rows here.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the speedups here (PNG, SVG or PDF).", show_default=False)
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            help="A fixed set of measurements instead, with a report in files. specla: controlled "
            "acceptance, tree verification, commits and the ablations of decoding. self-speculative: where "
            "drafts end. hispec: two tiers of early exits against three. Of the other options it "
            "takes --quick, --out, --json, --model, --prompts, --dtype, specla --drafter (those to "
            "compare), self-speculative --skip, hispec --exit-adapters.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --study: small sizes and few repeats, a minute or two.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="With --study: the directory of its JSON, Markdown and plots.")
    ] = Path("docs/results"),
) -> None:
    """Compare methods on the same prompts, interleaved in one process; exit 1 where greedy tokens differ."""
    given = _given(context)
    if study is not None:
        from specdec.cli import study as study_command

        raise typer.Exit(
            study_command.run(
                study_command.Options(
                    study=study,
                    given=given,
                    quick=quick,
                    out=out,
                    json=json,
                    model=model,
                    prompts=prompts,
                    drafters=drafter if "drafter" in given else None,
                    skip=skip,
                    exit_adapters=exit_adapters,
                    dtype=dtype.value,
                )
            )
        )
    for name in ("quick", "out"):
        if name in given:
            raise ValueError(f"--{name}: only a --study takes it")
    from specdec.cli import bench as command

    options = command.Options(
        methods=methods,
        model=model,
        prompts=prompts,
        batch=batch,
        drafter=drafter,
        oracle_p=oracle_p,
        draft_tree=draft_tree,
        acceptance=acceptance,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        repeats=repeats,
        dtype=dtype.value,
        max_draft=max_draft,
        fixed_draft=fixed_draft,
        skip=skip,
        draft_exit=draft_exit,
        draft_int8=draft_int8,
        tiers=tiers,
        exit_adapters=exit_adapters,
        commit=commit.value,
        json=json,
        plot=plot,
    )
    raise typer.Exit(command.run(options))


@app.command(
    epilog="Example: specdec tune --model gdn-code --text ~/src --out skip.json\n\n"
    "Example: specdec tune --method hispec --model gdn-code --text ~/src --plot tiers.png\n\n"
    "Example: specdec tune --kernels"
)
def tune(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="Find out how this model drafts best for itself; a name, directory or file as elsewhere.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        TunedMethod,
        typer.Option(
            help="With --model: self-speculative searches the sub-layers that drafts leave out and the "
            "tokens that they know, hispec tries early exits and lengths of drafts."
        ),
    ] = TunedMethod.self_speculative,
    text: Annotated[
        Path | None,
        typer.Option(
            help="With --model: a folder of UTF-8 text files like those to be written, searched recursively.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="For self-speculative: the file of the set, JSON. The search is kept beside it, ending in "
            ".study.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    exit_adapters: ExitAdapters = None,
    draft_int8: Annotated[
        bool,
        typer.Option(
            "--draft-int8",
            help="For self-speculative: a set for drafts with int8 copies of the weights, which its file "
            "then asks for. For hispec: exits are read through an int8 copy of the head.",
        ),
    ] = False,
    trials: Annotated[int, typer.Option(help="For self-speculative: most sets that are tried.")] = 2000,
    resume: Annotated[
        bool, typer.Option("--resume", help="For self-speculative: go on with a search.")
    ] = False,
    warm_start_only: Annotated[
        bool,
        typer.Option(
            "--warm-start-only",
            help="For self-speculative: take the best of what the similarity of hidden states proposes, and "
            "do not search.",
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="With --model: write all figures here.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="With --model: draw the sets and the search, or a heat map of the sweep, here (PNG, SVG or "
            "PDF).",
            show_default=False,
        ),
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Measure which verification strategy is fastest at which shape.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Time to measure or to search for, about.", show_default="840 for self-speculative, else 120"
        ),
    ] = None,
) -> None:
    """Measure this machine and keep the results for later runs."""
    if kernels == (model is not None):
        raise ValueError("give --kernels or --model, one of them")
    if model is None:
        for name in _given(context):
            if name not in ("kernels", "seconds"):
                raise ValueError(f"--{name.replace('_', '-')}: only with --model")
        from specdec.cli import tune as kernels_command

        kernels_command.run(120.0 if seconds is None else seconds)
        return
    if method is TunedMethod.hispec:
        for name in _given(context):
            if name in ("out", "trials", "resume", "warm_start_only"):
                raise ValueError(f"--{name.replace('_', '-')}: only for --method self-speculative")
        from specdec.cli import tune_tiers

        tiers = tune_tiers.Options(
            model=model,
            text=text,
            dtype=dtype.value,
            exit_adapters=exit_adapters,
            draft_int8=draft_int8,
            seconds=120.0 if seconds is None else seconds,
            json=json,
            plot=plot,
        )
        raise typer.Exit(tune_tiers.run(tiers))
    if exit_adapters is not None:
        raise ValueError("--exit-adapters: only for --method hispec")
    from specdec.cli import tune_skips as command

    options = command.Options(
        model=model,
        text=text,
        out=out,
        dtype=dtype.value,
        draft_int8=draft_int8,
        seconds=840.0 if seconds is None else seconds,
        trials=trials,
        resume=resume,
        warm_start_only=warm_start_only,
        json=json,
        plot=plot,
    )
    raise typer.Exit(command.run(options))


app.command(
    name="train-drafter",
    epilog="Example: specdec train-drafter --target gdn-code --text ~/src --out my-drafter --tokens 4000000",
)(train_drafter)
app.command(
    name="train-exits",
    epilog="Example: specdec train-exits --model smollm2 --text ~/src --exits 4,8 --out my-exits "
    "--text-tokens 1000000",
)(train_exits)


@app.command(epilog="Example: specdec info")
def info() -> None:
    """Print version, torch, instruction set and what is built."""
    from specdec.cli import info as command

    command.run()
