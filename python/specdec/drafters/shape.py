"""The shape of a drafted tree, by depth."""

from __future__ import annotations

from collections.abc import Sequence

from specdec._checks import check_integer, shown
from specdec.tree import MAX_NODES


class TreeShape:
    """How many children each node of a drafted tree gets, by depth.

    It is the most that is drafted. A drafter may leave out what would hang below a node for what was drawn so
    far, but never drop what was drawn (docs/lossless.md, What a drafter may do).

    Args:
        branching: children of the last emitted token, of each of these, and so on; the last number goes on
            for all greater depths. (1,) is a chain, (2, 2, 1) four chains below two pairs of siblings.

    Raises:
        ValueError: `branching` is empty, or a number in it is not 1 to MAX_NODES.

    Example:
        >>> TreeShape((2, 1)).levels(7)
        (2, 4, 6, 7)
        >>> TreeShape((2, 1)).layout(3, 9)
        (((0, 0), (0, 1)), ((0, 0),))
    """

    def __init__(self, branching: Sequence[int] = (1,)) -> None:
        if not isinstance(branching, Sequence) or isinstance(branching, str) or not branching:
            raise ValueError(
                f"branching: got {shown(branching)}, want numbers of children by depth, e.g. (2, 2, 1)"
            )
        for count in branching:
            check_integer("branching", count, 1, MAX_NODES)
        self.branching = tuple(branching)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Reads "2,2,1".

        Raises:
            ValueError: it is no such list.
        """
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and 1 <= int(part) <= MAX_NODES for part in parts):
            raise ValueError(
                f"draft_tree: got {text!r}, want numbers of children by depth, 1 to {MAX_NODES}, "
                "such as 2,2,1"
            )
        return cls([int(part) for part in parts])

    def levels(self, max_nodes: int) -> tuple[int, ...]:
        """Nodes down to depth 1, 2, ... as far as `max_nodes` go; the last level may be cut."""
        sizes: list[int] = []
        width, total = 1, 0
        while total < max_nodes:
            width = min(width * self._children(len(sizes)), max_nodes)
            total = min(total + width, max_nodes)
            sizes.append(total)
        return tuple(sizes)

    def layout(self, max_nodes: int, max_depth: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The nodes of each level as (place of the parent in the level above, rank among its siblings).

        Above the first level is one node, the last emitted token. All first children come first, then all
        second ones, so that a cut level takes siblings from every parent alike.
        """
        levels: list[tuple[tuple[int, int], ...]] = []
        width, left = 1, max_nodes
        while left > 0 and len(levels) < max_depth:
            children = self._children(len(levels))
            level = tuple((place, rank) for rank in range(children) for place in range(width))[:left]
            levels.append(level)
            width, left = len(level), left - len(level)
        return tuple(levels)

    def _children(self, depth: int) -> int:
        return self.branching[min(depth, len(self.branching) - 1)]
