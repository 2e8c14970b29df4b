"""What a drafter draws, in float64: the twin of `ops.draw_tokens`, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from specdec.acceptance.decisions import Row
from specdec.acceptance.rng import DRAFT_CHILD_BITS, RACE_TOKEN_BITS, Stream, categorical


def draw_tokens(
    q: Row, count: int, node: int, number: Callable[[Stream, int], float], *, replacement: bool
) -> list[int]:
    """Tokens of one row, in the order of siblings.

    Independent draws invert the cumulative sum of q at numbers of the DRAFT stream. Without replacement token
    x arrives at -ln(1 - u) / q(x), u from the RACE stream, and the earliest are taken.

    Args:
        q: [V], finite and non-negative; it need not sum to one.
        count: how many. The first draws are the same however many are asked for.
        node: that they will hang below, 0 for the root token.
        number: (stream, draw) -> the uniform of the sequence at the position of its round, for instance
            `lambda stream, draw: uniform(seed, position, stream, draw)`.
        replacement: whether a token can be drawn twice.

    Returns:
        The tokens; without replacement fewer than `count` where fewer are possible; none of independent draws
        where q has no positive finite sum.
    """
    if replacement:
        if not 0.0 < float(np.sum(q, dtype=np.float64)) < math.inf:
            return []
        first = node << DRAFT_CHILD_BITS
        return [categorical(q, number(Stream.DRAFT, first + k)) for k in range(count)]
    first = node << RACE_TOKEN_BITS
    racing = np.flatnonzero(q > 0.0).tolist()
    arrival = {x: -math.log1p(-number(Stream.RACE, first + x)) / float(q[x]) for x in racing}
    return sorted(arrival, key=arrival.__getitem__)[:count]  # ties to the smaller token
