"""Acceptance and sampling: which drafts are kept, which token follows, and the rows both see.

A row of logits becomes a row of probabilities in float32 with arithmetic that is defined to the bit
(`csrc/include/specdec/sampling_math.h`), so a CPU with any instruction set and a GPU keep the same drafts and
emit the same tokens. The rules are stated and proved in docs/lossless.md; `specdec.acceptance` has them in
float64 Python.

Random numbers are those of `specdec.acceptance.rng`: a row's tokens depend on its own seed and positions, not
on the rows beside it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._operator import operator, want_tensor

_accept_greedy = operator("accept_greedy")
_accept_sampled = operator("accept_sampled")
_sampling_probs = operator("sampling_probs")
_draw_tokens = operator("draw_tokens")


class AcceptRule(IntEnum):
    """How sampled acceptance decides a sequence; the numbers are those of the C++ `AcceptRule`.

    Which of them are exact depends on how the drafts were made. FOLLOW is for drafts that were not drawn at
    random. RECURSIVE, K_SEQ and TRAVERSAL are for siblings drawn independently, RECURSIVE_WITHOUT_REPLACEMENT
    and TRAVERSAL_WITHOUT_REPLACEMENT for siblings drawn without replacement.
    """

    FOLLOW = 0
    RECURSIVE = 1
    RECURSIVE_WITHOUT_REPLACEMENT = 2
    K_SEQ = 3
    TRAVERSAL = 4
    TRAVERSAL_WITHOUT_REPLACEMENT = 5


class Accepted(NamedTuple):
    """What a round decided.

    Attributes:
        path: int32 `[B, N]`, nodes from node 0 to the last accepted one; 0 beyond the length.
        path_lengths: int32 `[B]`, at least 1; 0 where the row's length is 0.
        next_token: int64 `[B]`, the token that follows; 0 where the row's length is 0, and -1 where a row of
            logits that the decision needed has a NaN or no finite maximum.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor


def accept_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor | None = None, lengths: Tensor | None = None
) -> Accepted:
    """Greedy acceptance: a drafted token is right if it is the argmax at its parent.

    Ties go to the smaller token. Only rows at the end of a right path are looked at. Of several accepted
    nodes of the greatest depth, which siblings with one token give, the one of lowest index is taken.
    On a GPU N is at most 4096.

    Args:
        logits: `[B, N, V]` float32, bfloat16 or float16, the target's after each node; strides of B and N are
            free, the last dimension is contiguous.
        tokens: int64 `[B, N]`, the token of each node; node 0 is the root token, emitted before.
        parents: int32 `[B, N]`, an earlier node, and -1 for node 0 alone; None for chains.
        lengths: int32 `[B]`, valid nodes of each row, 0 for an absent row; None for all N. What lies beyond
            is not read.

    Returns:
        `Accepted`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value, or requires grad in grad mode.
        TypeError: an argument has the wrong type.

    >>> logits = torch.tensor([[[0.0, 2.0, 1.0], [0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]])
    >>> accept_greedy(logits, torch.tensor([[0, 1, 1]]))
    Accepted(path=tensor([[0, 1, 0]], dtype=torch.int32), path_lengths=tensor([2], dtype=torch.int32), \
next_token=tensor([2]))
    """
    return Accepted(*_accept_greedy(logits, tokens, parents, lengths))


def accept_sampled(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    rules: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_probs: Tensor | None = None,
    draft_rows: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Accepted:
    """Sampled acceptance: whatever is drafted, the emitted tokens follow the target's distribution.

    Rows of probabilities are made of `logits` as the decision comes to them. On a GPU N is at most 512 and V
    at most 2^21.

    Args:
        logits: `[B, N, V]` as in `accept_greedy`, penalties and masks applied.
        tokens: int64 `[B, N]`.
        parents: int32 `[B, N]` or None.
        lengths: int32 `[B]` or None.
        rules: int32 `[B]`, an `AcceptRule` each.
        seeds: int64 `[B]`, the bits of the sequences' seeds.
        positions: int64 `[B]`, index in the sequence, prompt included, of the first token the round emits.
        draft_probs: float32 `[R, V]`, rows that drafts were drawn from, processed like the target's; the row
            stride is free. Needed by every rule but FOLLOW.
        draft_rows: int32 `[B, N]`, the row of `draft_probs` that a node was drawn from; not read for node 0.
            Siblings drawn without replacement name one row, as it was before any was removed; those of K_SEQ
            name one row too.
        temperature: float32 `[B]`, 0 for greedy; None for 1.
        top_k: int32 `[B]`, 0 for all; None for all.
        top_p: float32 `[B]`, above 0; None for 1.
        min_p: float32 `[B]`, 0 to 1; None for 0.

    Returns:
        `Accepted`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value, or requires grad in grad mode. On
            a GPU values are not looked at.
        TypeError: an argument has the wrong type.
    """
    want_tensor("logits", logits)
    settings = _settings(logits, temperature, top_k, top_p, min_p)
    return Accepted(
        *_accept_sampled(
            logits, tokens, parents, lengths, draft_probs, draft_rows, rules, *settings, seeds, positions
        )
    )


def sampling_probs(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """The rows of probabilities that acceptance makes of these logits, bit for bit.

    Kept are, in this order: the `top_k` largest logits; the fewest of those, largest first, whose mass
    reaches `top_p` of theirs; those whose probability is at least `min_p` times the largest one's. Equal
    logits are ranked by token, the smaller first. On a GPU V is at most 2^21.

    Args:
        logits: `[R, V]` float32, bfloat16 or float16; the row stride is free, the last dimension contiguous.
        temperature: float32 `[R]`, 0 for greedy (a one-hot row); None for 1.
        top_k: int32 `[R]`, 0 for all; None for all.
        top_p: float32 `[R]`, above 0; None for 1.
        min_p: float32 `[R]`, 0 to 1; None for 0.

    Returns:
        float32 `[R, V]`, contiguous; NaN throughout where a row has a NaN or no finite maximum.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value, or requires grad in grad mode.
        TypeError: an argument has the wrong type.

    >>> sampling_probs(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), top_k=torch.tensor([2], dtype=torch.int32))
    tensor([[0.0000, 0.5000, 0.5000, 0.0000]])
    """
    want_tensor("logits", logits)
    probs: Tensor = _sampling_probs(logits, *_settings(logits, temperature, top_k, top_p, min_p))
    return probs


def draw_tokens(
    probs: Tensor, count: int, *, replacement: bool, seeds: Tensor, positions: Tensor, nodes: Tensor
) -> Tensor:
    """Draws `count` tokens of each row for a drafter.

    Independent draws invert the row's cumulative sum at numbers of the DRAFT stream. Without replacement
    token x arrives at `-ln(1 - u) / p(x)` with a number of the RACE stream and the earliest are taken, in
    their order: the law of drawing one by one from what remains (Gumbel top-k; Kool et al., 2019,
    arXiv:1903.06059).

    Args:
        probs: float32 `[R, V]`, finite and non-negative; they need not sum to one. The row stride is free,
            the last dimension contiguous. V is at most 2^21 without replacement, and on a GPU.
        count: tokens a row, 1 to 256.
        replacement: whether a token can be drawn twice.
        seeds: int64 `[R]`, the bits of the sequence's seed.
        positions: int64 `[R]`, that of the first token the round emits.
        nodes: int32 `[R]`, the node that the tokens will hang below, below 4096 (the root is 0): rows of one
            round have numbers of their own.

    Returns:
        int64 `[R, count]`; -1 where no token of positive probability is left. Where a sum of independent
        draws is not finite all are -1; without replacement tokens are compared one with the other and no sum
        is taken, so that an infinite number comes first.

    Raises:
        ValueError: an argument has the wrong dtype, shape, device or value, or requires grad in grad mode.
        TypeError: an argument has the wrong type.
    """
    tokens: Tensor = _draw_tokens(probs, count, replacement, seeds, positions, nodes)
    return tokens


def _settings(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The settings of each row, with the defaults filled in."""
    rows = logits.shape[:1]

    def given(setting: Tensor | None, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return logits.new_full(rows, default, dtype=dtype) if setting is None else setting

    return given(temperature, 1.0), given(top_k, 0, torch.int32), given(top_p, 1.0), given(min_p, 0.0)
