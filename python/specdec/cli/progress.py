"""The progress bar of the commands that measure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specdec.cli.errors import note


@contextmanager
def unit_progress(units: int, steps: int) -> Iterator[Callable[[str], None]]:
    """Shows on stderr how many of `units` are done: a bar on a terminal, elsewhere a line for each.

    A unit has `steps` steps. Yields a function to call with a description of the unit after every step.
    """
    start, done = perf_counter(), 0
    with progress_bar() as progress:
        task = progress.add_task("", total=units * steps)

        def advance(description: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, advance=1, description=description)
            if progress.disable and done % steps == 0:
                note(f"{done // steps} of {units} measured, {perf_counter() - start:.0f} s: {description}")

        yield advance


def progress_bar() -> Progress:
    """A bar on stderr that is gone when done, and silent where stderr is no terminal."""
    console = Console(file=sys.stderr)  # stdout where stderr is closed
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),  # it names directories
        console=console,
        transient=True,
        disable=sys.stderr is None or not console.is_terminal,
    )
