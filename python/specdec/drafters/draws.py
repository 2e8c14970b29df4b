"""Children of drafted nodes: drawn where the target samples, the likeliest tokens where it is greedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec import ops
from specdec.acceptance.editing import SequenceRows, edit_logits
from specdec.acceptance.processing import largest
from specdec.acceptance.tensors import SamplingTensors, seed_bits
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


@torch.inference_mode()
def draw_children(logits: Tensor, parents: Sequence[Parent], *, replacement: bool) -> Children:
    """Children of each parent, from rows that are processed exactly as the target's.

    A sampled request's are drawn, independently or without replacement (Gumbel top-k, Kool et al., 2019,
    arXiv 1903.06059), with numbers of the round's position and the parent's node: a later round, which may
    begin at any of the drafted positions, uses others. A greedy request's are the largest logits, ties to the
    smaller token.

    Args:
        logits: float32 [R, V] on the CPU, the drafter's after each parent; edited in place.
        parents: [R].
        replacement: whether siblings are drawn independently.
    """
    if any(p.request.sampling.edited for p in parents):
        edit_logits(logits, [SequenceRows(p.request.sampling, p.request.history, [p.path]) for p in parents])
    tokens: list[list[int]] = [[] for _ in parents]
    rows = [-1] * len(parents)
    drawn = [i for i, p in enumerate(parents) if not p.request.sampling.greedy]
    for i, p in enumerate(parents):
        if p.request.sampling.greedy:
            scores = logits[i].numpy()
            best = largest(scores, p.children)[: p.children].tolist()
            tokens[i] = [t for t in best if scores[t] > -np.inf]
    if not drawn:
        return Children(tokens, None, rows)
    asked = [parents[i] for i in drawn]
    chosen = logits if len(drawn) == len(parents) else logits[drawn]
    probs = ops.sampling_probs(chosen, **SamplingTensors.of([p.request.sampling for p in asked])._asdict())
    # An only child has the same law either way, and the race asks every token for a number.
    racing = [not replacement and p.children > 1 for p in asked]
    for race in set(racing):
        some = [row for row, is_racing in enumerate(racing) if is_racing == race]
        for row, found in zip(some, _draw(probs, some, asked, race), strict=True):
            tokens[drawn[row]] = [t for t in found if t >= 0]
            rows[drawn[row]] = row
    return Children(tokens, probs, rows)


def _draw(probs: Tensor, rows: Sequence[int], parents: Sequence[Parent], race: bool) -> list[list[int]]:
    """As many tokens of these rows of `probs` [R, V] as their `parents` [R] want; -1 where none is left."""
    asked = [parents[row] for row in rows]
    tokens = ops.draw_tokens(
        probs if len(rows) == len(probs) else probs[list(rows)],
        max(p.children for p in asked),
        replacement=not race,
        seeds=seed_bits([p.request.seed for p in asked]),
        positions=torch.tensor([p.request.position for p in asked], dtype=torch.int64),
        nodes=torch.tensor([p.node for p in asked], dtype=torch.int32),
    )
    # The first draws of a row are the same however many are asked for.
    return [found[: p.children] for found, p in zip(tokens.tolist(), asked, strict=True)]
