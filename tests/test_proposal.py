"""Proposals and the batch that the target verifies."""

from __future__ import annotations

import pytest
import torch

from specdec.drafters import Proposal, ProposalKind, batch_proposals
from specdec.tree import TokenTree


def chain(*tokens: int) -> Proposal:
    return Proposal(TokenTree(tokens), ProposalKind.DETERMINISTIC)


def test_batch_of_chains_has_no_parents() -> None:
    batch = batch_proposals([7, 8, 9], [chain(1, 2), Proposal.empty(), chain(3)])
    assert batch.parents is None
    assert batch.tokens.dtype == torch.int64
    assert batch.lengths.dtype == torch.int32
    assert batch.tokens.tolist() == [[7, 1, 2], [8, 0, 0], [9, 3, 0]]
    assert batch.lengths.tolist() == [3, 1, 2]


def test_batch_with_a_tree_hangs_all_rows_below_their_root() -> None:
    tree = Proposal(TokenTree([1, 2, 3], [-1, -1, 1]), ProposalKind.DETERMINISTIC)
    batch = batch_proposals([7, 8, 9], [chain(4, 5), tree, Proposal.empty()])
    assert batch.parents is not None
    assert batch.parents.dtype == torch.int32
    assert batch.tokens.tolist() == [[7, 4, 5, 0], [8, 1, 2, 3], [9, 0, 0, 0]]
    assert batch.parents.tolist() == [[-1, 0, 1, -1], [-1, 0, 0, 2], [-1, -1, -1, -1]]
    assert batch.lengths.tolist() == [3, 4, 1]


def test_batch_of_nothing() -> None:
    batch = batch_proposals([], [])
    assert batch.tokens.shape == (0, 1)
    assert batch.lengths.shape == (0,)
    with pytest.raises(ValueError, match="proposals: got 1, want 2"):
        batch_proposals([1, 2], [chain(1)])


def test_proposal_checks_and_truncates_its_distributions() -> None:
    tree = TokenTree([1, 2, 3])
    probs = torch.rand(3, 5)
    proposal = Proposal(tree, ProposalKind.IID, probs, chances=(0.9, 0.5, 0.5))
    short = proposal.truncate(2)
    assert short.tree == TokenTree([1, 2])
    assert short.chances == (0.9, 0.5)
    assert proposal.gain(0.6) == pytest.approx(0.3)
    for wrong in ((0.9, 0.5), (0.5, 0.6, 0.1), (1.5, 0.5, 0.5), (0.5, 0.5, -0.1), (0.9, float("nan"), 0.1)):
        with pytest.raises(ValueError, match="chances: got"):
            Proposal(tree, ProposalKind.IID, probs, chances=wrong)
    assert short.draft_probs is not None
    assert torch.equal(short.draft_probs, probs[:2])
    assert proposal.truncate(3) is proposal
    assert len(proposal.truncate(0).tree) == 0
    with pytest.raises(ValueError, match=r"draft_probs: got float32 \[3, 5\], want None for DETERMINISTIC"):
        Proposal(tree, ProposalKind.DETERMINISTIC, probs)
    with pytest.raises(ValueError, match=r"draft_probs: got None, want float32 \[R, V\] for IID"):
        Proposal(tree, ProposalKind.IID)
    with pytest.raises(ValueError, match=r"got float64 \[3, 5\]"):
        Proposal(tree, ProposalKind.WITHOUT_REPLACEMENT, probs.double())
    with pytest.raises(ValueError, match=r"got float32 \[2, 5\]"):
        Proposal(tree, ProposalKind.IID, probs[:2])


def test_siblings_share_a_row() -> None:
    tree = TokenTree([1, 2, 0, 3], [-1, -1, 0, 0])
    probs = torch.rand(2, 5)
    proposal = Proposal(tree, ProposalKind.WITHOUT_REPLACEMENT, probs, rows=(0, 0, 1, 1))
    short = proposal.truncate(3)
    assert short.rows == (0, 0, 1)
    assert short.draft_probs is probs
    with pytest.raises(ValueError, match=r"rows: got \(0, 0, 2, 1\), want 4 numbers from 0 to 1"):
        Proposal(tree, ProposalKind.IID, probs, rows=(0, 0, 2, 1))
    with pytest.raises(ValueError, match=r"rows: got \(0, 0, 1\), want 4"):
        Proposal(tree, ProposalKind.IID, probs, rows=(0, 0, 1))
    with pytest.raises(ValueError, match="rows: got row 1 for node 1, want 0, that of its siblings"):
        Proposal(tree, ProposalKind.WITHOUT_REPLACEMENT, probs, rows=(0, 1, 1, 1))
    with pytest.raises(ValueError, match="rows: got row 1 for node 1, want 0"):
        Proposal(tree, ProposalKind.WITHOUT_REPLACEMENT, torch.rand(4, 5))
    twice = TokenTree([1, 1, 0, 3], [-1, -1, 0, 0])
    Proposal(twice, ProposalKind.IID, probs, rows=(0, 0, 1, 1))
    with pytest.raises(ValueError, match="tree: got token 1 for node 1 and for a sibling"):
        Proposal(twice, ProposalKind.WITHOUT_REPLACEMENT, probs, rows=(0, 0, 1, 1))
    with pytest.raises(ValueError, match=r"rows: got \(0, 0, 1, 1\), want None for DETERMINISTIC"):
        Proposal(tree, ProposalKind.DETERMINISTIC, rows=(0, 0, 1, 1))


def test_batch_has_every_tensor_once() -> None:
    shared, own = torch.rand(3, 5), torch.rand(2, 5)
    pair = TokenTree([1, 2, 3], [-1, -1, 0])
    proposals = [
        Proposal(pair, ProposalKind.IID, shared, rows=(0, 0, 1)),
        chain(4),
        Proposal(TokenTree([1]), ProposalKind.IID, shared, rows=(2,)),
    ]
    batch = batch_proposals([7, 8, 9], proposals)
    assert batch.draft_probs is shared
    assert batch.draft_rows is not None
    assert batch.draft_rows.dtype == torch.int32
    assert batch.draft_rows.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 2, 0, 0]]
    proposals[1] = Proposal(TokenTree([3, 4]), ProposalKind.IID, own)
    batch = batch_proposals([7, 8, 9], proposals)
    assert batch.draft_probs is not None
    assert batch.draft_rows is not None
    assert torch.equal(batch.draft_probs, torch.cat([shared, own]))
    assert batch.draft_rows.tolist() == [[0, 0, 0, 1], [0, 3, 4, 0], [0, 2, 0, 0]]
    assert batch_proposals([7], [chain(1)]).draft_probs is None
    with pytest.raises(ValueError, match=r"draft_probs: got vocabularies of \[5, 6\]"):
        batch_proposals([7, 8], [proposals[1], Proposal(TokenTree([3]), ProposalKind.IID, torch.rand(1, 6))])
