"""Children of drafted nodes: drawn where the target samples, the likeliest tokens where it is greedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.acceptance.processing import edited, process_logits
from specdec.acceptance.rng import (
    DRAFT_CHILD_BITS,
    RACE_TOKEN_BITS,
    Stream,
    categorical,
    uniform,
    uniform_grid,
)
from specdec.drafters.base import DraftRequest


class Parent(NamedTuple):
    """A node whose children are wanted.

    Attributes:
        request: of its sequence.
        node: its number in the round: 0 is the last emitted token, draft i is i + 1.
        path: drafted tokens down to it, its own included.
        children: how many are wanted.
    """

    request: DraftRequest
    node: int
    path: tuple[int, ...]
    children: int


class Children(NamedTuple):
    """What `draw_children` found.

    Attributes:
        tokens: for each parent its children, fewer than wanted where the row has no more tokens.
        probs: float32 [R, V], rows that were drawn from; None where nothing was drawn.
        rows: for each parent its row of `probs`; -1 where its children were not drawn.
    """

    tokens: list[list[int]]
    probs: Tensor | None
    rows: list[int]


def draw_children(logits: Tensor, parents: Sequence[Parent], *, replacement: bool) -> Children:
    """Children of each parent, from rows that are processed exactly as the target's.

    A sampled request's are drawn, independently or without replacement (Gumbel top-k, arXiv 1903.06059, as an
    exponential race), with numbers of the round's position and the parent's node: a later round, which may
    begin at any of the drafted positions, uses others. A greedy request's are the largest logits, ties to the
    smaller token.

    Args:
        logits: float32 [R, V], the drafter's after each parent.
        parents: [R].
        replacement: whether siblings are drawn independently.
    """
    tokens: list[list[int]] = []
    probs: list[Tensor] = []
    rows: list[int] = []
    for logit, parent in zip(logits, parents, strict=True):
        sampling, history = parent.request.sampling, parent.request.history
        before = None if history is None else history.with_path(parent.path)
        if sampling.greedy:
            tokens.append(_largest(edited(logit, sampling, before).numpy(), parent.children))
            rows.append(-1)
            continue
        rows.append(len(probs))
        probs.append(process_logits(logit, sampling, before))
        tokens.append(_draw(probs[-1].numpy(), parent, replacement))
    return Children(tokens, torch.stack(probs) if probs else None, rows)


def _draw(probs: NDArray[np.float32], parent: Parent, replacement: bool) -> list[int]:
    seed, position = parent.request.seed, parent.request.position
    if replacement or parent.children == 1:  # an only child has one law, and the race asks every token
        first = parent.node << DRAFT_CHILD_BITS
        return [
            categorical(probs, uniform(seed, position, Stream.DRAFT, first + k))
            for k in range(parent.children)
        ]
    few = np.flatnonzero(probs)
    numbers = uniform_grid(seed, position, Stream.RACE, (parent.node << RACE_TOKEN_BITS) + few)
    arrivals = -np.log1p(-numbers) / probs[few]
    return [int(token) for token in few[np.argsort(arrivals, kind="stable")][: parent.children]]


def _largest(row: NDArray[np.float32], count: int) -> list[int]:
    """Tokens of the `count` largest logits, descending, ties to the smaller token; excluded ones never."""
    if count == 1:
        best = int(row.argmax())
        return [best] if row[best] > -np.inf else []
    some = np.arange(len(row))
    if count < len(row):
        some = np.flatnonzero(row >= np.partition(row, len(row) - count)[len(row) - count])
    best_first = some[np.argsort(-row[some], kind="stable")][:count]
    return [int(token) for token in best_first if row[token] > -np.inf]
