"""Log-probabilities of emitted tokens, under the target's logits before any processing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
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


def token_logprobs(logits: Iterable[Tensor], tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens, in float64. A row's numbers do not depend on the rows beside it.

    Args:
        logits: [E] rows float32 [V], row i being that which token i was chosen from, unprocessed.
        tokens: [E].
        count: how many of the most likely tokens to tell, 0 or more.
    """
    told = []
    for row, token in zip(logits, tokens, strict=True):
        scores = row.cpu().numpy().astype(np.float64)
        top = largest(scores, count)[:count] if count else np.empty(0, np.intp)
        greatest = scores.max()
        total = greatest + np.log(np.exp(scores - greatest).sum())
        others = zip(top.tolist(), (scores[top] - total).tolist(), strict=True)
        told.append(TokenLogprob(float(scores[token] - total), tuple(others)))
    return told
