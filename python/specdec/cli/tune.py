"""`specdec tune --kernels`: which verification strategy is fastest on this machine."""

from __future__ import annotations

from rich.console import Console

import specdec.ops.strategy as table
from specdec._checks import check_number
from specdec.cli.errors import as_option
from specdec.cli.progress import progress_bar
from specdec.ops import cpu_isa
from specdec.tuning import kernels

SHOWN = 20  # most changes listed


def run(seconds: float) -> None:
    """Measures for about `seconds`, writes the user's table and prints where it is and what it changed."""
    try:
        check_number("seconds", seconds, 0.0)
    except ValueError as error:
        raise as_option(error) from None
    points: list[table.Point] = []
    before: list[str] = []
    with progress_bar() as progress:
        task = progress.add_task("", total=None)

        def note(done: int, total: int, point: table.Point) -> None:
            points.append(point)
            before.append(_choice(point))  # the tables are read again only after the last point
            progress.update(task, completed=done, total=total, description=_shape(point))

        path = kernels.measure_strategies(progress=note, budget=seconds)
    changes = [
        f"  {_shape(point)}: {old} -> {new}  ({_times(point)})"
        for point, old, new in zip(points, before, map(_choice, points), strict=True)
        if old != new
    ]
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{path}: {len(points)} shapes for {cpu_isa()}, {len(changes)} with another choice than before"
    )
    for line in changes[:SHOWN]:
        console.print(line)
    if len(changes) > SHOWN:
        console.print(f"  and {len(changes) - SHOWN} more")


def _choice(point: table.Point) -> str:
    """What `auto` runs at a shape; only products of the sizes count."""
    choice: str = table.resolve("auto", cpu_isa(), point.rows, point.nodes, 1, point.state, 1, point.tree)
    return choice


def _shape(point: table.Point) -> str:
    kind = "tree" if point.tree else "chain"
    return f"{kind} of {point.nodes}, {point.rows} heads of {point.state} elements"


def _times(point: table.Point) -> str:
    return ", ".join(f"{name} {us:.0f} us" for name, us in point.us.items())
