"""Counter-based random numbers: a sequence's randomness depends on its seed and token positions alone.

Every uniform is a pure function of (seed, position, stream, draw), so neither batch neighbours nor the split
of the text into rounds can disturb a sequence. The definition, to the bit, for every implementation in any
language:

1. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with
   the multipliers 0xD2511F53 and 0xCD9E8D57 and the key increments 0x9E3779B9 and 0xBB67AE85.
2. key = (seed mod 2^32, seed div 2^32) with 0 <= seed < 2^64.
3. counter = (draw div 2, stream, position mod 2^32, position div 2^32) with 0 <= draw < 2^33
   and 0 <= position < 2^64.
4. Of the four output words w0..w3, draw uses the pair (lo, hi) = (w0, w1) for an even draw and (w2, w3) for
   an odd one.
5. u = ((hi * 2^32 + lo) div 2^11) * 2^-53, a float64 in [0, 1).

`position` counts the tokens of the sequence from 0, the prompt included. ACCEPT and SAMPLE take that of the
token which the number helps to choose: it is decided once. The others take that of the first token that the
round emits, which no other round has: their numbers may have influenced an outcome although the round ended
before the tokens they speak of. Each stream serves one purpose, so no number is used twice.

    ACCEPT   draw = rank of the sibling that is tested
    SAMPLE   draw = 0
    DRAFT    draw = node * 2^8 + k      the k-th independent child of a node
    ROUND    draw = node                whether the walk ends at the node
    RACE     draw = node * 2^21 + x     when token x arrives in the race for the children of a node
    TIERS    words w0, w1 of draw 0     the seed of all that the tiers below the target draw in a round
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


class Stream(IntEnum):
    """What a random number is for; numbers of different streams are independent."""

    ACCEPT = 0  # the acceptance test of a drafted token
    SAMPLE = 1  # the token drawn from the target: residual, bonus, plain decoding
    DRAFT = 2  # a drafter's independent draws, by the position of the round
    ROUND = 3  # tests of rules that look past the first rejection, by the position of the round
    RACE = 4  # a drafter's draws without replacement, by the position of the round
    TIERS = 5  # seeds of rounds within a round, by the position of the round


DRAFT_CHILD_BITS = 8
"""A number of DRAFT has draw = node * 2^8 + child."""
RACE_TOKEN_BITS = 21
"""A number of RACE has draw = node * 2^21 + token."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter: four 32-bit words from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK32, (a >> 32) ^ c3 ^ k1, a & _MASK32
        k0 = (k0 + _W0) & _MASK32
        k1 = (k1 + _W1) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: Stream, draw: int = 0) -> float:
    """One float64 in [0, 1); the definition is the module's docstring.

    >>> uniform(0, 0, Stream.ACCEPT)
    0.8805201978886142
    """
    words = philox4x32(
        (draw >> 1, int(stream), position & _MASK32, position >> 32), (seed & _MASK32, seed >> 32)
    )
    lo, hi = words[2:] if draw & 1 else words[:2]
    return float((hi << 32 | lo) >> 11) * 2.0**-53


def round_seed(seed: int, position: int) -> int:
    """The seed of a round's own rounds, in which a drafter's drafts pass a verifier before the target sees
    them. Tokens that the target then rejects have been looked at, so their numbers may not come again: every
    round has a seed of its own, by the position of its first token.
    """
    words = philox4x32(
        (0, int(Stream.TIERS), position & _MASK32, position >> 32), (seed & _MASK32, seed >> 32)
    )
    return words[1] << 32 | words[0]


def resolve_seed(seed: int | None) -> int:
    """The given seed, or for None a fresh one from the operating system (63 bits, so that it fits an int64).

    Call it once when a sequence is admitted and report the result: with it the run can be repeated.
    """
    return secrets.randbits(63) if seed is None else seed


def categorical(weights: NDArray[np.floating], u: float) -> int:
    """Draw index i with probability `weights[i] / sum(weights)`: the cumulative sum inverted at one uniform.

    Exactly: `c[i] = c[i-1] + float64(weights[i])` in index order, `total = c[V-1]`; the result is the first i
    with `c[i] > u * total`. As 0 <= u < 1 such an index exists and its weight is positive.

    Args:
        weights: [V], non-negative, any float dtype; they need not sum to one.
        u: one uniform in [0, 1).

    Raises:
        ValueError: the weights have no positive finite sum (for instance a NaN among the logits).
    """
    cdf = np.cumsum(weights, dtype=np.float64)
    total = float(cdf[-1])
    if not 0.0 < total < float("inf"):
        raise ValueError(f"categorical: weights must have a positive finite sum, got {total}")
    return int(cdf.searchsorted(u * total, side="right"))
