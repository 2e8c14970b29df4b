"""What the trainings of models and drafters share: the loop around the steps, the files of a run's directory,
Ctrl-C, the progress line.
"""

from __future__ import annotations

import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from torch import Tensor

from specdec.models.checkpoint import open_weights, write_json, write_tensors
from specdec.models.config import read_json_object
from specdec.training.optimization import Optimization

STATE_NAME = "training.safetensors"
HISTORY_NAME = "losses.json"

_MAX_HISTORY_BYTES = 1 << 28


class RunOptions(Protocol):
    """What a run asks of the options that define it."""

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""

    @property
    def batch_size(self) -> int:
        """Windows in a step."""

    @property
    def seq_len(self) -> int:
        """Tokens in a window."""


class RunHistory(Protocol):
    """What a run asks of its history."""

    @property
    def training(self) -> list[tuple[int, float]]:
        """Steps with their losses, oldest first."""

    @property
    def held_out(self) -> Sequence[tuple[int, object]]:
        """Steps with the figures on held-out text, oldest first."""


class Run(ABC):
    """A training run that can be saved after any step.

    Attributes:
        out: directory of the run.
        options: what defines the run.
        history: how it went so far.
        step: steps done so far.
    """

    out: Path
    options: RunOptions
    history: RunHistory
    step: int
    _optimization: Optimization

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.options.steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step's batch."""
        return self.options.batch_size * self.options.seq_len

    @property
    def evaluated(self) -> int | None:
        """The step of the newest evaluation."""
        return self.history.held_out[-1][0] if self.history.held_out else None

    @abstractmethod
    def train_step(self) -> float:
        """One optimiser step; returns its loss in nats a token. Raises ValueError where it diverged."""

    @abstractmethod
    def evaluate(self) -> object:
        """Measure on held-out text and note it in the history."""

    @abstractmethod
    def save(self) -> None:
        """Write what a resumed run needs, the history and the result so far."""

    def _update(self, total: Tensor, shown: Tensor) -> float:
        """Ends a step with the gradient of `total`; books and returns the loss `shown`."""
        self._optimization.update(total, self.step)
        loss = float(shown.detach())
        self.history.training.append((self.step, loss))
        self.step += 1
        return loss

    def _save_state(
        self,
        options: str,
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Writes the history and the state to resume from.

        Args:
            options: the run's, as text.
            tensors: beside those of the optimisation.
            notes: metadata beside the options and the step.
        """
        metadata = {"options": options, "step": str(self.step), **notes}
        # The history first: `resume` drops what is newer than the state, but could not fill a gap.
        history = {"training": self.history.training, "held_out": self.history.held_out}
        write_json(self.out / HISTORY_NAME, history)
        write_tensors(self.out / STATE_NAME, {**self._optimization.state(), **tensors}, metadata)

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[float], None] = lambda loss: None,
        *,
        every: int = 200,
    ) -> bool:
        """Train to the end or until `should_stop`, then save.

        Args:
            should_stop: asked before every step.
            on_step: called with the loss after every step.
            every: steps between two evaluations and saves.

        Returns:
            True where the run is complete.
        """
        while self.step < self.steps and not should_stop():
            on_step(self.train_step())
            if self.step % every == 0 and self.step < self.steps:
                self.evaluate()
                self.save()
        finished = self.step >= self.steps
        if finished and self.evaluated != self.step:
            self.evaluate()
        self.save()
        return finished


def check_unused(out: Path) -> None:
    """Raise ValueError where the directory `out` holds a run, which a new one would replace."""
    if (out / STATE_NAME).exists():
        raise ValueError(f"out: {str(out)!r} holds a run already; add --resume or name another directory")


def check_only_resume(given: Iterable[str]) -> None:
    """Raise ValueError for the first of the options `given`, by parameter name, beside --resume."""
    for name in given:
        option = name.replace("_", "-")
        raise ValueError(f"--{option}: not with --resume, which takes everything from the saved run")


@contextlib.contextmanager
def saved_state(out: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """The open state file of the run in `out`, and its metadata.

    Raises:
        ValueError: there is none, or what the block reads of it is not as a run wrote it.
    """
    path = out / STATE_NAME
    if not path.is_file():
        raise ValueError(f"{out}: has no {STATE_NAME} to resume from")
    with open_weights(path) as file:
        try:
            yield file, file.metadata() or {}
        except (
            AttributeError,
            KeyError,
            OSError,
            RuntimeError,
            TypeError,
            ValueError,
            SafetensorError,
        ) as error:
            raise ValueError(f"{path}: not the state of a run ({error})") from None


def saved_history(out: Path, step: int) -> tuple[list[Any], list[Any]]:
    """Training losses and held-out figures in `out` as they were when `step` steps were done."""
    saved = read_json_object(out / HISTORY_NAME, _MAX_HISTORY_BYTES)
    return [(s, x) for s, x in saved["training"] if s < step], [
        (s, x) for s, x in saved["held_out"] if s <= step
    ]


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
    """Ctrl-C sets a flag, so that a step is never cut in half; a second Ctrl-C ends the program at once."""
    asked: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)


def run_with_progress(run: Run, console: Console, held_out: Callable[[], str], *, every: int = 200) -> bool:
    """Run with a progress line; True where the run is complete.

    Args:
        run: to be run.
        console: where the line is.
        held_out: the newest figures on held-out text, in a few words.
        every: steps between two evaluations and saves.
    """
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("loss {task.fields[loss]:.3f}  held-out {task.fields[held_out]}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    first, start = run.step, time.perf_counter()
    smooth: float | None = None
    with interruptible() as asked, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=run.steps, completed=run.step, loss=0.0, held_out="-", speed=0.0)

        def on_step(loss: float) -> None:
            nonlocal smooth
            smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
            speed = (run.step - first) * run.tokens_per_step / (time.perf_counter() - start)
            progress.update(task, completed=run.step, loss=smooth, speed=speed, held_out=held_out())

        return run.run(lambda: bool(asked), on_step, every=every)
