"""`specdec train-drafter`: a drafter for a target, from a folder of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from specdec.cli.errors import as_option
from specdec.cli.training import EVERY, PLOT_NAME, computed, draw, plain_console
from specdec.training.drafter_loop import DrafterTraining
from specdec.training.drafter_run import TrainingRequest, plot, prepare
from specdec.training.running import check_only_resume, run_with_progress


def run(out: Path, given: Mapping[str, Any]) -> None:
    """Begins a run in `out` and trains to its end, or until Ctrl-C; `given` are options by name."""
    for name in ("target", "text"):
        if name not in given:
            raise ValueError(f"--{name} is missing, or --resume to go on with a run")
    console = plain_console()
    try:
        with console.status("target and text"):
            cache, begin = prepare(TrainingRequest(out=out, **given), console.print)
    except ValueError as error:
        raise as_option(error) from None
    if computed(cache, console):
        _train(begin(), console)


def resume(out: Path, given: Mapping[str, Any]) -> None:
    """Goes on with the run in `out`; nothing else may be given."""
    check_only_resume(given)
    _train(DrafterTraining.resume(out), plain_console())


def _train(training: DrafterTraining, console: Console) -> None:
    def held_out() -> str:
        if not training.history.held_out:
            return "-"
        return " ".join(f"{chance:.2f}" for chance in training.history.held_out[-1][1]["match"])

    finished = run_with_progress(training, console, held_out, every=EVERY)
    out = training.out
    if not finished:
        console.print(f"stopped at step {training.step} of {training.steps}; go on with --out {out} --resume")
        return
    figures = training.history.held_out[-1][1]
    console.print(
        f"held-out text: positions of a chain right, given those before: {held_out()}; "
        f"mean accepted length {figures['mean_accepted_length']:.2f}"
    )
    draw(lambda path: plot(training, path), out / PLOT_NAME, console)
    target = training.target.directory
    console.print(f'try it: specdec generate "def " --model {target} --drafter adapted:{out}')
