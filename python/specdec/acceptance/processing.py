"""From logits to the sampled distribution, plainly: what `edit_logits` and `ops.sampling_probs` compute.

The steps and their order are those of `SamplingParams`. Target rows and draft rows go through the same steps
with the same parameters, before any ratio is taken: the distribution that a drafted token was drawn from *is*
the row used in its acceptance test. A row's numbers depend on that row alone: processing it with eight others
or by itself gives the same bits. Rows in float64 stay so, which is what the proofs run on. All tensors are on
the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec._checks import shown
from specdec.acceptance.history import TokenHistory
from specdec.acceptance.params import SamplingParams


def edited(logits: Tensor, params: SamplingParams, history: TokenHistory | None = None) -> Tensor:
    """Logits after penalties, bias, masks and callback, [..., V], float32 (float64 if given float64).

    Args:
        logits: [..., V] on the CPU, any float dtype; all rows have the same history.
        params: the sequence's parameters; what is of no effect here is left out.
        history: the tokens before the rows; needed where `params.contextual`.

    Raises:
        ValueError: the logits are on another device, the history is missing or has another vocabulary, a
            token of the parameters is outside the vocabulary, or the callback gave something else than a row
            of logits.
    """
    if not logits.is_cpu:
        raise ValueError(f"logits: got a tensor on {logits.device}, want one on the CPU")
    x = logits if logits.dtype == torch.float64 else logits.float()
    if not params.edited:
        return x
    params.check_vocabulary(x.shape[-1])
    if params.contextual and (history is None or history.vocab_size != x.shape[-1]):
        given = None if history is None else f"one over {history.vocab_size} tokens"
        raise ValueError(f"history: got {given}, want a TokenHistory over {x.shape[-1]} tokens")
    if params.penalised and history is not None:
        penalty = params.repetition_penalty
        x = torch.where(history.seen, torch.where(x > 0, x / penalty, x * penalty), x)
        counts = history.counts.to(x.dtype)
        x = x - params.presence_penalty * (counts > 0).to(x.dtype)
        x = x - params.frequency_penalty * counts
    edits = params.token_edits
    if len(edits.biased):
        x = x.clone()
        x[..., torch.from_numpy(edits.biased)] += torch.from_numpy(edits.bias).to(x.dtype)
    excluded = torch.zeros(x.shape[-1], dtype=torch.bool)
    if edits.allowed is not None:
        excluded = ~excluded
        excluded[torch.from_numpy(edits.allowed)] = False
    excluded[torch.from_numpy(edits.banned)] = True
    x = x.masked_fill(excluded, -math.inf)
    if params.logits_processor is not None and history is not None:
        rows = [called_back(row, params, history.tokens) for row in x.reshape(-1, x.shape[-1])]
        x = torch.stack(rows).view(x.shape)
    return x


def called_back(row: Tensor, params: SamplingParams, tokens: Sequence[int]) -> Tensor:
    """What the callback makes of one row [V]; it gets copies of both.

    Raises:
        ValueError: it gave something else than a row of logits.
    """
    if params.logits_processor is None:
        return row
    given = params.logits_processor(list(tokens), own_copy(row))
    if not isinstance(given, Tensor) or given.shape != row.shape or not given.is_floating_point():
        what = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else shown(given)
        raise ValueError(f"logits_processor: it returned {what}, want the logits [{row.numel()}]")
    return given.detach().to(row.dtype)


def own_copy(rows: Tensor) -> Tensor:
    """A copy of a few rows without a parallel region: torch would wait for a thread that another process
    keeps from running, for longer than the copy takes.
    """
    return torch.from_numpy(rows.numpy().copy())


def process_logits(logits: Tensor, params: SamplingParams, history: TokenHistory | None = None) -> Tensor:
    """The distribution each row is sampled from: probabilities [..., V], float32 (float64 if given float64).

    Top-p counts the mass of what top-k left. At temperature 0 a row is one at its greedy token and zero
    elsewhere.

    Args:
        logits: [..., V] on the CPU, any float dtype; -inf excludes a token. All rows have the same history.
        params: the sequence's parameters.
        history: the tokens before the rows, those of a draft node's own path included
            (`TokenHistory.with_path`); needed where `params.contextual`.

    Raises:
        ValueError: see `edited`.

    >>> process_logits(torch.tensor([0.0, 2.0, 1.0, 2.0]), SamplingParams(temperature=1.0, top_k=2))
    tensor([0.0000, 0.5000, 0.0000, 0.5000])
    """
    return distribution(edited(logits, params, history), params)


def distribution(x: Tensor, params: SamplingParams) -> Tensor:
    """The steps of `process_logits` after the edits: temperature, top-k, top-p, min-p, softmax.

    Args:
        x: [..., V] what `edited` gave.
        params: the sequence's parameters.
    """
    if params.greedy:
        return torch.zeros_like(x).scatter_(-1, x.argmax(-1, keepdim=True), 1.0)
    if params.temperature != 1.0:
        # Shifted first: a small temperature then drives scores to -inf, not to inf - inf.
        x = (x - x.amax(-1, keepdim=True)) / params.temperature
    if params.filtered:
        x = x.contiguous()
        rows = x.view(-1, x.shape[-1])  # [R, V]
        kept = torch.full_like(rows, -math.inf)
        for row, out in zip(rows.numpy(), kept.numpy(), strict=True):
            support = _support(row, params)
            out[support] = row[support]
        x = kept.view(x.shape)
    return torch.softmax(x, -1)


def _support(scores: NDArray[np.floating], params: SamplingParams) -> NDArray[np.intp]:
    """Indices of the tokens of one row [V] that top-k, top-p and min-p keep."""
    vocab = scores.shape[0]
    ranked = 0 < params.top_k < vocab
    kept = largest(scores, params.top_k)[: params.top_k] if ranked else np.arange(vocab)
    # Unnormalised probabilities, the largest is 1.
    weight = np.exp(scores[kept].astype(np.float64) - float(scores.max()))
    if params.top_p < 1.0:
        goal = params.top_p * float(weight.sum())
        if not ranked:
            kept = _leading(scores, weight, goal)
            weight = weight[kept]
        nucleus = int(np.cumsum(weight).searchsorted(goal)) + 1  # one past the end if rounding hides the goal
        kept, weight = kept[:nucleus], weight[:nucleus]
    if params.min_p > 0.0:
        kept = kept[weight >= params.min_p]
    return kept


def _leading(scores: NDArray[np.floating], weight: NDArray[np.float64], goal: float) -> NDArray[np.intp]:
    """The largest scores, descending, as many as it takes to reach the goal and some more.

    A nucleus is a prefix of the sorted tokens, so it does not matter how many are sorted; a few nearly always
    suffice.
    """
    count = 64
    while True:
        ranked = largest(scores, count)
        if len(ranked) == scores.shape[0] or np.cumsum(weight[ranked])[-1] >= goal:
            return ranked
        count *= 8


def largest(scores: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest scores and of all that tie with the last, descending, ties by index."""
    vocab = scores.shape[0]
    if count < vocab:
        # The greatest alone is found several times faster.
        last = scores.max() if count == 1 else np.partition(scores, vocab - count)[vocab - count]
        few = np.flatnonzero(scores >= last)
    else:
        few = np.arange(vocab)
    return few[np.argsort(-scores[few], kind="stable")]
