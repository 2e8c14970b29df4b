"""Greedy acceptance: a drafted token is right if it is the argmax at its parent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.acceptance.walking import Rows, Verdict, path_to


def walk_greedy(p_target: Rows, tokens: Sequence[int], parents: Sequence[int]) -> Verdict:
    """The longest path on which every token is the argmax at its parent, ties to the smaller token.

    Siblings may repeat a token: of several accepted nodes of the greatest depth the one of lowest index is
    taken, and all of them spell the same text.

    Args:
        p_target: rows of the target, probabilities or logits; called for accepted nodes.
        tokens: [N] token of each node; node 0 is the root token, accepted always.
        parents: [N] parent of each node, smaller than the node; -1 for node 0.

    >>> rows = np.eye(10)[[5, 6, 7]]
    >>> walk_greedy(rows.__getitem__, [4, 5, 9], [-1, 0, 1])
    Verdict(path=[0, 1], next_token=6)
    """
    depths, best, leaf = {0: 0}, {0: int(np.argmax(p_target(0)))}, 0  # of accepted nodes
    for node in range(1, len(tokens)):
        parent = parents[node]
        if parent in depths and tokens[node] == best[parent]:
            depths[node], best[node] = depths[parent] + 1, int(np.argmax(p_target(node)))
            if depths[node] > depths[leaf]:
                leaf = node
    return Verdict(path_to(leaf, parents), best[leaf])
