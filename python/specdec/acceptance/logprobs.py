"""Log-probabilities of emitted tokens, under the target's logits before any processing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.acceptance.processing import largest


class TokenLogprob(NamedTuple):
    """An emitted token under the target's raw distribution, the log-softmax of the logits of the model.

    Attributes:
        logprob: of the token, natural logarithm.
        top: the most likely tokens and theirs, descending, ties to the lower token; the emitted token is
            among them or not.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens. A row's numbers do not depend on the rows beside it.

    Args:
        logits: float32 [E, V], row i being that which token i was chosen from, unprocessed.
        tokens: [E].
        count: how many of the most likely tokens to tell, 0 or more.
    """
    rows = torch.log_softmax(logits, -1)  # [E, V]
    chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    if count == 0:
        return [TokenLogprob(own, ()) for own in chosen]
    told = []
    for own, row in zip(chosen, rows.numpy(), strict=True):
        top = largest(row, count)[:count]
        told.append(TokenLogprob(own, tuple(zip(top.tolist(), row[top].tolist(), strict=True))))
    return told
