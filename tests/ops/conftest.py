"""Fresh memory is poisoned in every operator test, so that an output that was never written shows."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest

_M_PERTURB = -6  # glibc: malloc fills what it hands out with the complement of the given byte


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """float32 0x7f7f7f7f is 3.4e38, bfloat16 and float16 are as large or NaN."""
    if not sys.platform.startswith("linux"):
        yield
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, 0x80)
    yield
    mallopt(_M_PERTURB, 0)
