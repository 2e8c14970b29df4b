"""SpecTr's k-sequential selection (Sun et al., arXiv 2310.15141): k independent children of one row, tested
alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.acceptance.decisions import Decisions, Row
from specdec.acceptance.walking import Rows, Verdict, children_of, emit, path_to

_BISECTIONS = 10


def walk_k_seq(
    p_target: Rows, p_draft: Rows, tokens: Sequence[int], parents: Sequence[int], decide: Decisions
) -> Verdict:
    """Each of a node's k children is accepted with probability min(1, p(x) / (rho q(x))), the eldest first.

    With beta = sum min(q, p / rho), the chance of one test, and p_acc = 1 - (1 - beta)^k, that of any, the
    token after k rejections comes from p - min(q, p / rho) p_acc / beta, which is exact as long as it is
    nowhere negative: p_acc <= rho beta. The least such rho is between 1 and k; the upper end of a bisection
    is taken.

    Args:
        p_target: rows of the target; called only for nodes the walk visits.
        p_draft: rows of the drafter, one for all children of a node.
        tokens: [N] token of each node.
        parents: [N] parent of each node, smaller than the node; -1 for node 0.
        decide: the random outcomes.
    """
    children = children_of(parents)
    node = depth = 0
    while True:
        p: Row = np.asarray(p_target(node), np.float64)
        left = p
        below = children[node]
        accepted = -1
        if below:
            q = np.asarray(p_draft(below[0]), np.float64)
            rho = smallest_rho(p, q, len(below))
            for rank, child in enumerate(below):
                x = tokens[child]
                if q[x] > 0.0 and decide.accept(depth, float(p[x]), rho * float(q[x]), rank):
                    accepted = child
                    break
            else:
                left = residual(p, q, rho, len(below))
        if accepted < 0:
            return Verdict(path_to(node, parents), emit(decide, depth, left, p))
        node, depth = accepted, depth + 1


def smallest_rho(p: Row, q: Row, k: int) -> float:
    """A rho at which k children are exact, at most (k - 1) 2^-10 above the least.

    Args:
        p: [V] row of the target.
        q: [V] row that all children were drawn from.
        k: how many, at least 1.
    """
    low, high = 1.0, float(max(1, k))
    for _ in range(_BISECTIONS if k > 1 else 0):
        rho = 0.5 * (low + high)
        beta = _overlap(p, q, 1.0 / rho)
        if _any_of(k, beta) <= rho * beta:
            high = rho
        else:
            low = rho
    return high


def residual(p: Row, q: Row, rho: float, k: int) -> Row:
    """[V] weights of the token that follows k rejections; arguments as in `smallest_rho`."""
    inverse = 1.0 / rho
    beta = _overlap(p, q, inverse)
    share = _any_of(k, beta) / beta if beta > 0.0 else 0.0
    return np.asarray(np.maximum(p - share * np.minimum(q, inverse * p), 0.0))


def _overlap(p: Row, q: Row, inverse: float) -> float:
    return float(np.minimum(q, inverse * p).sum())


def _any_of(k: int, beta: float) -> float:
    none = 1.0  # multiplied out as the operators do it
    for _ in range(k):
        none *= 1.0 - beta
    return 1.0 - none
