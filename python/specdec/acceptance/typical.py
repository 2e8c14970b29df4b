"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1). LOSSY: the text has another law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec._checks import check_number
from specdec.acceptance.decisions import Decisions
from specdec.acceptance.walking import Rows, Verdict, path_to


@dataclass(frozen=True)
class Typical:
    """Keep a draft where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats. LOSSY.

    Attributes:
        epsilon: a draft of more than this probability is always kept, 0 to 1.
        delta: how typical a less probable one must be, at least 0. The paper's advice is sqrt(epsilon).

    Raises:
        ValueError: a value is outside its range.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, 0.0, 1.0)
        check_number("delta", self.delta, 0.0)


def walk_typical(
    p_target: Rows, tokens: Sequence[int], parents: Sequence[int], decide: Decisions, rule: Typical
) -> Verdict:
    """The longest path of kept drafts, whose end's row the next token is drawn from. LOSSY.

    Args:
        p_target: rows of the target; called for accepted nodes.
        tokens: [N] token of each node.
        parents: [N] parent of each node, smaller than the node; -1 for node 0.
        decide: the random outcomes; only `sample` is used.
        rule: the thresholds.
    """
    depths, floors, leaf = {0: 0}, {}, 0  # of kept nodes
    for node in range(1, len(tokens)):
        parent = parents[node]
        if parent not in depths:
            continue
        p = np.asarray(p_target(parent), np.float64)
        if parent not in floors:
            positive = p[p > 0.0]
            entropy = -float((positive * np.log(positive)).sum())
            floors[parent] = min(rule.epsilon, rule.delta * float(np.exp(-entropy)))
        if p[tokens[node]] > floors[parent]:
            depths[node] = depths[parent] + 1
            if depths[node] > depths[leaf]:
                leaf = node
    return Verdict(path_to(leaf, parents), decide.sample(depths[leaf], p_target(leaf)))
