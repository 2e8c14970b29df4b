"""Values of options: lists, and files that a command will write."""

from __future__ import annotations

from pathlib import Path


def split_list(text: str, option: str) -> list[str]:
    """The distinct entries of a comma-separated list."""
    entries = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not entries:
        raise ValueError(f"{option}: got {text!r}, want at least one entry")
    return entries


def open_for_writing(path: Path) -> None:
    """Raises OSError where that fails; leaves no file where there was none and keeps what is in it."""
    path = path.resolve()  # of a link it is the target that is made and removed
    existed = path.exists()
    with path.open("ab"):
        pass
    if not existed:
        path.unlink()
