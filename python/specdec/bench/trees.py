"""Draft trees by top-k, depth and nodes, as SpecLA's tables name them (arXiv 2607.16673)."""

from __future__ import annotations

import random
from collections.abc import Sequence


def grow(top_k: int, depth: int, nodes: int, seed: int = 0) -> list[int]:
    """Parents of a tree that a drafter could have grown: the best `nodes` of random log-probabilities.

    A chain of the full depth comes first, so that the tree is as deep as its name says; then always the best
    child of any node, at most `top_k` a node. Parents come before their children.
    """
    rng = random.Random(f"{top_k} {depth} {nodes} {seed}")
    parents, depths, scores, children = [-1], [1], [0.0], [0]

    def append(parent: int, score: float) -> None:
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(score)
        children.append(0)
        children[parent] += 1

    while depths[-1] < depth and len(parents) < nodes:
        append(len(parents) - 1, scores[-1] - rng.expovariate(2.0))
    while len(parents) < nodes:
        open_nodes = [i for i in range(len(parents)) if depths[i] < depth and children[i] < top_k]
        parent = max(open_nodes, key=lambda i: scores[i] - children[i])
        append(parent, scores[parent] - children[parent] - rng.expovariate(1.0))
    return parents


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Nodes from the root to each leaf."""
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths
