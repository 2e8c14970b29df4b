"""The candidate tree of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index

import numpy as np
import numpy.typing as npt

from specdec import _host

MAX_NODES: int = _host.MAX_NODES
"""Nodes a tree may have."""


class TokenTree:
    """Candidate tokens and how they hang together; immutable.

    Nodes are in topological order: a node's parent comes before it. Several roots and the empty tree are
    legal, and siblings may carry the same token (children drawn with replacement do).

    Args:
        tokens: [n] token ids, n <= MAX_NODES.
        parents: [n] index of each node's parent, -1 for a root; None for a chain.

    Raises:
        ValueError: a token is no id, a parent does not come before its node, or the lengths differ; the
            message names the node.

    Example:
        >>> tree = TokenTree([5, 8, 9, 8], parents=[-1, 0, 0, 2])
        >>> tree.depths, tree.leaves, tree.path_to(3)
        ((0, 1, 1, 2), (1, 3), (0, 2, 3))
        >>> tree
        TokenTree, 4 nodes
        └─ 0: 5
           ├─ 1: 8
           └─ 2: 9
              └─ 3: 8
    """

    __slots__ = ("_cached_schedule", "_chain", "_parents", "_tokens")

    _tokens: tuple[int, ...]
    _parents: tuple[int, ...]
    _chain: bool
    _cached_schedule: _host.TreeSchedule | None

    def __new__(cls, tokens: Iterable[int], parents: Iterable[int] | None = None) -> TokenTree:
        ids = tuple(map(index, tokens))
        above = tuple(range(-1, len(ids) - 1)) if parents is None else tuple(map(index, parents))
        _host.check_tree(ids, above)
        return cls.unchecked(ids, None if parents is None else above)

    @classmethod
    def unchecked(cls, tokens: tuple[int, ...], parents: tuple[int, ...] | None = None) -> TokenTree:
        """The tree of arguments that are known to be right (see the class), for code on the hot path."""
        tree = object.__new__(cls)
        chain = tuple(range(-1, len(tokens) - 1))
        tree._tokens = tokens
        tree._parents = chain if parents is None else parents
        tree._chain = parents is None or parents == chain
        tree._cached_schedule = None
        return tree

    @classmethod
    def from_chain(cls, tokens: Iterable[int]) -> TokenTree:
        """Each token follows the one before it."""
        return cls(tokens)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Merges token sequences that start at the same place; common prefixes become common nodes.

        Nodes are in the order in which the paths first need them, and no two siblings carry the same token.

        Raises:
            ValueError: a token is no id, or the paths have more than MAX_NODES different prefixes.

        Example:
            >>> TokenTree.from_paths([[5, 8], [5, 9, 8]]).parents
            (-1, 0, 0, 2)
        """
        tokens, parents = _host.merge_paths([tuple(map(index, path)) for path in paths])
        return cls.unchecked(tokens, parents)

    @property
    def tokens(self) -> tuple[int, ...]:
        """[n] token of each node."""
        return self._tokens

    @property
    def parents(self) -> tuple[int, ...]:
        """[n] parent of each node, -1 for a root."""
        return self._parents

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before it; true of the empty tree."""
        return self._chain

    @property
    def depths(self) -> tuple[int, ...]:
        """[n] edges between each node and its root."""
        return tuple(range(len(self._tokens))) if self._chain else tuple(self._schedule.depths)

    @property
    def sizes(self) -> tuple[int, ...]:
        """[n] nodes of the subtree below each node, itself included."""
        return tuple(self._schedule.sizes)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, ascending."""
        inner = set(self._parents)
        return tuple(i for i in range(len(self._tokens)) if i not in inner)

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Heavy-light chains, each from its first node down to a leaf, in the order of the waves.

        A node's largest child (by subtree size, ties to the smaller index) continues its chain; every other
        child and every root starts one.
        """
        return tuple(self._schedule.chains)

    @property
    def waves(self) -> tuple[tuple[int, ...], ...]:
        """Indices into `chains`: those of one wave depend on earlier waves only."""
        return tuple(self._schedule.waves)

    @property
    def depth_first(self) -> tuple[int, ...]:
        """[n] nodes depth first, a node's light children before its heavy one."""
        return tuple(self._schedule.order)

    def children(self, node: int) -> tuple[int, ...]:
        """Children of a node, ascending; of -1, the roots."""
        if node != -1:
            self._check_node(node)
        return tuple(i for i, p in enumerate(self._parents) if p == node)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Nodes from the root down to `node`, both included."""
        self._check_node(node)
        path = []
        while node >= 0:
            path.append(node)
            node = self._parents[node]
        return tuple(reversed(path))

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """bool [n, n]: row i is true at i and at its ancestors."""
        mask: npt.NDArray[np.bool_] = self._schedule.ancestor_mask()
        return mask

    def reorder(self, order: Sequence[int]) -> TokenTree:
        """The same tree with node order[i] as node i.

        Raises:
            ValueError: `order` is no permutation of the nodes, or puts a child before its parent.
        """
        new = {old: i for i, old in enumerate(order)}
        if len(order) != len(self._tokens) or any(i not in new for i in range(len(self._tokens))):
            raise ValueError(f"order: got {list(order)}, want a permutation of the {len(self._tokens)} nodes")
        for i, old in enumerate(order):
            parent = self._parents[old]
            if parent >= 0 and new[parent] > i:
                raise ValueError(f"order: node {old} comes before its parent {parent}")
        return type(self).unchecked(
            tuple(self._tokens[old] for old in order),
            tuple(-1 if self._parents[old] < 0 else new[self._parents[old]] for old in order),
        )

    def truncate(self, nodes: int) -> TokenTree:
        """The tree of the first `nodes` nodes (all, where it has no more)."""
        if nodes < 0:
            raise ValueError(f"nodes: got {nodes}, want 0 or more")
        if nodes >= len(self._tokens):
            return self
        return type(self).unchecked(self._tokens[:nodes], None if self._chain else self._parents[:nodes])

    def draw(self, decode: Callable[[list[int]], str] | None = None) -> str:
        """A drawing, one node a line, in depth-first order.

        Args:
            decode: turns a list of token ids into text, e.g. a tokenizer's `decode`; None shows the ids.
        """
        count = len(self._tokens)
        lines = [f"TokenTree, {count} node{'' if count == 1 else 's'}"]
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self._parents):
            below.setdefault(parent, []).append(node)
        todo = [(node, "", node == below[-1][-1]) for node in reversed(below.get(-1, []))]
        while todo:
            node, indent, last = todo.pop()
            token = self._tokens[node]
            label = str(token) if decode is None else repr(decode([token]))
            lines.append(f"{indent}{'└─' if last else '├─'} {node}: {label}")
            indent += "   " if last else "│  "
            todo += [(child, indent, child == below[node][-1]) for child in reversed(below.get(node, []))]
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self._tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTree):
            return NotImplemented
        return self._tokens == other._tokens and self._parents == other._parents

    def __hash__(self) -> int:
        return hash((self._tokens, self._parents))

    def __reduce__(self) -> tuple[type[TokenTree], tuple[tuple[int, ...], tuple[int, ...]]]:
        return type(self), (self._tokens, self._parents)

    def __repr__(self) -> str:
        return self.draw()

    @property
    def _schedule(self) -> _host.TreeSchedule:
        if self._cached_schedule is None:
            self._cached_schedule = _host.TreeSchedule(self._parents)
        return self._cached_schedule

    def _check_node(self, node: int) -> None:
        if not 0 <= node < len(self._tokens):
            raise ValueError(f"node: got {node}, want 0 to {len(self._tokens) - 1}")
