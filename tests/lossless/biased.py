"""Known biased variants of the rules: a check that cannot tell them from the real ones is no check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from lossless.statistics import Numbers
from lossless.toys import Drafts, Round, Text, Toy, Walk, drawn_round, fixed_round
from specdec.acceptance import Stream, Typical, Verdict, categorical, k_seq
from specdec.acceptance.decisions import Row
from specdec.acceptance.recursive import walk_recursive
from specdec.acceptance.traversal import walk_traversal
from specdec.acceptance.typical import walk_typical
from specdec.acceptance.walking import Rows, children_of, path_to
from specdec.drafters.base import DraftRequest
from specdec.drafters.draws import drawn_count
from specdec.drafters.shape import TreeShape
from specdec.drafters.tree import GrowingTree


def resample_from_target(
    p_target: Rows, p_draft: Rows, tokens: Sequence[int], parents: Sequence[int], decide: Any
) -> Verdict:
    """Speculative sampling that emits from p after a rejection, not from the residual."""
    path = [0]
    for j in range(1, len(tokens)):
        x = tokens[j]
        if not decide.accept(j - 1, p_target(j - 1)[x], p_draft(j)[x]):
            break
        path.append(j)
    return Verdict(path, decide.sample(len(path) - 1, p_target(path[-1])))


def siblings_without_removal(
    p_target: Rows, tokens: Sequence[int], parents: Sequence[int], decide: Any
) -> Verdict:
    """Deterministic siblings tested one by one, each against the whole of p, the rejected ones left in it."""
    path = [0]
    for j in range(1, len(tokens)):
        if parents[j] == path[-1] and decide.accept(len(path) - 1, p_target(path[-1])[tokens[j]], 1.0):
            path.append(j)
    return Verdict(path, decide.sample(len(path) - 1, p_target(path[-1])))


class _Argmax:
    def __init__(self, decide: Any) -> None:
        self.accept, self.keep, self.sample = decide.accept, decide.keep, decide.sample

    def draft(self, parent: int, rank: int, q: np.ndarray, elder: Collection[int] | None) -> int:
        return int(q.argmax())


def argmax_draft(rounds: Round) -> Round:
    """Rounds whose drafter takes its argmax although it is tested as if it had been drawn from q."""
    return lambda text, decide: rounds(text, _Argmax(decide))


Cut = Callable[[Text, np.ndarray, int], bool]


def cut_chain(toy: Toy, length: int, cut: Cut, walk: Walk, keep: bool = False) -> Round:
    """Rounds whose chain ends at the first draft x with `cut(text before, q, x)`.

    `keep` is whether that draft stays in the chain, which is exact; left out, it biases the text, as it does
    not come with the probability that q says.
    """

    def round_(text: Text, decide: Any) -> list[int]:
        nodes = Drafts(toy, text, [-1], decide, replacement=True)
        parents = [-1]
        for j in range(1, length + 1):
            nodes.grow(j - 1)
            last = cut(nodes.text(j - 1), nodes.p_draft(j), nodes[j])
            if keep or not last:
                parents.append(j - 1)
            if last:
                break
        path, x = walk(nodes.p_target, nodes.p_draft, nodes, parents, decide)
        return [*nodes.text(path[-1])[len(text) :], x]

    return round_


def second_by_the_first(toy: Toy, replacement: bool, walk: Walk) -> Round:
    """Rounds with a second child only where the first is not token 0: k depends on what was drawn, which
    biases k-SEQ alone."""

    def round_(text: Text, decide: Any) -> list[int]:
        parents = [-1, 0]
        nodes = Drafts(toy, text, parents, decide, replacement)
        if nodes[1] != 0:
            nodes.grow(0)
        path, x = walk(nodes.p_target, nodes.p_draft, nodes, parents, decide)
        return [*nodes.text(path[-1])[len(text) :], x]

    return round_


def unlikely(text: Text, q: np.ndarray, x: int) -> bool:
    """A draft that makes a drafter stop."""
    return bool(q[x] < 0.25)


def pruned_tree(toy: Toy, replacement: bool, walk: Walk, *, drop: bool = False) -> Round:
    """Drawn trees of up to three nodes, grown as drafters grow them; what falls below tau stays, or is
    dropped although it was drawn.
    """

    def round_(text: Text, decide: Any) -> list[int]:
        parents = [-1]
        nodes = Drafts(toy, text, parents, decide, replacement)
        tree = GrowingTree(DraftRequest(0, 3, 2), TreeShape((2,), 1.2), frozenset(), drawn=True)
        while wanted := tree.expandable():
            asked = tree.asked(wanted)
            tree.next_level()
            for parent in asked:
                q = toy.q(nodes.text(parent.node))
                first = len(nodes)
                for _ in range(drawn_count(parent, q)):
                    nodes.grow(parent.node)
                drawn = [nodes[node] for node in range(first, len(nodes))]
                tree.grow(parent.node, drawn, [float(q[x]) for x in drawn], lambda chance, rank: chance)
        kept = [i for i, chance in enumerate(tree.chances) if not drop or chance >= tree.floor]
        place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
        path, x = walk(
            lambda i: nodes.p_target(kept[i]),
            lambda i: nodes.p_draft(kept[i]),
            [nodes[node] if node else text[-1] for node in kept],
            [place[parents[node]] for node in kept],
            decide,
        )
        return [*nodes.text(kept[path[-1]])[len(text) :], x]

    return round_


def middle_tier(toy: Toy) -> Cut:
    """A model between drafter and target deletes what it finds less likely than the drafter did."""
    return lambda text, q, x: bool(0.5 * (toy.p(text)[x] + q[x]) < q[x])


def k_seq_below(factor: float) -> Walk:
    """k-SEQ with a rho of `factor` times the smallest exact one."""
    smallest = k_seq.smallest_rho

    def small(p: Row, q: Row, k: int) -> float:
        return factor * smallest(p, q, k)

    def walk(*arguments: Any) -> Verdict:
        with patch.object(k_seq, "smallest_rho", small):
            return k_seq.walk_k_seq(*arguments)

    return walk


def traversal_with_the_parents_chance(
    p_target: Rows, p_draft: Rows, tokens: Sequence[int], parents: Sequence[int], decide: Any
) -> Verdict:
    """Traversal whose parents keep their chance when a child is rejected."""
    children, chance, node = children_of(parents), [1.0] * len(parents), 0
    left = {0: p_target(0)}
    rejected = [0] * len(parents)
    while True:
        if rejected[node] < len(children[node]):
            child = children[node][rejected[node]]
            x = tokens[child]
            chance[child] = min(1.0, chance[node] * left[node][x] / p_draft(child)[x])
            node = child
            left[node] = p_target(node)
        elif node == 0 or decide.keep(node, chance[node]):
            path = path_to(node, parents)
            weights = left[node] if left[node].any() else p_target(node)
            return Verdict(path, decide.sample(len(path) - 1, weights))
        else:
            parent = parents[node]
            weights = np.maximum(chance[parent] * left[parent] - p_draft(node), 0.0)
            left[parent] = weights / (weights.sum() or 1.0)
            rejected[parent] += 1
            node = parent


def typical(rule: Typical) -> Walk:
    """Typical acceptance, which is lossy, of drawn drafts."""
    return lambda p_target, p_draft, *nodes: walk_typical(p_target, *nodes, rule)


class KeyedByPosition(Numbers):
    """Decisions whose tests are numbered by position in the text, not by round, as if no rule looked past the
    first rejection: a later round finds numbers that have made an earlier one stop. For chains."""

    def keep(self, node: int, chance: float) -> bool:
        """The test of the draft at this position."""
        return self.number(self.position + node - 1, Stream.ROUND) < chance


class DraftsKeyedByPosition(Numbers):
    """Decisions whose drafts are numbered by position. For chains."""

    def draft(self, parent: int, rank: int, q: np.ndarray, elder: Collection[int] | None) -> int:
        """The draft at this position."""
        return categorical(q, self.number(self.position + parent, Stream.DRAFT))


CHAIN, STAR, BINARY = [-1, 0, 1], [-1, -1, -1], [-1, -1, 0, 0, 1, 1]
BIASED: dict[str, Callable[[Toy], Round]] = {
    "naive residual": lambda toy: drawn_round(toy, CHAIN, True, resample_from_target),
    "argmax draft, soft q": lambda toy: argmax_draft(drawn_round(toy, CHAIN, True, walk_recursive)),
    "argmax draft, soft q, block": lambda toy: argmax_draft(drawn_round(toy, CHAIN, True, walk_traversal)),
    "drops the unlikely draft": lambda toy: cut_chain(toy, 3, unlikely, walk_recursive),
    "drops the unlikely draft, block": lambda toy: cut_chain(toy, 3, unlikely, walk_traversal),
    "drops the unlikely nodes of a tree": lambda toy: pruned_tree(toy, True, walk_recursive, drop=True),
    "drops the unlikely nodes of a tree, traversal": lambda toy: pruned_tree(
        toy, True, walk_traversal, drop=True
    ),
    "middle tier": lambda toy: cut_chain(toy, 3, middle_tier(toy), walk_recursive),
    "siblings stay in p": lambda toy: fixed_round(
        toy, STAR, lambda root: [(root + i) % 4 for i in (1, 2, 3)], siblings_without_removal
    ),
    "iid rule, drawn without replacement": lambda toy: drawn_round(toy, STAR, False, walk_recursive),
    "rule without replacement, drawn iid": lambda toy: drawn_round(
        toy, STAR, True, partial(walk_recursive, replacement=False)
    ),
    "iid traversal, drawn without replacement": lambda toy: drawn_round(toy, STAR, False, walk_traversal),
    "traversal without replacement, drawn iid": lambda toy: drawn_round(
        toy, STAR, True, partial(walk_traversal, replacement=False)
    ),
    "k-seq, drawn without replacement": lambda toy: drawn_round(toy, STAR, False, k_seq.walk_k_seq),
    "k-seq, rho too small": lambda toy: drawn_round(toy, STAR, True, k_seq_below(0.8)),
    "k-seq, second child by the first": lambda toy: second_by_the_first(toy, True, k_seq.walk_k_seq),
    "traversal, chance of the parent stays": lambda toy: drawn_round(
        toy, BINARY, True, traversal_with_the_parents_chance
    ),
    "block, chance of the parent stays": lambda toy: drawn_round(
        toy, CHAIN, True, traversal_with_the_parents_chance
    ),
    "typical": lambda toy: drawn_round(toy, CHAIN, True, typical(Typical())),
    "typical, strict": lambda toy: drawn_round(toy, CHAIN, True, typical(Typical(0.5, 0.6))),
}
"""Rounds over four tokens that do not have the target's law; every check has to detect each of them."""
