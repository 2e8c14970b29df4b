"""Commands and their options. Nothing here imports torch, so that --help answers at once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from specdec import __version__
from specdec._rules import RULES
from specdec.cli.errors import CommandGroup
from specdec.methods import DEFAULT_DRAFTER, DRAFT_EXIT, DRAFTERS, METHODS
from specdec.training import defaults

app = typer.Typer(
    cls=CommandGroup,
    help="Exact, fast speculative decoding for models with a recurrent state.",
    epilog='Example: specdec generate "def fibonacci(n):"',
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(str, Enum):
    """Of a model's activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Commit(str, Enum):
    """When an accepted path is folded into the state."""

    deferred = "deferred"
    eager = "eager"


def _listed(entries: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {description}" for name, description in entries)


_METHODS = _listed([(name, method.description) for name, method in METHODS.items()])
_DRAFTERS = _listed(list(DRAFTERS.items()))
_DEFAULT_DRAFTER = f"Default: adapted+ngram where a drafter comes with the model, else {DEFAULT_DRAFTER}."
_RULES = _listed([(name, rule.description) for name, rule in RULES.items()])

Model = Annotated[
    str,
    typer.Option(help="A model's name (gdn-code, smollm2), a directory with a checkpoint, or a GGUF file."),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Of the activations; the recurrent state is float32.")]
CommitOption = Annotated[
    Commit, typer.Option(help="Fold accepted drafts into the state with the next round, or at once.")
]
MaxDraft = Annotated[
    int,
    typer.Option(
        help="Most draft tokens a round, 1 to 63, all nodes of a --draft-tree counted; fewer where more do "
        "not pay."
    ),
]
OracleP = Annotated[
    float, typer.Option("--oracle-p", help="Chance that a token of the oracle is right, 0 to 1.")
]
Acceptance = Annotated[
    str,
    typer.Option(help=f"What decides about drafts that are drawn at random (temperature above 0). {_RULES}."),
]
DraftTree = Annotated[
    str | None,
    typer.Option(
        help="Children of each node by depth in what adapted, model:, exit: and self-speculative draft, such "
        "as 2,2,1; the last goes on for as long as --max-draft lasts; 1: chains; auto: the likeliest tokens, "
        "pruned by their chances. Default: auto for adapted, else 1.",
        show_default=False,
    ),
]
Skip = Annotated[
    Path | None,
    typer.Option(
        help="For self-speculative: the file that says which sub-layers drafts leave out; online, or "
        "online:FILE: others that suit the text better, found while it is written. Default: the set that "
        "comes with the model.",
        show_default=False,
    ),
]
_EXITS = (
    "priced: where going on would not be worth its time; adaptive: below a token less likely than a "
    "threshold that follows what is accepted; static:T: below one less likely than T; fixed: at --max-draft. "
    "adaptive takes the paper's settings, of which adaptive:gamma0=0.6,alpha=0.85,eps=0.01,beta1=0.5,"
    "beta2=0.9 are the defaults; it and static take widen=N: up to N guesses of a chain's last token"
)
DraftInt8 = Annotated[
    bool | None,
    typer.Option(
        "--draft-int8/--no-draft-int8",
        help="For self-speculative: draft with int8 copies of the weights, or with the weights themselves. "
        "Default: as the file of --skip says, and with --skip none, which leaves nothing out. For hispec: "
        "with one of the head.",
        show_default=False,
    ),
]
Tiers = Annotated[
    str | None,
    typer.Option(
        help="For hispec: auto, or LAYERSxTOKENS of the draft exit and of a middle exit where there is one: "
        "2x3, 2x2/5x4; bench takes several, separated by commas. Default: auto, chosen for every round.",
        show_default=False,
    ),
]
FixedDraft = Annotated[
    bool,
    typer.Option("--fixed-draft", help="Draft --max-draft tokens every round, whether or not they pay."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy decoding; else 1e-30 to 1e30.")]
Seed = Annotated[int | None, typer.Option(help="Of the draws, 0 to 2^64 - 1; without one a seed is drawn.")]


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
    "Example: specdec generate '# A queue' --temperature 0.8 --frequency-penalty 0.3 --logprobs 3 --json"
)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; '-' or nothing reads it from stdin.")
    ] = None,
    model: Model = "gdn-code",
    method: Annotated[str, typer.Option(help=f"{_METHODS}.")] = "specla",
    drafter: Annotated[
        str | None, typer.Option(help=f"{_DRAFTERS}. {_DEFAULT_DRAFTER}", show_default=False)
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
            help=f"When drafts of self-speculative end. {_EXITS}. Default: {DRAFT_EXIT}.", show_default=False
        ),
    ] = None,
    draft_int8: DraftInt8 = None,
    tiers: Tiers = None,
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
            help=f"Comma-separated. {_METHODS}; reference: the model in plain PyTorch, token by token."
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
        typer.Option(help=f"Comma-separated. {_DRAFTERS}. {_DEFAULT_DRAFTER}", show_default=False),
    ] = None,
    oracle_p: OracleP = 1.0,
    draft_tree: DraftTree = None,
    acceptance: Annotated[
        str,
        typer.Option(
            help=f"Comma-separated rules for drafts that are drawn at random (temperature above 0). {_RULES}."
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
            help=f"Comma-separated; when drafts of self-speculative end. {_EXITS}. Default: {DRAFT_EXIT}.",
            show_default=False,
        ),
    ] = None,
    draft_int8: DraftInt8 = None,
    tiers: Tiers = None,
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
            "drafts end. Of the other options it takes --quick, --out, --json, --model, --prompts, --dtype, "
            "specla --drafter (those to compare), self-speculative --skip.",
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
        commit=commit.value,
        json=json,
        plot=plot,
    )
    raise typer.Exit(command.run(options))


@app.command(
    epilog="Example: specdec tune --model gdn-code --text ~/src --out skip.json\n\n"
    "Example: specdec tune --kernels"
)
def tune(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="Search the sub-layers that this model's drafts leave out, for --method self-speculative; a "
            "name, directory or file as elsewhere.",
            show_default=False,
        ),
    ] = None,
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
            help="With --model: the file of the set, JSON. The search is kept beside it, ending in .study.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    draft_int8: Annotated[
        bool,
        typer.Option(
            "--draft-int8",
            help="With --model: a set for drafts with int8 copies of the weights, which its file then asks "
            "for.",
        ),
    ] = False,
    trials: Annotated[int, typer.Option(help="With --model: most sets that are tried.")] = 2000,
    resume: Annotated[bool, typer.Option("--resume", help="With --model: go on with a search.")] = False,
    warm_start_only: Annotated[
        bool,
        typer.Option(
            "--warm-start-only",
            help="With --model: take the best of what the similarity of hidden states proposes, and do not "
            "search.",
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="With --model: write all trials and figures here.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="With --model: draw the sets and the search here (PNG, SVG or PDF).", show_default=False
        ),
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Measure which verification strategy is fastest at which shape.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Time to measure or to search for, about.", show_default="840 with --model, else 120"
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


@app.command(
    name="train-drafter",
    epilog="Example: specdec train-drafter --target gdn-code --text ~/src --out my-drafter --tokens 4000000",
)
def train_drafter(
    out: Annotated[Path, typer.Option(help="Directory of the run; it becomes a drafter's directory.")],
    target: Annotated[
        str | None, typer.Option(help="The model to draft for: as --model elsewhere.", show_default=False)
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Folder of UTF-8 text files, searched recursively.", show_default=False),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="What the drafter reads off the target, comma-separated: last (its last hidden state), "
            "fused (hidden states of a low, a middle and the last layer), readouts (recurrent read-outs of "
            "these layers), hidden:N, readout:N; or none.",
            show_default=defaults.FEATURES,
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to train on in all.", show_default="one pass over the text")
    ] = None,
    text_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of the text that the target reads.", show_default="all"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences in a step.", show_default=str(defaults.BATCH_SIZE))
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence.", show_default=str(defaults.SEQ_LEN))
    ] = None,
    unroll: Annotated[
        int | None,
        typer.Option(
            help="Positions of a drafted chain that are trained.", show_default=str(defaults.UNROLL)
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default=str(defaults.LR))
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Draft only the N most frequent tokens of the text.", show_default="all tokens"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights and data order.", show_default=str(defaults.SEED))
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the target's features, which runs can share.", show_default="OUT/features"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train a drafter on what a target computes on a text. Ctrl-C saves and ends; --resume goes on."""
    options = {
        "target": target,
        "text": text,
        "features": features,
        "tokens": tokens,
        "text_tokens": text_tokens,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "unroll": unroll,
        "lr": lr,
        "draft_vocab": draft_vocab,
        "seed": seed,
        "cache": cache,
    }
    given = {name: value for name, value in options.items() if value is not None}
    from specdec.cli import train_drafter as command

    if resume:
        command.resume(out, given)
    else:
        command.run(out, given)


@app.command(
    name="train-exits",
    epilog="Example: specdec train-exits --model smollm2 --text ~/src --exits 4,8 --out my-exits "
    "--text-tokens 1000000",
)
def train_exits(
    out: Annotated[Path, typer.Option(help="Directory of the run; it becomes a directory of adapters.")],
    model: Annotated[
        str | None, typer.Option(help="The model to exit from: as --model elsewhere.", show_default=False)
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Folder of UTF-8 text files, searched recursively.", show_default=False),
    ] = None,
    exits: Annotated[
        str | None,
        typer.Option(help="Numbers of layers after which to exit, such as 2,5.", show_default=False),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(help="Inner width of an adapter.", show_default="twice the width of the model"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to train on in all.", show_default="one pass over the text")
    ] = None,
    text_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of the text that the model reads.", show_default="all"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences in a step.", show_default=str(defaults.BATCH_SIZE))
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence.", show_default=str(defaults.SEQ_LEN))
    ] = None,
    loss_vocab: Annotated[
        int | None,
        typer.Option(
            help="Tokens over which a step compares distributions: the text's most frequent ones, and a "
            "quarter drawn among the others.",
            show_default=str(defaults.LOSS_VOCAB),
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default=str(defaults.EXIT_LR))
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights and data order.", show_default=str(defaults.SEED))
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the model's hidden states, which runs can share.", show_default="OUT/features"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train adapters behind early exits of a frozen model. Ctrl-C saves and ends; --resume goes on."""
    options = {
        "model": model,
        "text": text,
        "exits": exits,
        "width": width,
        "tokens": tokens,
        "text_tokens": text_tokens,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "loss_vocab": loss_vocab,
        "lr": lr,
        "seed": seed,
        "cache": cache,
    }
    given = {name: value for name, value in options.items() if value is not None}
    from specdec.cli import train_exits as command

    if resume:
        command.resume(out, given)
    else:
        command.run(out, given)


@app.command(epilog="Example: specdec info")
def info() -> None:
    """Print version, torch, instruction set and what is built."""
    from specdec.cli import info as command

    command.run()
