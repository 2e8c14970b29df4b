"""`python -m specdec.training.pretrain`: a Gated DeltaNet language model from a folder of text."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec._checks import shown
from specdec.cli.errors import as_option
from specdec.models.checkpoint import load_config, resolve_model
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.tokenizer import TOKENIZER_NAME, Tokenizer
from specdec.training.corpus import END_OF_TEXT, TOKENS_NAME, train_tokenizer, write_tokens
from specdec.training.loop import History, Training, TrainingOptions
from specdec.training.running import check_only_resume, check_unused, run_with_progress

PLOT_NAME = "loss.png"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    epilog="Example: `python -m specdec.training.pretrain --text ~/src --out my-model --tokens 2000000`, "
    'then `specdec generate "def " --model my-model`.'
)
def pretrain(
    out: Annotated[Path, typer.Option(help="Directory of the run; it becomes a model directory.")],
    text: Annotated[
        Path | None, typer.Option(help="Folder of UTF-8 text files, searched recursively.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json of the model.", show_default="that of gdn-code")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory of a tokenizer.json to use.", show_default="one is trained on the text"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to train on in all.", show_default="one pass over the text")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences in a step.", show_default="16")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence.", show_default="256")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default="0.002")] = None,
    layer_dropout: Annotated[
        float | None,
        typer.Option(help="Probability to skip the last layer; less for earlier ones.", show_default="0.15"),
    ] = None,
    exit_layers: Annotated[
        str | None,
        typer.Option(
            help="Layers after which the head learns to predict too, as in 2,5, or none.",
            show_default="those of the config",
        ),
    ] = None,
    exit_weight: Annotated[
        float | None, typer.Option(help="Weight of the early-exit losses.", show_default="0.3")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights, data order and dropped layers.", show_default="0")
    ] = None,
    device: Annotated[str | None, typer.Option(help="torch device.", show_default="cpu")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train a Gated DeltaNet language model from a folder of text.

    Ctrl-C saves and ends; `--resume` then gives the same weights, bit for bit, as a run without a break.
    """
    console = Console(markup=False)
    settings = {
        "tokens": tokens,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "lr": lr,
        "layer_dropout": layer_dropout,
        "exit_weight": exit_weight,
        "seed": seed,
        "device": device,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    paths = {"text": text, "config": config, "tokenizer": tokenizer, "exit_layers": exit_layers}
    try:
        if resume:
            check_only_resume([*given, *(name for name, value in paths.items() if value is not None)])
            run = Training.resume(out)
        else:
            run = prepare(out, text, config, tokenizer, exit_layers, given, console)
        finished = run_with_progress(run, console, lambda: _held_out(run.history))
    except (ValueError, OSError, RuntimeError) as error:
        shown_error = as_option(error) if isinstance(error, ValueError) else error
        message = " ".join(str(shown_error).split())
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(2) from None
    _report(run, finished, console)


def prepare(
    out: Path,
    text: Path | None,
    config: Path | None,
    tokenizer: Path | None,
    exit_layers: str | None,
    given: dict[str, Any],
    console: Console,
) -> Training:
    """Tokenizer, token file and a fresh run in `out`. Raises ValueError for bad arguments and an `out` in
    use.
    """
    if text is None:
        raise ValueError("--text is missing (a folder of text files), or --resume to go on with a run")
    if not text.is_dir():
        raise ValueError(f"--text: {str(text)!r} is not a folder")
    check_unused(out)
    base = load_config(resolve_model("gdn-code")) if config is None else GatedDeltaNetConfig.from_file(config)
    base = dataclasses.replace(base, early_exit_layers=_exits(exit_layers, base))
    TrainingOptions(base, **{"tokens": 1, **given})  # refused before the text is read
    seed = given.get("seed", 0)

    with console.status("tokenizer"):
        if tokenizer is None:
            backend = train_tokenizer(text, base.vocab_size, seed)
        else:
            backend = Tokenizer.from_directory(tokenizer, None).backend
    end = backend.token_to_id(END_OF_TEXT)
    if end is None:
        raise ValueError(f"--tokenizer: has no {END_OF_TEXT} token")
    size = backend.get_vocab_size(with_added_tokens=True)
    model_config = dataclasses.replace(base, vocab_size=size, bos_token_id=end, eos_token_ids=(end,))
    out.mkdir(parents=True, exist_ok=True)
    backend.save(str(out / TOKENIZER_NAME))
    with console.status("tokens"):
        total = write_tokens(text, backend, out / TOKENS_NAME, seed)
    console.print(f"{total:,} tokens, vocabulary of {size:,}, {model_config.num_parameters:,} parameters")
    options = TrainingOptions(model_config, **{"tokens": 1, **given})
    run = Training(out, options)
    if "tokens" not in given:
        run = Training(out, dataclasses.replace(options, tokens=run.windows.training_tokens))
    return run


def _exits(text: str | None, config: GatedDeltaNetConfig) -> tuple[int, ...]:
    """`--exit-layers` as layer numbers."""
    if text is None:
        return config.early_exit_layers
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--exit-layers: got {shown(text)}, want layer numbers such as 2,5, or none"
        ) from None


def _held_out(history: History) -> str:
    """The newest held-out loss of the last layer."""
    if not history.held_out:
        return "-"
    return f"{list(history.held_out[-1][1].values())[-1]:.3f}"


def _report(run: Training, finished: bool, console: Console) -> None:
    """Final figures, the plot, and what to type next."""
    if not finished:
        console.print(
            f"stopped at step {run.step} of {run.options.steps}; go on with --out {run.out} --resume"
        )
        return
    losses = run.history.held_out[-1][1]
    console.print(
        "held-out loss, nats a token: " + ", ".join(f"{k} layers {v:.3f}" for k, v in losses.items())
    )
    try:
        plot_losses(run.history, run.out / PLOT_NAME)
        console.print(f"loss curve: {run.out / PLOT_NAME}")
    except ImportError:
        console.print("no loss curve: matplotlib is not installed (pip install matplotlib)")
    console.print(f'try it: specdec generate "def " --model {run.out}', highlight=False)


def plot_losses(history: History, path: Path) -> None:
    """Write training and held-out losses over steps as a PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        *zip(*history.training, strict=True), linewidth=0.6, alpha=0.6, label="training, layers dropped"
    )
    for depth in history.held_out[-1][1]:
        points = [(step, losses[depth]) for step, losses in history.held_out]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"held out, {depth} layers")
    axes.set_xlabel("step")
    axes.set_ylabel("nats a token")
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    app()
