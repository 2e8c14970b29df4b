"""From logits to the sampled distribution: penalty, temperature, top-k, top-p, min-p, softmax, in this order.

Target rows and draft rows go through the same function with the same parameters, before any ratio is taken:
the distribution that a drafted token was drawn from *is* the row used in its acceptance test. A row's numbers
depend on that row alone: processing it with eight others or by itself gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec._checks import check_integer, check_number, is_number

# Temperatures and penalties beyond this, or below its inverse, take logits out of float32: 0 * inf is NaN.
_EXTREME = 1e30


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence's next token is chosen.

    Attributes:
        temperature: logits are divided by it, 1e-30 to 1e30; 0 is greedy decoding (then only the penalty has
            an effect).
        top_k: keep the k tokens of largest logit, ties to the lower index; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p, the crossing token
            included, ties to the lower index; 1 keeps all.
        min_p: keep tokens of at least min_p times the largest probability; 0 keeps all.
        repetition_penalty: a seen token's logit is divided by it if positive and multiplied by it otherwise
            (CTRL, arXiv 1909.05858), 1e-30 to 1e30; 1 is none.
        seed: 0 <= seed < 2^64; None draws one when the sequence is admitted.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        low, high = 1.0 / _EXTREME, _EXTREME
        if not (is_number(self.temperature) and self.temperature == 0):
            check_number("temperature", self.temperature, low, high, other="0 (greedy)")
        check_integer("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, above=0.0, high=1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, low, high)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest logit (temperature 0)."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether rows depend on the tokens before them."""
        return self.repetition_penalty != 1.0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p restricts the support."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class PenaltyHistory:
    """Which tokens a sequence has seen: prompt, output and, for a draft node, the tokens on its own path.

    It is a set, so a token counts once however often it occurs. Only `extend` changes it, and it is called
    with emitted tokens; drafts enter through `with_path`, which returns a new mask, so a rejected draft
    leaves no trace.
    """

    def __init__(self, vocab_size: int, tokens: Iterable[int] = ()) -> None:
        """A history over `vocab_size` tokens that has seen `tokens` (the prompt)."""
        self._seen = torch.zeros(vocab_size, dtype=torch.bool)
        self.extend(tokens)

    @property
    def seen(self) -> Tensor:
        """bool [V], True where a token was seen. Do not write to it."""
        return self._seen

    def extend(self, tokens: Iterable[int]) -> None:
        """Mark tokens as seen. A token outside the vocabulary is a ValueError, and then nothing is marked."""
        new = list(tokens)
        self._check(new)
        self._seen[new] = True

    def with_path(self, tokens: Sequence[int]) -> Tensor:
        """What a draft node has seen, bool [V]: this history and `tokens`, the node's path with its own."""
        if not tokens:
            return self._seen
        self._check(tokens)
        mask = self._seen.clone()
        mask[list(tokens)] = True
        return mask

    def _check(self, tokens: Sequence[int]) -> None:
        size = self._seen.numel()
        for token in tokens:
            if not 0 <= token < size:
                raise ValueError(f"tokens: got {token}, want tokens in [0, {size})")


def penalise(logits: Tensor, params: SamplingParams, seen: Tensor | None) -> Tensor:
    """Logits after the repetition penalty, [..., V], float32 (float64 if given float64).

    Args:
        logits: [..., V], any float dtype.
        params: only `repetition_penalty` is used.
        seen: bool, broadcastable to logits; needed where there is a penalty (`PenaltyHistory`).

    Raises:
        ValueError: there is a penalty and `seen` is missing or has another vocabulary.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    if not params.penalised:
        return x
    if seen is None or seen.shape[-1:] != x.shape[-1:]:
        given = None if seen is None else tuple(seen.shape)
        raise ValueError(
            f"seen: got {given}, want a bool mask [..., {x.shape[-1]}] as repetition_penalty is "
            f"{params.repetition_penalty}"
        )
    penalty = params.repetition_penalty
    return torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)


def greedy_tokens(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """The greedy token of each row, int64 [...]: the largest penalised logit, ties to the lower index."""
    return penalise(logits, params, seen).argmax(-1)


def process_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """The distribution each row is sampled from: probabilities [..., V], float32 (float64 if given float64).

    The order is repetition penalty, temperature, top-k, top-p, min-p, softmax; top-p counts the mass of what
    top-k left. At temperature 0 a row is one at its greedy token and zero elsewhere.

    Args:
        logits: [..., V], any float dtype; -inf excludes a token.
        params: the sequence's parameters.
        seen: bool, broadcastable to logits, where there is a repetition penalty; None otherwise.

    Raises:
        ValueError: see `penalise`.

    >>> process_logits(torch.tensor([0.0, 2.0, 1.0, 2.0]), SamplingParams(temperature=1.0, top_k=2))
    tensor([0.0000, 0.5000, 0.0000, 0.5000])
    """
    x = penalise(logits, params, seen)
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
    kept = _largest(scores, params.top_k)[: params.top_k] if ranked else np.arange(vocab)
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
        ranked = _largest(scores, count)
        if len(ranked) == scores.shape[0] or np.cumsum(weight[ranked])[-1] >= goal:
            return ranked
        count *= 8


def _largest(scores: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest scores and of all that tie with the last, descending, ties by index."""
    vocab = scores.shape[0]
    if count < vocab:
        last = np.partition(scores, vocab - count)[vocab - count]
        few = np.flatnonzero(scores >= last)
    else:
        few = np.arange(vocab)
    return few[np.argsort(-scores[few], kind="stable")]
