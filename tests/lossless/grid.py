"""The random numbers of many seeds at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.acceptance.rng import Stream

# Philox4x32-10, see specdec.acceptance.rng.
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


def uniform_grid(
    seed: int | NDArray[np.integer],
    position: int | NDArray[np.integer],
    stream: Stream,
    draw: int | NDArray[np.integer] = 0,
) -> NDArray[np.float64]:
    """`uniform` elementwise over arrays of seeds, positions and draws, broadcast against each other."""
    s, p, d = np.broadcast_arrays(
        np.asarray(seed, np.uint64), np.asarray(position, np.uint64), np.asarray(draw, np.uint64)
    )
    mask, half = np.uint64(_MASK32), np.uint64(32)
    c0, c1, c2, c3 = d >> np.uint64(1), np.full_like(d, int(stream)), p & mask, p >> half
    k0, k1 = s & mask, s >> half
    for _ in range(_ROUNDS):
        a, b = c0 * np.uint64(_M0), c2 * np.uint64(_M1)  # 32 x 32 bits: exact in 64
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & mask, (a >> half) ^ c3 ^ k1, a & mask
        k0 = (k0 + np.uint64(_W0)) & mask
        k1 = (k1 + np.uint64(_W1)) & mask
    odd = (d & np.uint64(1)).astype(bool)
    lo, hi = np.where(odd, c2, c0), np.where(odd, c3, c1)
    return np.asarray((hi << half | lo) >> np.uint64(11), np.float64) * 2.0**-53
