"""A drafter's mistakes are found before the target sees them, and reported as the drafter's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec._checks import shown
from specdec.drafters.base import DraftRequest
from specdec.drafters.proposal import Proposal

_EPS = float(np.finfo(np.float32).eps)


def check_proposals(
    drafter: str, requests: Sequence[DraftRequest], proposals: Sequence[Proposal], vocab_size: int
) -> None:
    """Refuses proposals that are none, break the limits of their requests, or have rows that are no
    distributions.

    Args:
        drafter: its name, for errors.
        requests: [B] what it was asked for.
        proposals: [B] what it gave.
        vocab_size: V of the target.

    Raises:
        ValueError: naming the drafter, what it gave and what is wanted.
    """
    error = _first_mistake(requests, proposals, vocab_size)
    if error is not None:
        raise ValueError(f"drafter {drafter}: got {error}")


def _first_mistake(
    requests: Sequence[DraftRequest], proposals: Sequence[Proposal], vocab_size: int
) -> str | None:
    if not isinstance(proposals, (list, tuple)):
        return f"{shown(proposals)} from propose, want a list of {len(requests)} Proposals"
    if len(proposals) != len(requests):
        return f"{len(proposals)} proposals, want {len(requests)}"
    for request, proposal in zip(requests, proposals, strict=True):
        if not isinstance(proposal, Proposal):
            return (
                f"{shown(proposal)} for slot {request.slot}, want a Proposal; Proposal.empty() for no drafts"
            )
        tokens, probs = proposal.tree.tokens, proposal.draft_probs
        if len(tokens) > request.max_nodes:
            return f"{len(tokens)} nodes for slot {request.slot}, want at most {request.max_nodes}"
        deepest = 1 + max(proposal.tree.depths, default=-1)
        if deepest > request.max_depth:
            return (
                f"a path of {deepest} nodes for slot {request.slot}, want at most max_depth = "
                f"{request.max_depth}"
            )
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            return f"tokens from {min(tokens)} to {max(tokens)}, want 0 to {vocab_size - 1}"
        if probs is not None and (probs.shape[1] != vocab_size or not probs.is_cpu):
            return (
                f"draft_probs {list(probs.shape)} on {probs.device} for slot {request.slot}, "
                f"want [R, {vocab_size}] on the CPU"
            )
    return _first_bad_row(proposals, vocab_size)


def _first_bad_row(proposals: Sequence[Proposal], vocab_size: int) -> str | None:
    """A row that a draft was drawn from has no negative number and the sum 1.

    One pass for the sums and one for the minima: a number that is not finite shows in its sum. The sum of V
    probabilities in float32 is off by at most V eps, whoever adds them up in whatever order; from 1e-3 on a
    row would move the law itself.
    """
    slack = min(vocab_size * _EPS, 1e-3)
    seen: dict[int, tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]] = {}  # by tensor
    for proposal in proposals:
        probs = proposal.draft_probs
        if probs is None or len(proposal.tree) == 0:
            continue
        if id(probs) not in seen:
            rows = probs.detach().numpy()  # [R, V]
            with np.errstate(invalid="ignore"):  # inf - inf, which is to be NaN
                least, total = rows.min(axis=1), rows.sum(axis=1)
            seen[id(probs)] = least, total, (least >= 0.0) & (np.abs(total - 1.0) <= slack)
        least, total, good = seen[id(probs)]
        if good.all():
            continue
        for row in range(len(proposal.tree)) if proposal.rows is None else proposal.rows:
            if not good[row]:
                return (
                    f"row {row} of draft_probs with least number {least[row]:g} and sum {total[row]:g}, "
                    "want none below 0 and sum 1"
                )
    return None
