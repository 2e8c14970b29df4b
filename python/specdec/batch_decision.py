"""Decides a round for the whole batch: edits of logits, then one operator for all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec import ops
from specdec.acceptance import SeededDecisions, SequenceRows, Typical, decide_round, edit_logits, rule_for
from specdec.acceptance.processing import own_copy
from specdec.acceptance.round import NoFiniteMaximumError
from specdec.acceptance.tensors import SamplingTensors, seed_bits
from specdec.drafters.proposal import Proposal, ProposalBatch
from specdec.ops.acceptance import AcceptRule
from specdec.sequence import ActiveSequence


@dataclass(frozen=True)
class BatchSettings:
    """What stays the same while the same sequences are decoded.

    Attributes:
        greedy: whether all of them are.
        edited: whether anything is done to logits of one of them before the temperature.
        told: whether log-probabilities of one of them are wanted.
        sampling: [B] their rows' parameters.
        seeds: int64 [B], the bits of unsigned numbers.
        rules: int32 [B], of the round being decided; `rules_written` is its memory.
        positions: int64 [B], likewise, with `positions_written`.
    """

    greedy: bool
    edited: bool
    told: bool
    sampling: SamplingTensors
    seeds: Tensor
    rules: Tensor
    positions: Tensor
    rules_written: NDArray[np.int32]
    positions_written: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Sequence[ActiveSequence]) -> BatchSettings:
        """The settings of these sequences, in order."""
        params = [s.request.sampling for s in sequences]
        rules, positions = np.zeros(len(params), np.int32), np.zeros(len(params), np.int64)
        return cls(
            all(p.greedy for p in params),
            any(p.edited for p in params),
            any(s.request.logprobs is not None for s in sequences),
            SamplingTensors.of(params),
            seed_bits([s.result.seed for s in sequences]),
            torch.from_numpy(rules),
            torch.from_numpy(positions),
            rules,
            positions,
        )


class Decided(NamedTuple):
    """What became of one sequence's round.

    Attributes:
        path: accepted nodes, the root token's included.
        next_token: the token after them.
        logits: [N, V] of its nodes as the model gave them, where log-probabilities are wanted.
    """

    path: list[int]
    next_token: int
    logits: Tensor | None


def decide_batch(
    sequences: Sequence[ActiveSequence],
    settings: BatchSettings,
    proposals: Sequence[Proposal],
    batch: ProposalBatch,
    logits: Tensor,
    rule: str | Typical,
    drafter: str,
) -> list[Decided]:
    """Which drafts are kept and which token follows, for every sequence.

    Args:
        sequences: [B].
        settings: theirs.
        proposals: [B] their drafts.
        batch: the drafts below the root tokens.
        logits: float32 [B, N, V], the target's after each node; edited in place.
        rule: what `acceptance.check_rule` gave: the name of a lossless rule, or `Typical`.
        drafter: its name, for errors.

    Raises:
        ValueError: the rule is not exact for a proposal, logits that count are not finite, or a callback
            gave something else than a row of logits.
    """
    # A verification sweeps the interpreter out of the caches: every call of torch below is felt.
    raw: list[Tensor | None] = [None] * len(sequences)
    if settings.told:
        raw = [_unedited(logits[b], s) for b, s in enumerate(sequences)]
    if not settings.greedy and isinstance(rule, Typical):
        return [
            _decide_alone(s, p, logits[b, : 1 + len(p.tree)], rule, raw[b])
            for b, (s, p) in enumerate(zip(sequences, proposals, strict=True))
        ]
    if settings.edited:
        edit_logits(logits, [_rows(s, p) for s, p in zip(sequences, proposals, strict=True)])
    if settings.greedy:
        accepted = ops.accept_greedy(logits, batch.tokens, parents=batch.parents, lengths=batch.lengths)
    else:
        settings.rules_written.fill(AcceptRule.FOLLOW)
        for b, (s, p) in enumerate(zip(sequences, proposals, strict=True)):
            settings.positions_written[b] = s.position
            if batch.draft_probs is not None:
                settings.rules_written[b] = _rule(rule, s, p, drafter)
        accepted = ops.accept_sampled(
            logits,
            batch.tokens,
            parents=batch.parents,
            lengths=batch.lengths,
            draft_probs=batch.draft_probs,
            draft_rows=batch.draft_rows,
            rules=settings.rules,
            **settings.sampling._asdict(),
            seeds=settings.seeds,
            positions=settings.positions,
        )
    lengths = accepted.path_lengths.tolist()
    paths = accepted.path.tolist() if max(lengths) > 1 else [[0]] * len(lengths)
    decided = []
    for b, (nodes, length, token) in enumerate(
        zip(paths, lengths, accepted.next_token.tolist(), strict=True)
    ):
        path = nodes[:length]
        if token < 0:
            raise _not_finite(sequences[b], float(logits[b, path[-1]].max()))
        decided.append(Decided(path, token, raw[b]))
    return decided


def _unedited(logits: Tensor, sequence: ActiveSequence) -> Tensor | None:
    """The rows of a sequence whose log-probabilities are wanted; a copy where they will be edited."""
    if sequence.request.logprobs is None:
        return None
    return own_copy(logits) if sequence.request.sampling.edited else logits


def _rows(sequence: ActiveSequence, proposal: Proposal) -> SequenceRows | None:
    """What the edits of a sequence's rows depend on; None where there are no edits."""
    params = sequence.request.sampling
    if not params.edited:
        return None
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.tree.tokens, proposal.tree.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return SequenceRows(params, sequence.history, paths, sequence.eos)


def _rule(rule: str | Typical, sequence: ActiveSequence, proposal: Proposal, drafter: str) -> AcceptRule:
    try:
        found = rule_for(rule, proposal, sequence.request.sampling.greedy)
        return cast(AcceptRule, found)  # `Typical` was decided alone
    except ValueError as error:
        raise ValueError(f"drafter {drafter}: {error}") from None


def _decide_alone(
    sequence: ActiveSequence, proposal: Proposal, logits: Tensor, rule: str | Typical, raw: Tensor | None
) -> Decided:
    """A rule without an operator, on rows that are edited when it comes to them."""
    try:
        path, token = decide_round(
            logits,
            [sequence.root, *proposal.tree.tokens],
            proposal,
            sequence.request.sampling,
            sequence.history,
            SeededDecisions(sequence.result.seed, sequence.position),
            rule,
        )
    except NoFiniteMaximumError as error:
        raise _not_finite(sequence, error.largest) from None
    return Decided(path, token, raw)


def _not_finite(sequence: ActiveSequence, largest: float) -> ValueError:
    """A maximum over logits is NaN where one of them is; an argmax would quietly be some token."""
    if sequence.request.sampling.logits_processor is not None:
        return ValueError(
            f"logits_processor: the largest logit after it is {largest}, want a finite one; does it exclude "
            "every token?"
        )
    return ValueError(f"logits: the model gave {largest}, want finite numbers; are its weights whole?")
