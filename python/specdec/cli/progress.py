"""The progress bar of the commands that measure."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bar() -> Progress:
    """A bar on stderr that is gone when done, and silent where stderr is no terminal."""
    console = Console(file=sys.stderr)  # stdout where stderr is closed
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=sys.stderr is None or not console.is_terminal,
    )
