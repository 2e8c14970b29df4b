"""Drafts from the text itself: what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec import _host
from specdec._checks import check_integer
from specdec.acceptance.proposal import ProposalKind
from specdec.drafters.base import DraftRequest
from specdec.drafters.proposal import Proposal
from specdec.models.features import Feature
from specdec.tree import TokenTree

_LONGEST = 1 << 20  # far beyond any use, and far from the limits of an int32


class NGramDrafter:
    """Proposes the continuation of the most recent earlier occurrence of the longest suffix that has one.

    The suffix is looked up in a suffix automaton over prompt and output (as in SAM Decoding, arXiv
    2411.10666), one a sequence, which a token extends in amortised constant time. A proposal's `confidence`
    is the length of the match.

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
    free_proposals = True

    def __init__(self, min_match: int = 2, max_match: int = 32, branches: int = 1) -> None:
        check_integer("min_match", min_match, 1, _LONGEST)
        check_integer("max_match", max_match, min_match, _LONGEST)
        check_integer("branches", branches, 1, _LONGEST)
        self._min_match = min_match
        self._max_match = max_match
        self._branches = branches
        self._automata: dict[int, _host.SuffixAutomaton] = {}

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
            if tokens:
                tree = TokenTree.unchecked(tokens, parents)
                proposals.append(Proposal(tree, ProposalKind.DETERMINISTIC, confidence=float(match)))
            else:
                proposals.append(Proposal.empty())
        return proposals

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: Tensor | None = None
    ) -> None:
        """Indexes the emitted tokens."""
        self._automaton(slot).extend(tokens)

    def end(self, slot: int) -> None:
        """Forgets the sequence."""
        self._automata.pop(slot, None)

    def _automaton(self, slot: int) -> _host.SuffixAutomaton:
        automaton = self._automata.get(slot)
        if automaton is None:
            raise ValueError(
                f"slot: got {slot}, want a slot in which a sequence began ({sorted(self._automata)})"
            )
        return automaton
