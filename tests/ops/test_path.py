"""Paths follow their tree: `check_path`."""

from __future__ import annotations

import pytest
import torch

from ops.cases import int32, random_parents
from specdec.ops import check_path

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
        ([[0, 1]], [1, 1], TREE, "got 1 rows, want the 2 of slots"),
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
    with pytest.raises(ValueError, match=r"^path_lengths: got 1 rows, want the 2 of parents"):
        check_path(None, int32([1]), TREE)
    with pytest.raises(ValueError, match=r"^parents: got 2 rows, want the 1 of path"):
        check_path(int32([[0]]), None, TREE)


def test_what_is_not_inspected() -> None:
    wild = int32([[7, 0], [0, 2]])
    check_path(wild, None, TREE, slots=int32([-1, 0]))
    check_path(wild, int32([0, 9]), TREE)  # lengths are clamped, as the operators clamp them
    check_path(wild, int32([-5, 1]), TREE)
    check_path(None, int32([9, 9]), None)
    check_path(int32([[0, 1, 2]]), None, None)
