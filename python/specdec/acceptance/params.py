"""How a sequence's tokens are chosen: temperature, filters, penalties, bias, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec._checks import check_integer, check_number, is_integer, is_number, shown

# Temperatures, penalties and biases beyond this, or a divisor below its inverse, take logits out of float32:
# 0 * inf is NaN.
_EXTREME = 1e30
_PENALTY = 2.0  # the range of OpenAI's presence and frequency penalties, and of vLLM's

LogitsProcessor = Callable[[list[int], Tensor], Tensor]


class TokenEdits(NamedTuple):
    """The bias and the masks as arrays.

    Attributes:
        biased: int64 [K] tokens with a bias, ascending.
        bias: float64 [K] what is added to their logits.
        allowed: int64, ascending: the only tokens that may come; None for all.
        banned: int64, ascending: tokens that may not come, where `allowed` is None.
    """

    biased: NDArray[np.int64]
    bias: NDArray[np.float64]
    allowed: NDArray[np.int64] | None
    banned: NDArray[np.int64]


@dataclass(frozen=True)
class SamplingParams:
    """How a sequence's next token is chosen.

    The fields act in this order: repetition, presence and frequency penalty, bias, allowed and banned tokens,
    the callback; then temperature, top-k, top-p, min-p and softmax. Rows of the target and of a drafter are
    processed alike, each with the tokens on its own path.

    Attributes:
        temperature: logits are divided by it, 1e-30 to 1e30; 0 is greedy decoding: the largest logit after
            penalties, bias, masks and callback.
        top_k: keep the k tokens of largest logit, ties to the lower index; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p, the crossing token
            included, ties to the lower index; 1 keeps all.
        min_p: keep tokens of at least min_p times the largest probability; 0 keeps all.
        repetition_penalty: a seen token's logit is divided by it if positive and multiplied by it otherwise
            (CTRL, arXiv 1909.05858), 1e-30 to 1e30; 1 is none. Seen is what is in the prompt or the output.
        seed: 0 <= seed < 2^64; None draws one when the sequence is admitted.
        presence_penalty: subtracted from the logit of every token in the output, -2 to 2; 0 is none. The
            prompt does not count, here and for the next one (as OpenAI and vLLM define them).
        frequency_penalty: subtracted as often as the token is in the output, -2 to 2; 0 is none.
        logit_bias: added to the logits of these tokens, at most 1e30 in size; a mapping from token to bias,
            kept as a tuple of pairs.
        allowed_tokens: only these tokens may come; None allows all. Kept as a frozenset, as is the next one.
        banned_tokens: these tokens never come, also where they are allowed.
        logits_processor: (tokens, logits) -> logits. It gets all tokens before the one to choose, the prompt
            and a draft node's own path included, as a list, and the row float32 [V] after what is above;
            -inf in what it returns excludes a token. It must be a pure function of these two: it is called
            for draft nodes in any order, for some never and for others twice, and for rows of a drafter.

    Raises:
        ValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_tokens: Collection[int] | None = None
    banned_tokens: Collection[int] = ()
    logits_processor: LogitsProcessor | None = None

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
        check_number("presence_penalty", self.presence_penalty, -_PENALTY, _PENALTY)
        check_number("frequency_penalty", self.frequency_penalty, -_PENALTY, _PENALTY)
        # Kept in immutable form, so that parameters can be hashed and nobody changes them meanwhile.
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        object.__setattr__(self, "banned_tokens", _token_set("banned_tokens", self.banned_tokens))
        if self.allowed_tokens is not None:
            allowed = _token_set("allowed_tokens", self.allowed_tokens)
            if not allowed - frozenset(self.banned_tokens):
                given = "all of them banned" if allowed else "no tokens"
                raise ValueError(f"allowed_tokens: got {given}, want at least one that may come")
            object.__setattr__(self, "allowed_tokens", allowed)
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise ValueError(
                f"logits_processor: got {shown(self.logits_processor)}, "
                "want a function (tokens, logits) -> logits, or None"
            )

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest logit (temperature 0)."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether there is a penalty on tokens seen before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def contextual(self) -> bool:
        """Whether rows depend on the tokens before them: a penalty or the callback."""
        return self.penalised or self.logits_processor is not None

    @property
    def edited(self) -> bool:
        """Whether anything is done to logits before the temperature."""
        return bool(
            self.contextual or self.logit_bias or self.banned_tokens or self.allowed_tokens is not None
        )

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p restricts the support."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @cached_property
    def token_edits(self) -> TokenEdits:
        """Bias and masks as arrays, made once."""
        pairs = dict(self.logit_bias)
        allowed = self.allowed_tokens
        banned = frozenset(self.banned_tokens)
        return TokenEdits(
            np.array(list(pairs.keys()), np.int64),
            np.array(list(pairs.values()), np.float64),
            None if allowed is None else np.array(sorted(frozenset(allowed) - banned), np.int64),
            np.array(sorted(banned) if allowed is None else [], np.int64),
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses tokens that a model of this vocabulary does not have, and a ban on all that it has.

        Raises:
            ValueError: naming the field.
        """
        named = {
            "logit_bias": [token for token, _ in dict(self.logit_bias).items()],
            "allowed_tokens": self.allowed_tokens or (),
            "banned_tokens": self.banned_tokens,
        }
        for name, tokens in named.items():
            if tokens and max(tokens) >= vocab_size:
                raise ValueError(f"{name}: got token {max(tokens)}, want 0 to {vocab_size - 1}")
        if len(self.banned_tokens) == vocab_size:
            raise ValueError("banned_tokens: got the whole vocabulary, want at least one token left")


def _pairs(given: object) -> tuple[tuple[int, float], ...]:
    wanted = "want a mapping from token ids to numbers"
    try:
        pairs: dict[object, object] = dict(given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias: got {shown(given)}, {wanted}") from None
    checked: dict[int, float] = {}
    for token, bias in pairs.items():
        if not is_integer(token) or token < 0:
            raise ValueError(f"logit_bias: got the token {shown(token)}, {wanted}")
        if is_number(bias) and math.isinf(bias):
            raise ValueError(
                f"logit_bias[{token}]: got {bias}, want a finite number; banned_tokens excludes tokens"
            )
        check_number(f"logit_bias[{token}]", bias, -_EXTREME, _EXTREME)
        if is_number(bias):  # for the type checker
            checked[token] = float(bias)
    return tuple(sorted(checked.items()))


def _token_set(name: str, given: object) -> frozenset[int]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ValueError(f"{name}: got {shown(given)}, want a collection of int token ids")
    tokens = list(given)
    for token in tokens:
        if not is_integer(token) or token < 0:
            raise ValueError(f"{name}: got {shown(token)} in it, want int token ids of at least 0")
    return frozenset(tokens)
