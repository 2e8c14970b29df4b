"""What acceptance reads of a drafter's proposal."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Protocol

from torch import Tensor


class ProposalKind(Enum):
    """How the tokens of a proposal came about; which rules are exact follows from it."""

    DETERMINISTIC = auto()
    """Chosen, not drawn: the draft distribution is one-hot (n-grams, a greedy drafter)."""
    IID = auto()
    """Every child was drawn from its distribution, siblings independently."""
    WITHOUT_REPLACEMENT = auto()
    """Siblings were drawn one after the other, in node order, without those drawn before."""


class TreeLike(Protocol):
    """Drafts without the round's root token."""

    @property
    def parents(self) -> Any:
        """n ints, -1 for a child of the root token."""


class ProposalLike(Protocol):
    """`drafters.Proposal`, with rows of any precision."""

    @property
    def tree(self) -> TreeLike:
        """The drafts."""

    @property
    def kind(self) -> ProposalKind:
        """How their tokens came about."""

    @property
    def draft_probs(self) -> Tensor | None:
        """[R, V] processed rows that tokens were drawn from; None if DETERMINISTIC."""

    @property
    def rows(self) -> Sequence[int] | None:
        """[n] row of `draft_probs` that each draft was drawn from; None: draft i from row i."""
