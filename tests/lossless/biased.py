"""Known biased variants of chain acceptance: a check that cannot tell them from the real rule is no check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lossless.toys import Round, Toy, chain_round
from specdec.acceptance import Accepted


def resample_from_target(
    p_target: Callable[[int], np.ndarray], p_draft: Sequence[np.ndarray], drafts: Sequence[int], decide: Any
) -> Accepted:
    """`walk_chain` that emits from p after a rejection, not from the residual."""
    for i, x in enumerate(drafts):
        if not decide.accept(i, p_target(i)[x], p_draft[i][x]):
            return Accepted(list(range(i + 1)), decide.sample(i, p_target(i)))
    n = len(drafts)
    return Accepted(list(range(n + 1)), decide.sample(n, p_target(n)))


def siblings_without_removal(
    p_target: Callable[[int], np.ndarray], tokens: Sequence[int], parents: Sequence[int], decide: Any
) -> Accepted:
    """Deterministic siblings tested one by one, each against the whole of p, the rejected ones left in it."""
    path = [0]
    for j in range(1, len(tokens)):
        if parents[j] == path[-1] and decide.accept(len(path) - 1, p_target(path[-1])[tokens[j]], 1.0):
            path.append(j)
    return Accepted(path, decide.sample(len(path) - 1, p_target(path[-1])))


def argmax_draft(depth: int, q: np.ndarray, decisions: Any) -> int:
    """A drafter's choice that is its argmax although it is tested as if it had been drawn from q."""
    return int(q.argmax())


def drops_unlikely_draft(toy: Toy, length: int, threshold: float, walk: Any = None) -> Round:
    """Rounds whose draft ends at a token with q below the threshold and leaves that token out."""

    def pick(depth: int, q: np.ndarray, decisions: Any) -> int | None:
        x = decisions.draft(depth, q)
        return None if q[x] < threshold else x

    return chain_round(toy, length, pick=pick, walk=walk)
