"""Traversal verification (arXiv 2505.12398): a tree from its leaves up; on a chain block verification (Sun et
al., arXiv 2403.10444)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.acceptance.decisions import Decisions, Row
from specdec.acceptance.walking import Rows, Verdict, children_of, emit, path_to, without


def walk_traversal(
    p_target: Rows,
    p_draft: Rows,
    tokens: Sequence[int],
    parents: Sequence[int],
    decide: Decisions,
    *,
    replacement: bool = True,
) -> Verdict:
    """A path is accepted as a whole, with the ratio of its joint probabilities, clipped at every node.

    The chance of a child x is min(1, chance p(x) / q(x)), p what is left at its parent and `chance` the
    parent's; the root token has 1. The walk goes down into the first child that is not yet rejected until
    there is none, and accepts that leaf with its chance. A rejected one leaves norm [chance p - q]+ at its
    parent, of sum S before it is normalised, and the parent the chance S / (S + 1 - chance); the next child
    is tried, or the parent itself, which has become a leaf. The token after the path comes from what is left
    at its end.

    Args:
        p_target: rows of the target; called only for nodes the walk visits.
        p_draft: rows of the drafter. A row that is zero at its draft rejects it.
        tokens: [N] token of each node.
        parents: [N] parent of each node, smaller than the node; -1 for node 0.
        decide: the random outcomes. Numbers of nodes beyond the accepted path have been used: they may not
            serve a later round.
        replacement: as in `walk_recursive`.
    """
    children = children_of(parents)
    chance = [1.0] * len(parents)
    total = [1.0] * len(parents)  # of what is left
    left: dict[int, Row] = {}  # of the target's row where the walk has been
    rejected = [0] * len(parents)

    def draft(child: int) -> Row:
        parent = parents[child]
        elder = () if replacement else [tokens[c] for c in children[parent][: rejected[parent]]]
        return without(p_draft(child), elder)

    node = depth = 0
    while True:
        # Nothing below a chance of zero (a path outside the target's support) can be accepted. No row is made
        # there, nor of a leaf before it is accepted.
        below = children[node][rejected[node] :] if node == 0 or chance[node] > 0.0 else ()
        if not below and node != 0 and not decide.keep(node, chance[node]):
            parent = parents[node]
            factor = chance[parent] / total[parent] if total[parent] > 0.0 else 0.0
            left[parent] = np.maximum(factor * left[parent] - draft(node), 0.0)
            total[parent] = rest = float(left[parent].sum())
            chance[parent] = rest / (rest + 1.0 - chance[parent]) if rest > 0.0 else 0.0
            rejected[parent] += 1
            node, depth = parent, depth - 1
            continue
        if node not in left:
            left[node] = np.asarray(p_target(node), np.float64)
        if not below:
            return Verdict(path_to(node, parents), emit(decide, depth, left[node], p_target(node)))
        child = below[0]
        x = tokens[child]
        q = float(draft(child)[x])
        p = chance[node] / total[node] * float(left[node][x]) if total[node] > 0.0 else 0.0
        chance[child] = 0.0 if not q > 0.0 else p / q if p < q else 1.0
        node, depth = child, depth + 1
