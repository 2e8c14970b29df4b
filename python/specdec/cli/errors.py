"""One line on stderr and an exit code, whatever went wrong."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 1  # as typer has it where a command meets one while writing
MAX_LINE = 400

# typer brings its own copy of click in newer versions, so its exceptions are found through typer's.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class CommandGroup(TyperGroup):
    """Commands whose errors are one line and exit 2, without tracebacks."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command and exits the process."""
        kwargs["standalone_mode"] = False
        sys.exit(_guarded(lambda: TyperGroup.main(self, *args, **kwargs)))


def _guarded(command: Callable[[], Any]) -> int:
    if sys.stdout is None:  # started with it closed
        return _fail("stdout is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 must not end the text
    try:
        code = command()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except _ClickException as error:
        return _fail(error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return BROKEN_PIPE
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if os.environ.get("SPECDEC_TRACEBACK"):
            raise
        return _fail(str(error) or type(error).__name__)


def _fail(message: str) -> int:
    line = " ".join(message.split())
    if len(line) > MAX_LINE:
        line = line[:MAX_LINE] + "..."
    note(f"error: {line}")
    return USAGE


def note(message: str) -> None:
    """One line on stderr."""
    if sys.stderr is not None:  # None where it was closed from the start; print would take stdout
        print(f"specdec: {message}", file=sys.stderr)


def _close_stdout() -> None:
    """Nobody reads stdout any more: what the interpreter flushes at its end goes nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def as_option(error: ValueError) -> ValueError:
    """The error of a library argument, `top_p: got ...`, as that of its option, `--top-p: got ...`."""
    text = str(error)
    return ValueError(re.sub(r"^([a-z_]+)(?=(\[\d+\])?: )", lambda m: f"--{m[1].replace('_', '-')}", text))
