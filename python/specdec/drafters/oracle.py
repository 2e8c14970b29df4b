"""A drafter that knows the answer, for controlled-acceptance studies. Never a way to generate text faster."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from torch import Tensor

from specdec._checks import check_integer, check_number
from specdec.acceptance.proposal import ProposalKind
from specdec.drafters.base import DraftRequest
from specdec.drafters.proposal import Proposal
from specdec.models.features import Feature, NodeFeatures
from specdec.tree import TokenTree


class OracleDrafter:
    """Proposes the target's own next tokens, each right with probability p, independently.

    Args:
        continuations: (prompt, tokens that the target's greedy decoding gives after it), from a run done
            before.
        vocab_size: V; a wrong token is another one of these.
        p: chance that a proposed token is the right one, in [0, 1].
        seed: which tokens are wrong; a sequence's errors depend on it, its prompt and the position only.

    Raises:
        ValueError: `p` or `vocab_size` is out of its range.
    """

    name = "oracle"
    features: Sequence[Feature] = ()
    draws = False

    def __init__(
        self,
        continuations: Iterable[tuple[Sequence[int], Sequence[int]]],
        *,
        vocab_size: int,
        p: float = 1.0,
        seed: int = 0,
    ) -> None:
        check_number("p", p, 0.0, 1.0)
        check_integer("vocab_size", vocab_size, 2)
        self._continuations = {tuple(prompt): tuple(tokens) for prompt, tokens in continuations}
        self._vocab_size = vocab_size
        self._p = p
        self._seed = seed
        self._known: dict[int, tuple[int, ...]] = {}
        self._proposed: dict[int, tuple[int, ...]] = {}
        self._emitted: dict[int, int] = {}

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Looks the prompt's continuation up.

        Raises:
            ValueError: the prompt is not among the continuations.
        """
        known = self._continuations.get(tuple(prompt))
        if known is None:
            raise ValueError(
                f"prompt: the oracle has no continuation for this prompt of {len(prompt)} tokens; "
                "decode it first"
            )
        draw = random.Random(hash((self._seed, *prompt)))
        self._known[slot] = known
        self._proposed[slot] = tuple(
            t
            if draw.random() < self._p
            else (t + 1 + draw.randrange(self._vocab_size - 1)) % self._vocab_size
            for t in known
        )
        self._emitted[slot] = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """A chain of the next tokens for each request."""
        proposals = []
        for r in requests:
            at = self._emitted[r.slot]
            tokens = self._proposed[r.slot][at : at + min(r.max_nodes, r.max_depth)]
            proposals.append(
                Proposal(TokenTree.from_chain(tokens), ProposalKind.DETERMINISTIC)
                if tokens
                else Proposal.empty()
            )
        return proposals

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """Moves on by the emitted tokens."""
        self._emitted[slot] += len(tokens)

    def end(self, slot: int) -> None:
        """Forgets the sequence."""
        for table in (self._known, self._proposed, self._emitted):
            table.pop(slot, None)
