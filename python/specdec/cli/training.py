"""What the commands that train have in common: their console, and reading a model's features on a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from specdec.cli.progress import progress_bar
from specdec.training.features import FeatureCache
from specdec.training.running import interruptible

PLOT_NAME = "training.png"
EVERY = 400  # steps between two evaluations and saves


def plain_console() -> Console:
    """Of plain lines: a directory's name may hold what rich takes for markup."""
    return Console(highlight=False, soft_wrap=True, markup=False)


def computed(cache: FeatureCache, console: Console) -> bool:
    """Has the model compute what is missing, with a progress bar; False where Ctrl-C ended that early."""
    with interruptible() as asked, progress_bar() as progress:
        task = progress.add_task("what the model computes on the text", total=cache.missing_windows)
        done = cache.compute(lambda: bool(asked), lambda count: progress.advance(task, count))
    if not done:
        console.print("stopped while the model reads the text; the same command goes on")
    return done


def draw(plot: Callable[[Path], None], path: Path, console: Console) -> None:
    """Writes a run's curves, where there is what draws them."""
    try:
        plot(path)
        console.print(f"curves: {path}")
    except ImportError:
        console.print("no curves: matplotlib is not installed (pip install matplotlib)")
