"""Drafters that behave badly on purpose."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from specdec.drafters.base import DraftRequest
from specdec.drafters.proposal import Proposal, ProposalKind
from specdec.models.features import Feature
from specdec.tree import TokenTree

Continuations = dict[tuple[int, ...], Sequence[int]]


class RandomTreeDrafter:
    """Knows the target's continuation and hides pieces of it in random trees: true prefixes, wrong siblings,
    wrong branches below right nodes, nothing at all, and nodes in another topological order than depth first.

    Args:
        continuations: greedy tokens by prompt.
        vocab_size: V.
        seed: of everything.
        chains_only: propose chains (right, wrong from some point, or empty).
    """

    name = "random-tree"
    features: Sequence[Feature] = ()
    draws = False

    def __init__(
        self, continuations: Continuations, vocab_size: int, seed: int = 0, *, chains_only: bool = False
    ) -> None:
        self._continuations = continuations
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._chains_only = chains_only
        self._known: dict[int, Sequence[int]] = {}
        self._at: dict[int, int] = {}

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._known[slot] = self._continuations[tuple(prompt)]
        self._at[slot] = 0

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: Tensor | None = None
    ) -> None:
        self._at[slot] += len(tokens)

    def end(self, slot: int) -> None:
        self._known.pop(slot)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._one(r) for r in requests]

    def _one(self, request: DraftRequest) -> Proposal:
        r = self._random
        budget = min(request.max_nodes, 12)
        if budget == 0 or request.max_depth == 0 or r.random() < 0.2:
            return Proposal.empty()
        at = self._at[request.slot]
        truth = list(self._known[request.slot][at : at + r.randint(0, request.max_depth)])
        paths = []
        for _ in range(1 if self._chains_only else r.randint(1, 4)):
            path = truth[: r.randint(0, len(truth))]
            path += [r.randrange(self._vocab_size) for _ in range(r.randint(0, 3))]
            paths.append(path[: request.max_depth])
        tree = TokenTree.from_paths([p for p in paths if p])
        if len(tree) == 0 or len(tree) > budget:
            return Proposal.empty()
        if not self._chains_only:
            tree = tree.reorder(self._shuffled(tree))
        return Proposal(tree, ProposalKind.DETERMINISTIC)

    def _shuffled(self, tree: TokenTree) -> list[int]:
        """A random topological order of the nodes."""
        order: list[int] = []
        open_nodes = [i for i, p in enumerate(tree.parents) if p < 0]
        while open_nodes:
            node = open_nodes.pop(self._random.randrange(len(open_nodes)))
            order.append(node)
            open_nodes.extend(i for i, p in enumerate(tree.parents) if p == node)
        return order


class WrongDrafter(RandomTreeDrafter):
    """Always wrong: the token after the right one."""

    name = "wrong"

    def _one(self, request: DraftRequest) -> Proposal:
        at = self._at[request.slot]
        truth = self._known[request.slot][at : at + min(request.max_nodes, request.max_depth, 5)]
        tokens = [(t + 1) % self._vocab_size for t in truth]
        return (
            Proposal(TokenTree.from_chain(tokens), ProposalKind.DETERMINISTIC) if tokens else Proposal.empty()
        )
