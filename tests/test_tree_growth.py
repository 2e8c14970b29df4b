"""Trees of drafts: what grows is the best tree of its size, within every limit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.acceptance import SamplingParams
from specdec.drafters import DraftRequest
from specdec.drafters.shape import TreeShape
from specdec.drafters.tree import GrowingTree, best_first
from specdec.tree import TokenTree

END = 0  # an end token
Path = tuple[int, ...]


def as_said(probability: float, rank: int) -> float:
    return probability


class Toy:
    """Rows of probabilities over six tokens that depend on the path alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def children(self, path: Path, count: int) -> tuple[list[int], list[float]]:
        draw = random.Random(hash((self.seed, path)))
        weights = [draw.random() ** 4 + 1e-6 for _ in range(6)]
        total = sum(weights)
        ranked = sorted(range(6), key=lambda t: -weights[t])[:count]
        return ranked, [weights[t] / total for t in ranked]


def grown(toy: Toy, request: DraftRequest, shape: TreeShape) -> GrowingTree:
    tree = GrowingTree(request, shape, frozenset({END}), drawn=False)
    while nodes := tree.expandable():
        asked = tree.asked(nodes)
        tree.run += len(asked)
        tree.next_level()
        for parent in asked:
            tree.grow(parent.node, *toy.children(tree.path(parent.node), parent.children), as_said)
    return tree


def paths(tree: TokenTree) -> list[Path]:
    return [tuple(tree.tokens[i] for i in tree.path_to(node)) for node in range(len(tree))]


def every_candidate(toy: Toy, top_k: int, depth: int) -> dict[Path, float]:
    """All paths of up to `depth` tokens with their chances."""
    found: dict[Path, float] = {}

    def add(path: Path, chance: float) -> None:
        if len(path) == depth or (path and path[-1] == END):
            return
        for token, probability in zip(*toy.children(path, top_k), strict=True):
            found[(*path, token)] = chance * probability
            add((*path, token), chance * probability)

    add((), 1.0)
    return found


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(1, 4),
    nodes=st.integers(1, 14),
    depth=st.integers(1, 5),
    tau=st.floats(0.0, 8.0),
)
def test_a_pruned_tree_is_the_best_tree_of_every_size(
    seed: int, top_k: int, nodes: int, depth: int, tau: float
) -> None:
    toy = Toy(seed)
    tree = grown(toy, DraftRequest(0, nodes, depth), TreeShape.pruned(top_k, tau))
    proposal, order = tree.proposal(None, False)
    candidates = every_candidate(toy, top_k, depth)
    floor = max(candidates.values()) * math.exp(-tau)
    want = sorted((c for c in candidates.values() if c >= floor), reverse=True)[:nodes]
    assert proposal.chances is not None
    assert list(proposal.chances) == want  # the same products in the same order: the same bits
    found = paths(proposal.tree)
    assert len(set(found)) == len(found)
    assert [candidates[path] for path in found] == want
    assert [tree.path(node) for node in order] == found
    for size in range(len(found) + 1):  # every prefix is a tree
        assert all(path[:-1] in found[:size] or len(path) == 1 for path in found[:size])
        assert paths(proposal.truncate(size).tree) == found[:size]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    branching=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 6),
)
def test_a_fixed_tree_has_its_shape_whatever_the_chances(
    seed: int, branching: list[int], nodes: int, depth: int
) -> None:
    shape = TreeShape(branching)
    proposal, _ = grown(Toy(seed), DraftRequest(0, nodes, depth), shape).proposal(None, False)
    sizes = shape.levels(nodes)[:depth]
    if END not in proposal.tree.tokens:
        depths = list(proposal.tree.depths)
        assert [sum(d <= level for d in depths) for level in range(len(sizes))] == list(sizes)
    assert len(proposal.tree) <= nodes
    assert list(proposal.chances or ()) == sorted(proposal.chances or (), reverse=True)
    for node in range(len(proposal.tree)):
        assert len(proposal.tree.children(node)) <= shape.children(proposal.tree.depths[node] + 1)
        if proposal.tree.tokens[node] == END:
            assert not proposal.tree.children(node)
    assert len(proposal.tree.children(-1)) <= shape.children(0)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 63), depth=st.integers(1, 16))
def test_the_drafter_never_runs_more_nodes_than_was_reserved(seed: int, nodes: int, depth: int) -> None:
    for shape in (TreeShape.pruned(4, 20.0), TreeShape((1,)), TreeShape((3, 2))):
        request = DraftRequest(0, nodes, depth)
        tree = grown(Toy(seed), request, shape)
        assert tree.run - 1 <= tree.most_run  # node 0 is not counted there


def test_what_was_drawn_stays() -> None:
    """Of a drawn tree unlikely nodes get no children, but they are proposed, in the order of the draws."""
    request = DraftRequest(0, 8, 4, SamplingParams(temperature=1.0))
    tree = GrowingTree(request, TreeShape.pruned(3, 1.0), frozenset({END}), drawn=True)
    assert [p.children for p in tree.asked(tree.expandable())] == [3]
    tree.next_level()
    tree.grow(0, [5, 4, 3], [0.05, 0.6, 0.01], as_said, row=0)
    assert tree.expandable() == [2]
    (parent,) = tree.asked([2])
    assert (tree.path(parent.node), parent.children) == ((4,), 3)
    assert math.isclose(parent.floor, math.exp(-1.0))  # of the best node, which is the parent itself
    tree.next_level()
    tree.grow(2, [END, 1], [0.5, 0.45], as_said, row=1)
    assert tree.expandable() == [5]  # nothing below an end token
    assert tree.tokens[1:] == [5, 4, 3, END, 1]


def chances_of(parents: Sequence[int], factors: Sequence[float]) -> list[float]:
    chances: list[float] = []
    for parent, factor in zip(parents, factors, strict=True):
        chances.append(factor * (chances[parent] if parent >= 0 else 1.0))
    return chances


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9, 1.0])), max_size=12))
def test_any_tree_in_the_order_of_its_chances_is_a_tree(nodes: list[tuple[int, float]]) -> None:
    parents = [draw % (i + 1) - 1 for i, (draw, _) in enumerate(nodes)]
    tree = TokenTree(range(len(nodes)), parents)
    ordered, chances = best_first(tree, chances_of(parents, [factor for _, factor in nodes]))
    assert list(chances) == sorted(chances, reverse=True)
    assert sorted(ordered.tokens) == list(range(len(nodes)))
    for token, parent in zip(ordered.tokens, ordered.parents, strict=True):
        assert parents[token] == (ordered.tokens[parent] if parent >= 0 else -1)
