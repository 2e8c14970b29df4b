"""Checks of arguments: one ValueError that names the argument, what was given and what is wanted.

Comparisons alone do not do: True is an integer to Python, NaN is neither below nor above any bound, and a
float makes a fine length until something is indexed with it.
"""

from __future__ import annotations

import math
from typing import TypeGuard

_SHOWN = 80  # characters of a value that are worth reading


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


def check_number(name: str, value: object, low: float, high: float, wanted: str | None = None) -> None:
    """Refuses what is no int or float from `low` to `high`.

    Args:
        name: the argument.
        value: what was given.
        low: smallest value.
        high: largest value; infinity for any finite one.
        wanted: how the error says what is wanted, where `low` and `high` are not all of it.

    Raises:
        ValueError: it is none.
    """
    if is_number(value) and low <= value <= high and value < math.inf:
        return
    if wanted is None:
        wanted = f"a number from {low:g} to {high:g}"
        if high == math.inf:
            wanted = f"a finite number, at least {low:g}"
    raise ValueError(f"{name}: got {shown(value)}, want {wanted}")
