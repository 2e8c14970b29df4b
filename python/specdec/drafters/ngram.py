"""Drafts from the text itself: what followed the last tokens when they occurred before."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Sequence

from torch import Tensor

from specdec import _host
from specdec._checks import check_integer
from specdec.acceptance.proposal import ProposalKind
from specdec.drafters.base import DraftRequest
from specdec.drafters.calibration import RunningRatio, outcomes
from specdec.drafters.proposal import Proposal
from specdec.drafters.tree import best_first
from specdec.models.features import Feature, NodeFeatures
from specdec.tree import TokenTree

_LONGEST = 1 << 20  # far beyond any use, and far from the limits of an int32
_MATCHES = (3, 4, 6, 9, 17, 32)  # where classes of matches begin, the first at 0
_PRIORS = (0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95)  # of each class
_SIBLING = 0.2  # chance of a token that followed the match at other times
_PRIOR_WEIGHT = 3.0
_MEMORY = 0.98
_FAR = 0.3  # of the price, which is a mean: some nodes cost less


class MatchChances:
    """Running chance that a draft is right, given that its parent is, by the length of the match so far.

    The first token after a match is kept apart from those that go on with it: that these follow right drafts
    says that the copy is a good one.
    """

    def __init__(self) -> None:
        self._firsts = [[RunningRatio(_MEMORY, _PRIOR_WEIGHT, prior) for prior in _PRIORS] for _ in range(2)]
        self._siblings = RunningRatio(_MEMORY, _PRIOR_WEIGHT, _SIBLING)

    def chain(self, match: int, nodes: int, least: float) -> tuple[float, ...]:
        """The chances of the nodes of a chain, their paths included, as far as they are at least `least`; of
        the first in any case.
        """
        chances: list[float] = []
        chance, row = 1.0, 0
        for length in range(match, match + nodes):
            place = bisect(_MATCHES, length)
            chance *= self._firsts[row][place].value
            if chance < least and row:
                break
            chances.append(chance)
            row = 1
        return tuple(chances)

    def tree(self, match: int, tree: TokenTree) -> list[float]:
        """The chances of the nodes of a tree, their paths included."""
        chances: list[float] = []
        firsts = _first_children(tree)
        for node, (depth, parent) in enumerate(zip(tree.depths, tree.parents, strict=True)):
            above = 1.0 if parent < 0 else chances[parent]
            if node in firsts:
                place, row = bisect(_MATCHES, match + depth), int(depth > 0)
                chances.append(above * self._firsts[row][place].value)
            else:
                chances.append(above * self._siblings.value)
        return chances

    def observe(self, match: int, depth: int, first: bool, kept: bool) -> None:
        """Books a draft whose parent was right; `first`: the first that was proposed after its parent."""
        if not first:
            self._siblings.observe(kept)
            return
        self._firsts[int(depth > 0)][bisect(_MATCHES, match + depth)].observe(kept)


def _first_children(tree: TokenTree) -> Collection[int]:
    """The first child of every node, the last emitted token included."""
    if tree.is_chain:
        return range(len(tree))
    firsts: dict[int, int] = {}
    for node, parent in enumerate(tree.parents):
        firsts.setdefault(parent, node)
    return set(firsts.values())


class NGramDrafter:
    """Proposes the continuation of the most recent earlier occurrence of the longest suffix that has one.

    The suffix is looked up in a suffix automaton over prompt and output (as in SAM Decoding, arXiv
    2411.10666), one a sequence, which a token extends in amortised constant time. The chances of its drafts
    are learned by the length of the match, which a draft makes longer by one.

    Args:
        min_match: shortest suffix, in tokens, that is worth a proposal; at least 1.
        max_match: longest suffix that is compared; longer matches count as this long. At least `min_match`.
        branches: paths a proposal may have. Beyond the first: other tokens that followed the match, most
            recent first, then what followed shorter suffixes; paths merge into a tree.

    Raises:
        ValueError: an argument is out of its range.
    """

    name = "ngram"
    features: Sequence[Feature] = ()
    draws = False

    def __init__(self, min_match: int = 2, max_match: int = 32, branches: int = 1) -> None:
        check_integer("min_match", min_match, 1, _LONGEST)
        check_integer("max_match", max_match, min_match, _LONGEST)
        check_integer("branches", branches, 1, _LONGEST)
        self._min_match = min_match
        self._max_match = max_match
        self._branches = branches
        self._automata: dict[int, _host.SuffixAutomaton] = {}
        self._chances = MatchChances()
        self._proposed: dict[int, tuple[TokenTree, int]] = {}  # by slot: what was proposed last, its match

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Indexes the prompt."""
        automaton = _host.SuffixAutomaton(self._max_match)
        automaton.extend(prompt)
        self._automata[slot] = automaton

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One proposal for each request; empty where no suffix of `min_match` tokens occurred before."""
        proposals = []
        for r in requests:
            # The first path fills up before the next begins: it leaves about half of the nodes to the others.
            share = -(-2 * r.max_nodes // (1 + self._branches))
            tokens, parents, match = self._automaton(r.slot).propose(
                self._min_match, r.max_nodes, min(r.max_depth, share), self._branches
            )
            if not tokens:
                proposals.append(Proposal.empty())
                continue
            if parents is None:
                # What is far from worth a node's price is not verified anyway.
                chances = self._chances.chain(match, len(tokens), _FAR * r.prices.node)
                tree = TokenTree.unchecked(tokens[: len(chances)])
            else:
                tree = TokenTree.unchecked(tokens, parents)
                tree, chances = best_first(tree, self._chances.tree(match, tree))
            self._proposed[r.slot] = tree, match
            proposals.append(Proposal(tree, ProposalKind.DETERMINISTIC, chances=chances))
        return proposals

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """Indexes the emitted tokens and learns from what became of the drafts, verified or not."""
        self._automaton(slot).extend(tokens)
        proposed = self._proposed.pop(slot, None)
        if proposed is not None:
            tree, match = proposed
            firsts = _first_children(tree)
            for node, kept in outcomes(tree, tokens):
                self._chances.observe(match, tree.depths[node], node in firsts, kept)

    def end(self, slot: int) -> None:
        """Forgets the sequence."""
        self._proposed.pop(slot, None)
        self._automata.pop(slot, None)

    def _automaton(self, slot: int) -> _host.SuffixAutomaton:
        automaton = self._automata.get(slot)
        if automaton is None:
            raise ValueError(
                f"slot: got {slot}, want a slot in which a sequence began ({sorted(self._automata)})"
            )
        return automaton
