"""Paths follow their tree: `check_path`, and the cache, which knows the tree and asks before it writes."""

from __future__ import annotations

import pytest
import torch

from ops.cases import int32, random_factors, random_parents
from specdec.cache import DecodingCache, LayerFactors, LayerSpec, Round
from specdec.ops import Factors, check_path

TREE = int32([[-1, 0, 0, 1, 2, -1]] * 2)  # 0 -> 1 -> 3, 0 -> 2 -> 4, and the root 5


def walk(parents: list[int], node: int) -> list[int]:
    return [*walk(parents, parents[node]), node] if node >= 0 else []


@pytest.mark.parametrize("seed", range(5))
def test_every_walk_passes_and_every_other_ascending_list_fails(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    parents = random_parents(rng, 1, 7)
    walks = [walk(parents[0].tolist(), node) for node in range(7)]
    for bits in range(1 << 7):
        nodes = [i for i in range(7) if bits >> i & 1]
        path, count = int32([[*nodes, *[99] * (7 - len(nodes))]]), int32([len(nodes)])
        if nodes and nodes not in walks:
            with pytest.raises(
                ValueError, match=r"^path: row 0 entry \d is node \d with parent -?\d, want a "
            ):
                check_path(path, count, parents)
        else:
            check_path(path, count, parents)


@pytest.mark.parametrize(
    ("path", "lengths", "parents", "message"),
    [
        (
            [[0, 1], [0, 3]],
            None,
            TREE,
            "row 1 entry 1 is node 3 with parent 1, want a child of node 0: a ",
        ),
        (
            [[1, 3]] * 2,
            None,
            TREE,
            "row 0 entry 0 is node 1 with parent 0, want a root: a path runs from ",
        ),
        ([[0, 6]] * 2, None, TREE, "row 0 entry 1 is 6, want a node of the tree"),
        ([[0, -2]] * 2, None, None, "row 0 entry 1 is -2, want a node of the tree"),
        ([[0, 2]] * 2, None, None, "row 0 entry 1 is node 2 with parent 1, want a child of node 0"),
        (None, [2, 3], TREE, "row 1 entry 2 is node 2 with parent 0, want a child of node 1"),
        ([[0, 1]], [1, 1], TREE, "got 1 rows, want 2"),
        ([0, 1], None, TREE, r"got shape \[2\], want two dimensions"),
    ],
)
def test_what_is_wrong_is_named(path, lengths, parents, message: str) -> None:
    with pytest.raises(ValueError, match=f"^path: {message}"):
        check_path(
            None if path is None else int32(path),
            None if lengths is None else int32(lengths),
            parents,
            slots=int32([0, 1]),
        )


def test_other_rows_are_named() -> None:
    with pytest.raises(ValueError, match=r"^path_lengths: got 1 rows, want 2"):
        check_path(None, int32([1]), TREE)
    with pytest.raises(ValueError, match=r"^parents: got 2 rows, want 1"):
        check_path(int32([[0]]), None, TREE)


def test_what_is_not_inspected() -> None:
    wild = int32([[7, 0], [0, 2]])
    check_path(wild, None, TREE, slots=int32([-1, 0]))
    check_path(wild, int32([0, 9]), TREE)  # lengths are clamped, as the operators clamp them
    check_path(wild, int32([-5, 1]), TREE)
    check_path(None, int32([9, 9]), None)
    check_path(int32([[0, 1, 2]]), None, None)


def test_cache_refuses_a_path_off_its_tree_before_it_writes() -> None:
    spec = LayerSpec(heads=2, value_dim=32, key_dim=32, conv_channels=8, conv_width=4)
    cache = DecodingCache([spec], slots=2)
    rng = torch.Generator().manual_seed(1)

    def round_(parents: torch.Tensor | None) -> Round:
        factors: Factors = random_factors(rng, 2, 6, 1, 2, 32, 32, "head")
        return Round((LayerFactors(factors, torch.randn(2, 6, 8)),), int32([0, 1]), parents)

    cache.defer(round_(TREE), int32([[0, 2, 4], [0, 1, 3]]), int32([3, 3]))
    before = [t.clone() for t in (*cache.state, cache.conv[0])]
    crossed = int32([[0, 1, 4], [0, 1, 3]])
    for take in (cache.commit, cache.defer):
        with pytest.raises(
            ValueError, match=r"^path: row 0 entry 2 is node 4 with parent 2, want a child of node 1"
        ):
            take(round_(TREE), crossed, int32([3, 3]))
        with pytest.raises(
            ValueError, match=r"^path: row 0 entry 2 is node 2 with parent 0, want a child of node 1"
        ):
            take(round_(TREE), None, int32([3, 0]))
    assert cache.has_pending  # what waited before still waits
    assert all(torch.equal(a, b) for a, b in zip(before, (*cache.state, cache.conv[0]), strict=True))
    cache.commit(round_(TREE), crossed, int32([2, 3]))  # the wrong entry lies beyond the length
    assert not torch.equal(before[0], cache.state[0])
