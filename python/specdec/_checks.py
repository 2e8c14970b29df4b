"""Checks of arguments: one ValueError that names the argument, what was given and what is wanted.

Comparisons alone do not do: True is an integer to Python, NaN is neither below nor above any bound, and a
float makes a fine length until something is indexed with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TypeGuard

_SHOWN = 80  # characters of a value that are worth reading
_MAX_LABEL = 256
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def shown(value: object) -> str:
    """`value` for an error message: short, on one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes out no integer of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuses what is no integer from `low` to `high`.

    Raises:
        ValueError: it is none.
    """
    if is_integer(value) and low <= value and (high is None or value <= high):
        return
    wanted = f"at least {low}" if high is None else f"from {low} to {high}"
    raise ValueError(f"{name}: got {shown(value)}, want an integer, {wanted}")


def check_number(
    name: str,
    value: object,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    other: str = "",
) -> None:
    """Refuses what is no finite int or float between the bounds that are given.

    Args:
        name: the argument.
        value: what was given.
        low: smallest value.
        high: largest value.
        above: value must be larger.
        below: value must be smaller.
        other: what the caller takes besides, for the error alone.

    Raises:
        ValueError: it is none.
    """
    if (
        is_number(value)
        and -math.inf < value < math.inf
        and (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
    ):
        return
    bounds = ((low, "of at least"), (above, "above"), (high, "at most"), (below, "below"))
    if low is not None and high is not None:
        wanted = f"a number from {low:g} to {high:g}"
    else:
        said = " and ".join(f"{words} {bound:g}" for bound, words in bounds if bound is not None)
        wanted = f"a {'finite ' if high is None and below is None else ''}number {said}"
    raise ValueError(f"{name}: got {shown(value)}, want {f'{other} or ' if other else ''}{wanted}")


def check_boolean(name: str, value: object) -> None:
    """Refuses what is neither True nor False.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {shown(value)}, want true or false")


def check_label(name: str, value: object) -> None:
    """Refuses what is no short line of text, such as a model's name.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_LABEL or not value.isprintable():
        raise ValueError(f"{name}: got {shown(value)}, want 1 to {_MAX_LABEL} printable characters")


def check_sha256(name: str, value: object) -> None:
    """Refuses what is no SHA-256 in 64 hexadecimal digits, lower case.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{name}: got {shown(value)}, want 64 hexadecimal digits")


def check_keys(where: str, values: Mapping[str, object], wanted: Collection[str]) -> None:
    """Refuses an object of a file whose keys are not `wanted`.

    Raises:
        ValueError: keys are missing or unknown.
    """
    missing = [key for key in wanted if key not in values]
    unknown = [key for key in values if key not in wanted]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} missing, want {', '.join(wanted)}")
    if unknown:
        raise ValueError(f"{where}: {shown(unknown)} unknown, want {', '.join(wanted)}")
