"""Drafters: where the candidate tokens of a round come from."""

from specdec.acceptance.proposal import ProposalKind
from specdec.drafters.base import Drafter, DraftRequest, DrawingDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.proposal import Proposal, ProposalBatch, batch_proposals

__all__ = [
    "DraftRequest",
    "Drafter",
    "DrawingDrafter",
    "NGramDrafter",
    "Proposal",
    "ProposalBatch",
    "ProposalKind",
    "batch_proposals",
]
