"""Recursive rejection: children are tested one by one against what is left of the target's row.

On a chain this is speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318),
on trees with independent children SpecInfer (arXiv 2305.09781), on trees with children drawn without
replacement Sequoia (arXiv 2402.12374).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.acceptance.decisions import Decisions
from specdec.acceptance.walking import Rows, Verdict, children_of, emit, path_to, without


def walk_recursive(
    p_target: Rows,
    p_draft: Rows,
    tokens: Sequence[int],
    parents: Sequence[int],
    decide: Decisions,
    *,
    replacement: bool = True,
) -> Verdict:
    """A child x is accepted with probability min(1, p(x) / q(x)), else p <- norm [p - q]+ and the next child
    of the node is tested; if none is accepted a token of what is left is emitted.

    Args:
        p_target: rows of the target; called only for nodes the walk visits.
        p_draft: rows of the drafter. A row that is zero at its draft rejects it.
        tokens: [N] token of each node.
        parents: [N] parent of each node, smaller than the node; -1 for node 0.
        decide: the random outcomes.
        replacement: siblings were drawn independently; False: each without the tokens of its elder siblings,
            which are taken out of q before the test.

    Example: p = (0.5, 0.5), q = (0.2, 0.8). Token 0 is drafted with probability 0.2 and always kept. Token 1
    is drafted with 0.8 and kept with 0.5 / 0.8, which makes 0.5; rejected, with probability 0.3, it is
    replaced by a draw from [p - q]+ = (0.3, 0). So token 0 comes with 0.2 + 0.3.
    """
    children = children_of(parents)
    node = depth = 0
    while True:
        p = left = np.asarray(p_target(node), np.float64)
        factor = 1.0  # times left: what is left, normalised
        taken: list[int] = []
        accepted = -1
        for rank, child in enumerate(children[node]):
            q, x = without(p_draft(child), taken), tokens[child]
            if q[x] > 0.0 and decide.accept(depth, factor * float(left[x]), float(q[x]), rank):
                accepted = child
                break
            left = np.maximum(factor * left - q, 0.0)
            total = float(left.sum())
            if not total > 0.0:
                break
            factor = 1.0 / total
            if not replacement:
                taken.append(x)
        if accepted < 0:
            return Verdict(path_to(node, parents), emit(decide, depth, left, p))
        node, depth = accepted, depth + 1
