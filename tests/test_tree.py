"""TokenTree. tests/cpp/tree_test.cpp checks the schedule against definitions."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.tree import MAX_NODES, TokenTree

seeded = settings(deadline=None, derandomize=True)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> TokenTree:
    n = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    return TokenTree(tokens, parents)


def walk_up(tree: TokenTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = tree.parents[node]
    return path


@seeded
@given(trees())
def test_structure_follows_the_parents(tree: TokenTree) -> None:
    nodes = range(len(tree))
    paths = [walk_up(tree, i) for i in nodes]
    assert [list(tree.path_to(i)) for i in nodes] == paths
    assert list(tree.depths) == [len(p) - 1 for p in paths]
    assert list(tree.sizes) == [sum(i in p for p in paths) for i in nodes]
    assert tree.is_chain == (list(tree.parents) == [i - 1 for i in nodes])
    assert [list(tree.children(i)) for i in range(-1, len(tree))] == [
        [j for j in nodes if tree.parents[j] == i] for i in range(-1, len(tree))
    ]
    assert list(tree.leaves) == [i for i in nodes if not tree.children(i)]
    mask = tree.ancestor_mask()
    assert mask.dtype == np.bool_
    assert mask.shape == (len(tree), len(tree))
    assert [sorted(np.flatnonzero(row).tolist()) for row in mask] == paths


@seeded
@given(trees())
def test_chains_and_waves_can_be_run_in_order(tree: TokenTree) -> None:
    assert [c for wave in tree.waves for c in wave] == list(range(len(tree.chains)))
    ready = {-1}
    for wave in tree.waves:
        chains = [tree.chains[c] for c in wave]
        for chain in chains:
            assert tree.parents[chain[0]] in ready
            assert all(tree.parents[b] == a for a, b in pairwise(chain))
            assert not tree.children(chain[-1])
        for chain in chains:
            assert ready.isdisjoint(chain)
            ready.update(chain)
    assert len(ready) == len(tree) + 1


@seeded
@given(trees())
def test_depth_first_visits_light_children_before_the_heavy_one(tree: TokenTree) -> None:
    heavy = {b for chain in tree.chains for b in chain[1:]}
    expected: list[int] = []

    def visit(node: int) -> None:
        expected.append(node)
        for child in sorted(tree.children(node), key=lambda c: c in heavy):
            visit(child)

    for root in tree.children(-1):
        visit(root)
    assert list(tree.depth_first) == expected


def test_chain_of_a_tie_is_the_first_child() -> None:
    assert TokenTree([1, 2, 3, 4], [-1, 0, 0, -1]).chains == ((0, 1), (3,), (2,))


@seeded
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8))
def test_from_paths_holds_every_prefix_once(paths: list[list[int]]) -> None:
    tree = TokenTree.from_paths(paths)
    prefixes = {tuple(p[:i]) for p in paths for i in range(1, len(p) + 1)}
    spelled = [tuple(tree.tokens[j] for j in tree.path_to(i)) for i in range(len(tree))]
    assert sorted(spelled) == sorted(prefixes)
    for node in range(-1, len(tree)):
        siblings = [tree.tokens[c] for c in tree.children(node)]
        assert len(siblings) == len(set(siblings))


@seeded
@given(trees(), st.randoms(use_true_random=False))
def test_reorder_keeps_the_tree(tree: TokenTree, random: object) -> None:
    order: list[int] = []
    ready = list(tree.children(-1))
    while ready:
        order.append(ready.pop(random.randrange(len(ready))))  # type: ignore[attr-defined]
        ready += tree.children(order[-1])
    reordered = tree.reorder(order)
    assert len(reordered) == len(tree)
    for new, old in enumerate(order):
        assert [order[i] for i in reordered.path_to(new)] == list(tree.path_to(old))
        assert reordered.tokens[new] == tree.tokens[old]


@seeded
@given(trees(), st.integers(0, 30))
def test_truncate_keeps_the_first_nodes(tree: TokenTree, nodes: int) -> None:
    assert tree.truncate(nodes) == TokenTree(tree.tokens[:nodes], tree.parents[:nodes])
    assert tree.truncate(nodes).is_chain == all(p == i - 1 for i, p in enumerate(tree.parents[:nodes]))


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([5, 6, 7], [-1, 0, 2], r"parents\[2\] is 2, want -1 \(a root\) or an earlier node \(0 to 1\)"),
        ([5, 6], [-1, -2], r"parents\[1\] is -2"),
        ([5], [0], r"parents\[0\] is 0, want -1: the first node is a root"),
        ([5, 6], [-1, 2**40], rf"parents\[1\] is {2**40}"),
        ([5, -6], [-1, 0], r"tokens\[1\] is -6, want a token id"),
        ([5, 2**31], None, r"tokens\[1\] is 2147483648"),
        ([5, 6], [-1], r"parents has 1 entries for 2 tokens"),
        (range(MAX_NODES + 1), None, rf"the tree has {MAX_NODES + 1} nodes, want at most {MAX_NODES}"),
    ],
)
def test_errors_name_the_node(tokens: list[int], parents: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(tokens, parents)


def test_more_errors() -> None:
    tree = TokenTree([5, 6, 7], [-1, 0, 0])
    with pytest.raises(ValueError, match="node: got 3, want 0 to 2"):
        tree.path_to(3)
    with pytest.raises(ValueError, match="node: got -2"):
        tree.children(-2)
    with pytest.raises(ValueError, match=r"order: got \[0, 1, 1\], want a permutation"):
        tree.reorder([0, 1, 1])
    with pytest.raises(ValueError, match="order: node 1 comes before its parent 0"):
        tree.reorder([1, 0, 2])
    with pytest.raises(ValueError, match="nodes: got -1"):
        tree.truncate(-1)
    with pytest.raises(ValueError, match=r"paths\[1\]\[2\] is -1, want a token id"):
        TokenTree.from_paths([[1, 2], [1, 3, -1]])
    with pytest.raises(ValueError, match="257 nodes"):
        TokenTree.from_paths([[0, *range(i)] for i in range(300)])
    with pytest.raises(TypeError):
        TokenTree([1.5])


def test_immutable_hashable_and_copies() -> None:
    tree = TokenTree(np.array([3, 4, 5]), torch.tensor([-1, 0, 0]))
    assert tree == TokenTree([3, 4, 5], [-1, 0, 0])
    assert hash(tree) == hash(TokenTree([3, 4, 5], [-1, 0, 0]))
    assert tree != TokenTree([3, 4, 5])
    assert tree != (3, 4, 5)
    assert TokenTree.from_chain([3, 4]) == TokenTree([3, 4], [-1, 0])
    with pytest.raises(AttributeError):
        tree.tokens = (1,)  # type: ignore[misc]
    assert tree.chains  # a built schedule must not stand in the way of a copy
    assert pickle.loads(pickle.dumps(tree)) == copy.deepcopy(tree) == tree


def test_drawing() -> None:
    tree = TokenTree([17, 4, 9, 4, 2], [-1, 0, 0, 2, -1])
    assert repr(tree) == ("TokenTree, 5 nodes\n├─ 0: 17\n│  ├─ 1: 4\n│  └─ 2: 9\n│     └─ 3: 4\n└─ 4: 2")
    assert repr(TokenTree([])) == "TokenTree, 0 nodes"
    drawn = TokenTree([65, 10]).draw(lambda ids: "".join(map(chr, ids)))
    assert drawn == "TokenTree, 2 nodes\n└─ 0: 'A'\n   └─ 1: '\\n'"
