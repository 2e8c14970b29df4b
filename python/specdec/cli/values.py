"""Values of options: lists, and files that a command will write."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def split_list(text: str, option: str) -> list[str]:
    """The distinct entries of a comma-separated list."""
    entries = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not entries:
        raise ValueError(f"{option}: got {text!r}, want at least one entry")
    return entries


def check_writable(option: str, path: Path | None) -> None:
    """What would only fail after a measurement is refused before it. Raises ValueError."""
    if path is not None:
        try:
            open_for_writing(path)
        except OSError as error:
            raise ValueError(f"{option}: cannot write {path} ({error.strerror})") from None


def check_plot(path: Path | None) -> None:
    """Refuses what `--plot` cannot draw. Raises ValueError."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot: needs matplotlib (the package's extra 'plot')")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot: got {path}, want a name that ends in .png, .svg or .pdf")
    check_writable("--plot", path)


def open_for_writing(path: Path) -> None:
    """Raises OSError where that fails; leaves no file where there was none and keeps what is in it."""
    path = path.resolve()  # of a link it is the target that is made and removed
    existed = path.exists()
    with path.open("ab"):
        pass
    if not existed:
        path.unlink()
