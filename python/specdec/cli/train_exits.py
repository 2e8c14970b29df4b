"""`specdec train-exits`: adapters that let a model exit early, from a folder of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.cli.errors import as_option
from specdec.cli.training import EVERY, PLOT_NAME, computed, draw, plain_console
from specdec.training.exit_loop import ExitTraining
from specdec.training.exit_run import ExitRequest, plot, prepare
from specdec.training.running import check_only_resume, run_with_progress


def run(out: Path, given: Mapping[str, Any]) -> None:
    """Begins a run in `out` and trains to its end, or until Ctrl-C; `given` are options by name."""
    for name in ("model", "text", "exits"):
        if name not in given:
            raise ValueError(f"--{name} is missing, or --resume to go on with a run")
    console = plain_console()
    try:
        with console.status("model and text"):
            cache, begin = prepare(ExitRequest(out=out, **given), console.print)
    except ValueError as error:
        raise as_option(error) from None
    if computed(cache, console):
        with console.status("the exits without adapters"):
            training = begin()
        _train(training, console)


def resume(out: Path, given: Mapping[str, Any]) -> None:
    """Goes on with the run in `out`; nothing else may be given."""
    check_only_resume(given)
    _train(ExitTraining.resume(out), plain_console())


def _train(training: ExitTraining, console: Console) -> None:
    def held_out() -> str:
        newest = training.history.held_out[-1][1]
        return " ".join(f"{exit}: {figures['agreement']:.3f}" for exit, figures in newest.items())

    finished = run_with_progress(training, console, held_out, every=EVERY)
    out = training.out
    if not finished:
        console.print(f"stopped at step {training.step} of {training.steps}; go on with --out {out} --resume")
        return
    console.print("held-out text: share of tokens where an exit's likeliest token is the last layer's")
    for exit, share in training.measured()["held_out_agreement"].items():
        console.print(
            f"  after {exit} layers: {share['without']:.3f} without adapter, {share['with']:.3f} with it"
        )
    draw(lambda path: plot(training, path), out / PLOT_NAME, console)
