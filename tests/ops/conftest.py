"""Fresh memory is poisoned in every operator test, so that an output that was never written shows; the
executor's block order is that of a seed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

import pytest

from ops.backends import SIMT_LIBRARY, simt_library

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


@pytest.fixture(autouse=True)
def block_order() -> None:
    """SPECDEC_SIMT_SEED, or 0, for the first call of the test; every call counts it up."""
    if SIMT_LIBRARY.exists():
        simt_library().specdec_simt_seed(ctypes.c_uint64(int(os.environ.get("SPECDEC_SIMT_SEED", "0"))))
