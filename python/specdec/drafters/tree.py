"""A request's tree of drafts while it grows, level by level.

Chains, fixed trees and pruned trees are one growth. A node's chance is the product of the chances along its
path, so no child's is above its parent's, and the nodes of greatest chance are a tree. A level expands the
nodes of the level above that are among the best `max_nodes` of all so far: a node that is not cannot be in
the best tree, nor can its children. Cut to size by chance at the end, the result is the best tree of that
size among all that could have been drafted (for a pruned shape whose levels were not cut by prices or room).

    chances    0.6 ── 0.5 ── 0.45         best three of these: 0.6, 0.5, 0.45;
            0.3 ── 0.2                    of two: 0.6, 0.5
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from specdec.acceptance.proposal import ProposalKind
from specdec.acceptance.tensors import SamplingTensors, seed_bits
from specdec.drafters.base import DraftRequest
from specdec.drafters.draws import Parent, inverse_temperature
from specdec.drafters.proposal import Proposal
from specdec.drafters.shape import TreeShape
from specdec.ops import DraftSampling, GrownTree, TreeRequest
from specdec.tree import TokenTree

MOST_RUN = 48  # nodes of a pruned tree that a drafter runs in a round, those included that are left out later
# Of each level, where tokens are drawn: a batch pads every level to its widest row, and what is drawn for a
# row may not depend on the others, so the widths are fixed beforehand. MOST_RUN in all.
DRAWN_WIDTHS = (8, 8, 4, 4, 2, 2, *(1,) * 20)


def as_said(probability: float, rank: int) -> float:
    """The chance of a child where nothing is learned about it: its probability. Drafts that are drawn come
    about from their own rows alone, so that a seed repeats them.
    """
    return probability


def best_first_order(chances: Sequence[float]) -> list[int]:
    """Nodes by falling chance, of a tree in which parents come first and no child's chance is above its
    parent's: its first n are the best tree of n nodes. Equal chances stay in their order, so that a parent
    stays before its child.
    """
    return sorted(range(len(chances)), key=chances.__getitem__, reverse=True)


def subtree(tokens: Sequence[int], parents: Sequence[int], order: Sequence[int], root: int) -> TokenTree:
    """The nodes of `order`, in that order, in which parents come first; the parent `root` stands for the last
    emitted token.
    """
    place = {root: -1}
    place.update((node, i) for i, node in enumerate(order))
    return TokenTree.unchecked(
        tuple([tokens[node] for node in order]), tuple([place[parents[node]] for node in order])
    )


def best_first(tree: TokenTree, chances: Sequence[float]) -> tuple[TokenTree, tuple[float, ...]]:
    """The tree in the order of its nodes' chances, which do not rise from parent to child."""
    order = best_first_order(chances)
    if order == list(range(len(tree))):
        return tree, tuple(chances)
    return tree.reorder(order), tuple([chances[node] for node in order])


class GrowingTree:
    """The tree of one request.

    Node 0 is the last emitted token, draft i is node i + 1.

    Args:
        request: what was asked for.
        shape: what the tree may look like.
        ends: tokens that end a text: drafted, but nothing below them.
        drawn: whether tokens are drawn at random. Then whatever was drawn stays.

    Attributes:
        tokens: [1 + n] of each node; -1 for node 0.
        parents: [1 + n] node above; -1 for node 0.
        chances: [1 + n] of the node's path.
        said: [1 + n] the drafter's (probability of the node among its siblings, rank).
        run: nodes that the drafter has run, node 0 left out.
        shape, drawn: as given.
        level: nodes of the last level, as they were grown.
        depth: levels so far.
        deepest: most levels. A fixed tree gets no deeper than its shape is without end tokens, so that no
            level is wider than that of the largest request.
    """

    def __init__(self, request: DraftRequest, shape: TreeShape, ends: frozenset[int], drawn: bool) -> None:
        self.request = request
        self.tokens = [-1]
        self.parents = [-1]
        self.chances = [1.0]
        self.said: list[tuple[float, int]] = [(1.0, 0)]
        self.run = 0
        self.shape = shape
        self._ends = ends
        self.drawn = drawn
        self.depth = 0
        self._rows = [-1]
        self.level = [0]
        self._closed: set[int] = set()
        self.deepest = request.max_depth
        if shape.tau is None:
            self.deepest = min(self.deepest, len(shape.levels(request.max_nodes)))
        elif drawn:
            self.deepest = min(self.deepest, request.max_nodes, 1 + len(DRAWN_WIDTHS))

    @property
    def most_run(self) -> int:
        """Nodes that drafting runs at most, the last emitted token left out.

        Of fixed and of drawn trees in one batch the largest of these numbers is enough for all, although each
        level is padded to its widest row. Other trees can be cut to what fits.
        """
        request = self.request
        if self.shape.tau is None:
            return request.max_nodes - 1
        if self.drawn:
            return sum(DRAWN_WIDTHS[: max(min(request.max_depth, request.max_nodes) - 1, 0)])
        return min(2 * request.max_nodes, MOST_RUN)

    @property
    def reserved(self) -> int:
        """Nodes that the levels below the last one may still run, of a tree that would be another one if it
        were cut; 0 for others.
        """
        if self.shape.tau is None:
            return max(self.most_run - self.run, 0)
        if not self.drawn:
            return 0
        return sum(DRAWN_WIDTHS[self.depth : self.deepest - 1])

    @property
    def drafts(self) -> int:
        """Nodes so far, node 0 left out."""
        return len(self.tokens) - 1

    def expandable(self) -> list[int]:
        """Nodes of the last level that may get children, best first."""
        request, level = self.request, self.level
        if self.depth >= self.deepest:
            return []
        ends, tokens, closed = self._ends, self.tokens, self._closed
        open_nodes = [node for node in level if tokens[node] not in ends and node not in closed]
        chances = self.chances
        if self.shape.tau is None:
            left = request.max_nodes - self.drafts
            return open_nodes[: max(left, 0)]
        floor = self.floor
        if not self.drawn and self.drafts > request.max_nodes:
            floor = max(floor, sorted(chances[1:], reverse=True)[request.max_nodes - 1])
        if self.drawn:
            room = min(request.max_nodes - self.drafts, DRAWN_WIDTHS[max(self.depth - 1, 0)])
        else:
            room = self.most_run - self.run
        good = [node for node in open_nodes if chances[node] >= floor]
        good.sort(key=lambda node: -chances[node])
        return good[: max(room, 0)]

    def close(self, nodes: Iterable[int]) -> None:
        """Nothing more is drafted below these nodes."""
        self._closed.update(nodes)

    @property
    def floor(self) -> float:
        """The least chance of a node that stays."""
        if self.shape.tau is None:
            return 0.0
        # Before anything is drafted there is no best draft: the root's chance bounds it.
        best = max(self.chances[1:], default=1.0)
        return best * math.exp(-self.shape.tau)

    def path(self, node: int) -> tuple[int, ...]:
        """Drafted tokens down to a node, its own included."""
        found = []
        while node > 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(found))

    def asked(self, nodes: Sequence[int]) -> list[Parent]:
        """Asks for the children of these nodes: of a fixed tree all first children before any second one, as
        far as `max_nodes` go.

        Returns:
            A `Parent` for each of them, in their order.
        """
        children = self.shape.children(self.depth)
        counts = [children] * len(nodes)
        if nodes and (self.shape.tau is None or self.drawn):
            left = min(self.request.max_nodes - self.drafts, children * len(nodes))
            each, more = divmod(left, len(nodes))
            counts = [each + (i < more) for i in range(len(nodes))]
        # Where children are drawn, how many is fixed before: as many tokens as are likely enough.
        floor = self.floor if self.drawn else 0.0
        floors = [floor / self.chances[node] if floor > 0.0 else 0.0 for node in nodes]
        edited = self.request.sampling.edited
        return [
            Parent(self.request, node, self.path(node) if edited else (), count, least)
            for node, count, least in zip(nodes, counts, floors, strict=True)
        ]

    def next_level(self) -> None:
        """Begins a level, to which `grow` adds."""
        self.level = []
        self.depth += 1

    def grow(
        self,
        parent: int,
        tokens: Sequence[int],
        probabilities: Sequence[float],
        chance: Callable[[float, int], float],
        row: int = -1,
    ) -> None:
        """Adds children of a node of the level above.

        Args:
            parent: the node.
            tokens: its children, the likeliest first, or as they were drawn.
            probabilities: of each, given the parent.
            chance: from a probability and a rank to the chance that the child is kept where its parent was.
            row: which row of probabilities they were drawn from; -1 where they were not.
        """
        above = self.chances[parent]
        for rank, (token, probability) in enumerate(zip(tokens, probabilities, strict=True)):
            self.level.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.chances.append(above * chance(probability, rank))
            self.said.append((probability, rank))
            self._rows.append(row)

    def at_once(self, root: int) -> TreeRequest:
        """What `ops.draft_tree` takes for this tree, whose nodes `take` then adds.

        Args:
            root: the prefix's node of the last emitted token.
        """
        request = self.request
        return TreeRequest(
            max_nodes=request.max_nodes,
            max_depth=self.deepest,
            root=root,
            table=0 if request.sampling.greedy else 1,  # in the order of `Experience.rules`
            node_price=request.prices.node if request.prices.second > 0.0 else None,
            inverse_temperature=inverse_temperature(request.sampling),
        )

    def take(self, grown: GrownTree) -> None:
        """Takes all nodes of a tree that `ops.draft_tree` grew by the same rules; it is then proposed, and
        grows no further.
        """
        self.tokens += grown.tokens
        self.parents += grown.parents
        self.chances += grown.chances
        self.said += zip(grown.probabilities, grown.ranks, strict=True)
        self._rows += grown.rows

    def proposal(self, probs: Tensor | None, replacement: bool) -> tuple[Proposal, list[int]]:
        """The tree as it is proposed.

        Args:
            probs: rows that tokens were drawn from.
            replacement: whether siblings were drawn independently.

        Returns:
            The proposal, and for each of its nodes the node here.
        """
        order = list(range(1, len(self.tokens)))
        if not order:
            return Proposal.empty(), order
        if self.drawn:
            tree = TokenTree.unchecked(tuple(self.tokens[1:]), tuple([p - 1 for p in self.parents[1:]]))
            kind = ProposalKind.IID if replacement else ProposalKind.WITHOUT_REPLACEMENT
            return Proposal(tree, kind, probs, tuple(self._rows[1:])), order
        floor, chances = self.floor, self.chances
        # The sort is stable and a parent's number is smaller, so with equal chances it stays the first.
        order = [node for node in order if chances[node] >= floor]
        order.sort(key=chances.__getitem__, reverse=True)
        del order[self.request.max_nodes :]
        tree = subtree(self.tokens, self.parents, order, root=0)
        return Proposal(
            tree, ProposalKind.DETERMINISTIC, chances=tuple([chances[node] for node in order])
        ), order


def at_once(trees: Sequence[GrowingTree]) -> bool:
    """Whether `ops.draft_tree` grows these trees, if the drafter's model can: trees of the likeliest tokens,
    or chains of drawn ones, whose rows depend on nothing but themselves.
    """
    drawn = [tree.drawn for tree in trees]
    if any(tree.request.sampling.edited for tree in trees):
        return False
    return not any(drawn) or (
        all(drawn) and all(tree.shape.is_chain and tree.shape.tau is None for tree in trees)
    )


def drawing_of(trees: Sequence[GrowingTree]) -> DraftSampling | None:
    """How the tokens of these trees, all of one kind, are drawn; None where they are not."""
    if not trees[0].drawn:
        return None
    requests = [tree.request for tree in trees]
    return DraftSampling(
        *SamplingTensors.of([request.sampling for request in requests]),
        seeds=seed_bits([request.seed for request in requests]),
        positions=torch.tensor([request.position for request in requests], dtype=torch.int64),
    )
