"""What a drafted tree may look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec._checks import check_integer, check_number, shown
from specdec.tree import MAX_NODES


@dataclass(frozen=True, init=False)
class TreeShape:
    """How many children each node of a drafted tree gets, by depth, and which nodes stay.

    Without `tau` the tree is fixed: as many levels as the limit of nodes allows, whatever the drafter thinks
    of them. With it the tree is pruned: of all candidates the nodes with the best chances stay, none with a
    chance below exp(-tau) of the best one's.

    It is the most that is drafted. What was drawn at random is never dropped (docs/lossless.md, What a
    drafter may do); there pruning means that unlikely nodes get no children.

    Args:
        branching: children of the last emitted token, of each of these, and so on; the last number goes on
            for all greater depths. (1,) is a chain, (2, 2, 1) four chains below two pairs of siblings.
        tau: how far below the best node's log-probability a node may be, in nats; None: as far as it likes.

    Raises:
        ValueError: `branching` is empty, a number in it is not 1 to MAX_NODES, or `tau` is negative.

    Example:
        >>> TreeShape((2, 1)).levels(7)
        (2, 4, 6, 7)
    """

    branching: tuple[int, ...]
    tau: float | None

    def __init__(self, branching: Sequence[int] = (1,), tau: float | None = None) -> None:
        if not isinstance(branching, Sequence) or isinstance(branching, str) or not branching:
            raise ValueError(
                f"branching: got {shown(branching)}, want numbers of children by depth, e.g. (2, 2, 1)"
            )
        for count in branching:
            check_integer("branching", count, 1, MAX_NODES)
        if tau is not None:
            check_number("tau", tau, 0.0, math.inf)
        object.__setattr__(self, "branching", tuple(branching))
        object.__setattr__(self, "tau", tau)

    @classmethod
    def pruned(cls, top_k: int = 4, tau: float = 4.0) -> TreeShape:
        """Up to `top_k` children anywhere; the best nodes stay (SpecLA's trees, arXiv 2607.16673)."""
        return cls((top_k,), tau)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Reads "2,2,1", or "auto" for a pruned tree.

        Raises:
            ValueError: it is neither.
        """
        if text.strip() == "auto":
            return cls.pruned()
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and 1 <= int(part) <= MAX_NODES for part in parts):
            raise ValueError(
                f"draft_tree: got {text!r}, want auto or numbers of children by depth, 1 to {MAX_NODES}, "
                "such as 2,2,1"
            )
        return cls([int(part) for part in parts])

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return set(self.branching) == {1}

    def children(self, depth: int) -> int:
        """Most children of a node at this depth; the last emitted token is at depth 0."""
        return self.branching[min(depth, len(self.branching) - 1)]

    def levels(self, max_nodes: int) -> tuple[int, ...]:
        """Nodes down to depth 1, 2, ... as far as `max_nodes` go; the last level may be cut. A pruned tree is
        taken for a chain of that depth, which it is where its drafter is sure.
        """
        if self.tau is not None:
            return tuple(range(1, max_nodes + 1))
        sizes: list[int] = []
        width, total = 1, 0
        while total < max_nodes:
            width = min(width * self.children(len(sizes)), max_nodes)
            total = min(total + width, max_nodes)
            sizes.append(total)
        return tuple(sizes)
