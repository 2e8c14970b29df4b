"""The command line: `specdec generate | bench | train-drafter | tune | info`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits the process.

    Args:
        argv: arguments without the program's name; None takes the process's own.
    """
    from specdec.cli.app import app

    app(args=None if argv is None else list(argv), prog_name="specdec")
