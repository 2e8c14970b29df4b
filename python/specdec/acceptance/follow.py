"""Drafts that were not drawn at random (n-grams, a greedy drafter): draw as plain decoding, and follow."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.acceptance.decisions import Decisions
from specdec.acceptance.walking import Rows, Verdict, path_to


def walk_follow(p_target: Rows, tokens: Sequence[int], parents: Sequence[int], decide: Decisions) -> Verdict:
    """Sampling with deterministic drafts on any tree.

    At each node one token is drawn from p as plain decoding would draw it; the walk goes on into the child
    that carries it and ends where there is none. This has the law of testing the children one by one against
    a one-hot q (accept x with probability p(x), else zero x in p and renormalise, at last sample from what
    remains), no rule accepts more, and under one seed the text is token for token that of plain decoding,
    whatever is drafted. Repeated siblings share one draw.

    Args:
        p_target: rows of the target; called only for nodes the walk visits.
        tokens: [N] token of each node.
        parents: [N] parent of each node, smaller than the node; -1 for node 0.
        decide: the random outcomes; only `sample` is used.
    """
    here = [0]  # all nodes that spell the accepted text
    depth = 0
    while True:
        x = decide.sample(depth, p_target(here[0]))
        below = [j for j in range(here[0] + 1, len(tokens)) if tokens[j] == x and parents[j] in here]
        if not below:
            return Verdict(path_to(here[0], parents), x)
        here, depth = below, depth + 1
