"""How near drafts and exits come to the target, read off a text for every position at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """How the chains of a drafter fare under greedy acceptance.

    Attributes:
        match: chance that position j of a chain is the target's choice where all before it were.
        mean_accepted_length: tokens of a round, the bonus token counted: one and the accepted ones, over all
            positions.
    """

    match: tuple[float, ...]
    mean_accepted_length: float


def chain_matches(
    outputs: Sequence[Tensor], targets: Tensor, head: Tensor, vocabulary: Tensor | None = None
) -> Tensor:
    """Where the drafter's likeliest token is the target's.

    Args:
        outputs: of `TrainableDrafter.unroll`, one `[B, T, D]` a step.
        targets: `[B, T, D]`, the target's last hidden state of every token behind its final norm.
        head: `[V, D]` of the target.
        vocabulary: int64 tokens that the drafter may choose, None for all.

    Returns:
        bool `[B, T - steps, steps]`: position j of the chain drafted at each token that has a whole chain.
    """
    steps = len(outputs)
    length = targets.shape[1] - steps
    choices = (targets @ head.T).argmax(-1)  # [B, T]
    rows = head if vocabulary is None else head[vocabulary]
    matches = []
    for j, output in enumerate(outputs, 1):
        drafted = (output[:, :length] @ rows.T).argmax(-1)
        drafted = drafted if vocabulary is None else vocabulary[drafted]
        matches.append(drafted == choices[:, j : j + length])
    return torch.stack(matches, dim=-1)


def summarize(matches: Tensor) -> Acceptance:
    """The figures of `chain_matches`, bool `[B, P, steps]`: rows are texts."""
    accepted = matches.long().cumprod(-1)  # up to the first mismatch
    reached = accepted.sum((0, 1)).tolist()
    tried = [matches.shape[0] * matches.shape[1], *reached[:-1]]
    match = tuple(hits / max(1, total) for hits, total in zip(reached, tried, strict=True))
    return Acceptance(match, 1 + float(accepted.sum(-1).double().mean()))


def exit_agreement(outputs: Sequence[Tensor], targets: Tensor, head: Tensor) -> list[tuple[float, float]]:
    """How near exits are to the last layer on one text, over the whole vocabulary.

    Args:
        outputs: of each exit, behind the final norm: `[T, D]`.
        targets: `[T, D]`, of the last layer.
        head: `[V, D]`.

    Returns:
        For every exit KL(last layer || exit) in nats a token, and the share of tokens where the likeliest
        one is the same.
    """
    log_p = torch.log_softmax(targets @ head.T, -1)  # [T, V]
    p, choices = log_p.exp(), log_p.argmax(-1)
    found = []
    for output in outputs:
        log_q = torch.log_softmax(output @ head.T, -1)
        agreement = float((log_q.argmax(-1) == choices).double().mean())
        kl = float((p * log_q.sub_(log_p)).sum(-1).neg().double().mean())
        found.append((kl, agreement))
    return found
