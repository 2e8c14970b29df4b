"""What a drafter proposes for a round, and the batch that the target verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from specdec.tree import TokenTree


class ProposalKind(Enum):
    """How the tokens of a proposal came about; the acceptance rule follows from it."""

    DETERMINISTIC = auto()
    """Chosen, not drawn: the draft distribution is one-hot (n-grams, a greedy drafter)."""
    IID = auto()
    """Every child was drawn from its distribution, siblings independently."""
    WITHOUT_REPLACEMENT = auto()
    """Siblings were drawn one after the other, in node order, without those drawn before."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one sequence.

    Attributes:
        tree: the drafts. The last emitted token, below which the roots hang, is not in it.
        kind: how the tokens came about.
        draft_probs: float32 [n, V], row i is the distribution from which node i was drawn, after the same
            logits processing as the target's; None for DETERMINISTIC.
        confidence: the drafter's own hint, larger is surer, on the drafter's own scale (n-grams: the length
            of the match in tokens); None if it has none.

    Raises:
        ValueError: `draft_probs` does not fit `tree` and `kind`.
    """

    tree: TokenTree
    kind: ProposalKind
    draft_probs: Tensor | None = None
    confidence: float | None = None

    def __post_init__(self) -> None:
        probs = self.draft_probs
        if self.kind is ProposalKind.DETERMINISTIC:
            if probs is not None:
                raise ValueError(f"draft_probs: got {_describe(probs)}, want None for {self.kind.name}")
        elif probs is None or probs.dtype != torch.float32 or probs.ndim != 2 or len(probs) != len(self.tree):
            got = "None" if probs is None else _describe(probs)
            raise ValueError(
                f"draft_probs: got {got}, want float32 [{len(self.tree)}, V] for {self.kind.name}"
            )

    @staticmethod
    def empty() -> Proposal:
        """No drafts: the round is a plain decode step."""
        return _EMPTY

    def truncate(self, nodes: int) -> Proposal:
        """The proposal of the first `nodes` nodes (all, where it has no more)."""
        if nodes >= len(self.tree):
            return self
        if nodes == 0:
            return _EMPTY
        probs = None if self.draft_probs is None else self.draft_probs[:nodes]
        return Proposal(self.tree.truncate(nodes), self.kind, probs, self.confidence)


def _describe(probs: Tensor) -> str:
    return f"{str(probs.dtype).removeprefix('torch.')} {list(probs.shape)}"


_EMPTY = Proposal(TokenTree(()), ProposalKind.DETERMINISTIC)


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """The nodes of a round. Node 0 of every row is the sequence's last emitted token, draft i is node i + 1.

    Attributes:
        tokens: int64 [B, N], N = 1 + the most drafts of a row; 0 beyond a row's length.
        parents: int32 [B, N], -1 for node 0 and beyond a row's length; None where all rows are chains.
        lengths: int32 [B], nodes of each row.
    """

    tokens: Tensor
    parents: Tensor | None
    lengths: Tensor


def batch_proposals(root_tokens: Sequence[int], proposals: Sequence[Proposal]) -> ProposalBatch:
    """Puts each sequence's drafts below its last emitted token.

    Args:
        root_tokens: [B] last emitted token of each sequence.
        proposals: [B] its drafts.

    Raises:
        ValueError: the two differ in length.
    """
    if len(root_tokens) != len(proposals):
        raise ValueError(f"proposals: got {len(proposals)}, want {len(root_tokens)}, one for each root token")
    lengths = [1 + len(p.tree) for p in proposals]
    nodes = max(lengths, default=1)
    tokens = [
        [root, *p.tree.tokens, *(0,) * (nodes - length)]
        for root, p, length in zip(root_tokens, proposals, lengths, strict=True)
    ]
    parents = None
    if not all(p.tree.is_chain for p in proposals):
        rows = [
            [-1, *(above + 1 for above in p.tree.parents), *(-1,) * (nodes - length)]
            for p, length in zip(proposals, lengths, strict=True)
        ]
        parents = torch.from_numpy(np.array(rows, np.int32))
    # numpy reads nested lists about three times as fast as torch.tensor does.
    return ProposalBatch(
        torch.from_numpy(np.array(tokens, np.int64).reshape(len(proposals), nodes)),
        parents,
        torch.from_numpy(np.array(lengths, np.int32)),
    )
