"""Children of drafted nodes: the likeliest tokens, or tokens drawn as the target draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec import ops
from specdec.acceptance.editing import SequenceRows, edit_logits
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.tensors import SamplingTensors, seed_bits
from specdec.drafters.base import DraftRequest


class Parent(NamedTuple):
    """A node whose children are wanted.

    Attributes:
        request: of its sequence.
        node: its number in the round: 0 is the last emitted token, draft i is i + 1.
        path: drafted tokens down to it, its own included; left empty where no row depends on it.
        children: how many are wanted.
        floor: no more children are drawn than tokens have at least this probability.
    """

    request: DraftRequest
    node: int
    path: tuple[int, ...]
    children: int
    floor: float = 0.0


class Children(NamedTuple):
    """What `draw_children` found.

    Attributes:
        tokens: for each parent its children, fewer than wanted where the row has no more tokens.
        probabilities: of each of these in its row.
        probs: float32 [R, V], rows that were drawn from; None where nothing was drawn.
        rows: for each parent its row of `probs`; -1 where its children were not drawn.
    """

    tokens: list[list[int]]
    probabilities: list[list[float]]
    probs: Tensor | None
    rows: list[int]


def joined_rows(parts: Sequence[Tensor]) -> Tensor | None:
    """float32 [R, V] the rows of all parts; None where there is none."""
    return None if not parts else parts[0] if len(parts) == 1 else torch.cat(list(parts))


def draw_children(
    logits: Tensor,
    parents: Sequence[Parent],
    *,
    replacement: bool = False,
    draw: bool = True,
    vocabulary: NDArray[np.integer] | None = None,
    vocab_size: int = 0,
) -> Children:
    """Children of each parent, from rows that are processed exactly as the target's.

    A sampled request's are drawn where `draw` says so, independently or without replacement (Gumbel top-k,
    Kool et al., 2019, arXiv 1903.06059), with numbers of the round's position and the parent's node: a later
    round, which may begin at any of the drafted positions, uses others. How many is fixed before the first is
    drawn. All others are the likeliest tokens, descending, ties to the smaller token.

    Args:
        logits: float32 [R, V] on the CPU, the drafter's after each parent; edited in place.
        parents: [R].
        replacement: whether siblings are drawn independently.
        draw: False: the likeliest tokens for sampled requests too.
        vocabulary: [V'] the tokens that the columns of `logits` [R, V'] stand for, ascending, where the
            drafter has fewer than the target; all others have no chance.
        vocab_size: V, where a vocabulary is given.
    """
    sampled = draw and not all(p.request.sampling.greedy for p in parents)
    if not sampled and not any(p.request.sampling.edited for p in parents):
        tokens, probabilities = _likeliest(logits, parents, vocabulary)
        return Children(tokens, probabilities, None, [-1] * len(parents))
    if vocabulary is not None:
        full = torch.full((len(logits), vocab_size), -torch.inf)
        full[:, torch.from_numpy(vocabulary)] = logits
        logits = full
    return _edited_children(logits, parents, replacement, draw)


@torch.inference_mode()
def _edited_children(logits: Tensor, parents: Sequence[Parent], replacement: bool, draw: bool) -> Children:
    """Children from rows over the whole vocabulary that need more than their largest numbers."""
    if any(p.request.sampling.edited for p in parents):
        edit_logits(logits, [SequenceRows(p.request.sampling, p.request.history, [p.path]) for p in parents])
    drawn = [i for i, p in enumerate(parents) if draw and not p.request.sampling.greedy]
    if len(drawn) == len(parents):
        return _drawn(logits, parents, replacement)
    # Some of both: each kind by itself.
    picked = set(drawn)
    others = [i for i in range(len(parents)) if i not in picked]
    best = _likeliest(logits[others], [parents[i] for i in others], None)
    result = Children([[] for _ in parents], [[] for _ in parents], None, [-1] * len(parents))
    for place, i in enumerate(others):
        result.tokens[i], result.probabilities[i] = best[0][place], best[1][place]
    if not drawn:
        return result
    found = _drawn(logits[drawn], [parents[i] for i in drawn], replacement)
    for place, i in enumerate(drawn):
        result.tokens[i], result.probabilities[i] = found.tokens[place], found.probabilities[place]
        result.rows[i] = found.rows[place]
    return result._replace(probs=found.probs)


def _likeliest(
    logits: Tensor, parents: Sequence[Parent], vocabulary: NDArray[np.integer] | None
) -> tuple[list[list[int]], list[list[float]]]:
    """The likeliest tokens of each row of `logits` [R, V] and their probabilities; none of a row without any
    token that may come, or of one that is no distribution.
    """
    counts = [parent.children for parent in parents]
    scales = [inverse_temperature(parent.request.sampling) for parent in parents]
    even = all(scale == 1.0 for scale in scales)
    columns, probs = ops.likeliest(
        logits, max(1, *counts), None if even else torch.tensor(scales, dtype=torch.float32)
    )
    tokens: list[list[int]] = []
    probabilities: list[list[float]] = []
    for row, chances, count in zip(columns.tolist(), probs.tolist(), counts, strict=True):
        found = row[:count]
        if found and found[-1] < 0:
            found = found[: found.index(-1)]
        tokens.append(found if vocabulary is None else vocabulary[found].tolist())
        probabilities.append(chances[: len(found)])
    return tokens, probabilities


def probabilities_of(
    logits: Tensor, tokens: Sequence[Sequence[int]], vocabulary: NDArray[np.integer] | None
) -> list[list[float]]:
    """Probabilities of some tokens of rows of `logits` [R, V'], with the bits of `ops.draft_tree`, so that
    a draft ends in the same place whether it is made in one call or level by level.
    """
    best, most = ops.likeliest(logits, 1)
    rows = logits.numpy()
    found = []
    for row, (column,), (chance,), wanted in zip(rows, best.tolist(), most.tolist(), tokens, strict=True):
        places = wanted if vocabulary is None else vocabulary.searchsorted(wanted)
        largest = float(row[column])
        found.append([chance * math.exp(float(row[place]) - largest) for place in places])
    return found


def inverse_temperature(sampling: SamplingParams) -> float:
    """What the logits of a request's likeliest drafts are multiplied with."""
    return 1.0 if sampling.greedy else 1.0 / sampling.temperature


def drawn_count(parent: Parent, row: NDArray[np.floating]) -> int:
    """How many children are drawn of a parent, from its row of probabilities [V]: fixed before the first of
    them is drawn.
    """
    if parent.floor == 0.0:
        return parent.children
    return min(parent.children, int((row >= parent.floor).sum()))


def _drawn(logits: Tensor, parents: Sequence[Parent], replacement: bool) -> Children:
    """Draws the children of parents whose `logits` [R, V] have been edited."""
    probs = ops.sampling_probs(logits, **SamplingTensors.of([p.request.sampling for p in parents])._asdict())
    counts = [drawn_count(p, row) for p, row in zip(parents, probs.numpy(), strict=True)]
    tokens: list[list[int]] = [[] for _ in parents]
    # An only child has the same law either way, and the race asks every token for a number.
    racing = [not replacement and count > 1 for count in counts]
    for race in set(racing):
        some = [i for i, is_racing in enumerate(racing) if is_racing == race and counts[i]]
        if some:
            for i, found in zip(some, _draw(probs, some, parents, counts, race), strict=True):
                tokens[i] = [t for t in found if t >= 0]
    table = probs.numpy()
    probabilities = [[float(table[i, t]) for t in found] for i, found in enumerate(tokens)]
    return Children(tokens, probabilities, probs, list(range(len(parents))))


def _draw(
    probs: Tensor, rows: Sequence[int], parents: Sequence[Parent], counts: Sequence[int], race: bool
) -> list[list[int]]:
    """Tokens of these rows of `probs` [R, V], `counts` [R] of each; -1 where none is left."""
    asked = [parents[row] for row in rows]
    tokens = ops.draw_tokens(
        probs if len(rows) == len(probs) else probs[list(rows)],
        max(counts[row] for row in rows),
        replacement=not race,
        seeds=seed_bits([p.request.seed for p in asked]),
        positions=torch.tensor([p.request.position for p in asked], dtype=torch.int64),
        nodes=torch.tensor([p.node for p in asked], dtype=torch.int32),
    )
    # The first draws of a row are the same however many are asked for.
    return [found[: counts[row]] for found, row in zip(tokens.tolist(), rows, strict=True)]
