"""The commands that train, and their options. Nothing here imports torch.

A parameter's default is None where the run has its own: what was not given must not reach `--resume`, which
goes on with the options of the run.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from specdec.training import defaults

Out = Annotated[Path, typer.Option(help="Directory of the run and of what it trains.")]
Text = Annotated[
    Path | None,
    typer.Option(help="Folder of UTF-8 text files, searched recursively.", show_default=False),
]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens to train on in all.", show_default="one pass over the text")
]
TextTokens = Annotated[
    int | None, typer.Option(help="Most tokens of the text that the model reads.", show_default="all")
]
BatchSize = Annotated[
    int | None, typer.Option(help="Sequences in a step.", show_default=str(defaults.BATCH_SIZE))
]
SeqLen = Annotated[int | None, typer.Option(help="Tokens in a sequence.", show_default=str(defaults.SEQ_LEN))]
Seed = Annotated[int | None, typer.Option(help="Of weights and data order.", show_default=str(defaults.SEED))]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Directory for what the model computes on the text, which runs can share.",
        show_default="OUT/features",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]


def _start(command: ModuleType, out: Path, options: dict[str, object], resume: bool) -> None:
    """Begins a run, or goes on with it, with the options that were given."""
    given = {name: value for name, value in options.items() if value is not None}
    if resume:
        command.resume(out, given)
    else:
        command.run(out, given)


def train_drafter(
    out: Out,
    target: Annotated[
        str | None, typer.Option(help="The model to draft for: as --model elsewhere.", show_default=False)
    ] = None,
    text: Text = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="What the drafter reads off the target, comma-separated: last (its last hidden state), "
            "fused (hidden states of a low, a middle and the last layer), readouts (recurrent read-outs of "
            "these layers), hidden:N, readout:N; or none.",
            show_default=defaults.FEATURES,
        ),
    ] = None,
    tokens: Tokens = None,
    text_tokens: TextTokens = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
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
    seed: Seed = None,
    cache: Cache = None,
    resume: Resume = False,
) -> None:
    """Train a drafter on what a target computes on a text. Ctrl-C saves and ends; --resume goes on."""
    options: dict[str, object] = {
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
    from specdec.cli import train_drafter as command

    _start(command, out, options, resume)


def train_exits(
    out: Out,
    model: Annotated[
        str | None, typer.Option(help="The model to exit from: as --model elsewhere.", show_default=False)
    ] = None,
    text: Text = None,
    exits: Annotated[
        str | None,
        typer.Option(help="Numbers of layers after which to exit, such as 2,5.", show_default=False),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(help="Inner width of an adapter.", show_default="twice the width of the model"),
    ] = None,
    tokens: Tokens = None,
    text_tokens: TextTokens = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
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
    seed: Seed = None,
    cache: Cache = None,
    resume: Resume = False,
) -> None:
    """Train adapters behind early exits of a frozen model. Ctrl-C saves and ends; --resume goes on."""
    options: dict[str, object] = {
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
    from specdec.cli import train_exits as command

    _start(command, out, options, resume)
