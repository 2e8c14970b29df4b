"""Penalties, bias, masks and callbacks on all rows of a round at once, in place and only where asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.acceptance.history import TokenHistory
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.processing import called_back


class SequenceRows(NamedTuple):
    """Rows of logits of one sequence, and what comes before each.

    Attributes:
        params: the sequence's parameters.
        history: its prompt and output, a round's root token included; needed where `params.contextual`.
        paths: for each row the drafted tokens after the history that the row follows: () for the root
            token's row, then the node's own path with the node's token. Parents come before their children.
        ends: tokens that end the sequence: nothing after them is emitted, and the callback is not asked.
    """

    params: SamplingParams
    history: TokenHistory | None
    paths: Sequence[Sequence[int]] = ((),)
    ends: frozenset[int] = frozenset()


class _Entries(NamedTuple):
    """Elements of a batch of rows: int64 [E] each."""

    batch: NDArray[np.int64]
    row: NDArray[np.int64]
    token: NDArray[np.int64]


@torch.inference_mode()
def edit_logits(logits: Tensor, sequences: Sequence[SequenceRows | None]) -> None:
    """Does to each row what comes before its temperature (see `SamplingParams`), in place.

    Target and drafters use it alike. The target edits all nodes of a round, `logits[b, i]` following
    `paths[i]`; a drafter edits its rows `[B, V]` with one path each, what it has drafted so far:

        edit_logits(logits, [SequenceRows(params, history, [(), (7,), (7, 9)]), None])      # [2, N >= 3, V]
        edit_logits(rows, [SequenceRows(params, history, [chain]) ...])                     # [B, V]

    A sequence without edits (None, or parameters that are not `edited`) costs nothing. Where only tokens are
    concerned (penalties, bias, bans) only their logits are read and written. A row's bits do not depend on
    what else is in the call, and they are those of `processing.edited`. The callback is not asked about rows
    that cannot be reached: below an excluded token, or after one that ends the sequence.

    Args:
        logits: float32 [B, N, V], or [B, V] where N is 1; any strides.
        sequences: [B]; rows beyond a sequence's paths are left alone. Tokens of its parameters are in the
            vocabulary (`SamplingParams.check_vocabulary`).

    Raises:
        ValueError: a shape or dtype is another, a history is missing, or a callback gave something else than
            a row of logits.
    """
    rows = logits if logits.ndim == 3 else logits.unsqueeze(1)  # [B, N, V]
    if logits.ndim not in (2, 3) or logits.dtype != torch.float32:
        raise ValueError(f"logits: got {logits.dtype} {list(logits.shape)}, want float32 [B, N, V] or [B, V]")
    if len(sequences) != len(rows):
        raise ValueError(f"sequences: got {len(sequences)}, want {len(rows)}, one for each row of the batch")
    todo = [(b, s) for b, s in enumerate(sequences) if s is not None and s.params.edited and s.paths]
    for b, s in todo:
        if len(s.paths) > rows.shape[1]:
            raise ValueError(f"sequences[{b}].paths: got {len(s.paths)}, want at most {rows.shape[1]} rows")
        if s.params.contextual and s.history is None:
            raise ValueError(f"sequences[{b}].history: got None, want a TokenHistory for its penalties")
    _penalise(rows, [(b, s) for b, s in todo if s.params.penalised])
    _bias(rows, [(b, s) for b, s in todo if s.params.logit_bias])
    _ban(rows, [(b, s) for b, s in todo if len(s.params.token_edits.banned)])
    for b, s in todo:
        if s.params.token_edits.allowed is not None:
            _allow(rows[b, : len(s.paths)], s.params.token_edits.allowed)
    for b, s in todo:
        if s.params.logits_processor is not None and s.history is not None:
            _call_back(rows[b, : len(s.paths)], s, s.history)


def _penalise(rows: Tensor, todo: Sequence[tuple[int, SequenceRows]]) -> None:
    seen = [_seen(b, s.paths, s.history) for b, s in todo if s.history is not None]
    if not seen:
        return
    sizes = [len(counts) for _, counts in seen]

    def each(values: list[float]) -> Tensor:  # [E]
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(rows.device)

    where = _indices([entries for entries, _ in seen], rows)
    counts = torch.from_numpy(np.concatenate([counts for _, counts in seen])).to(rows.device)
    repetition = each([s.params.repetition_penalty for _, s in todo])
    x = rows[where]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x -= each([s.params.presence_penalty for _, s in todo]) * (counts > 0)
    x -= each([s.params.frequency_penalty for _, s in todo]) * counts
    rows[where] = x


def _seen(
    b: int, paths: Sequence[Sequence[int]], history: TokenHistory
) -> tuple[_Entries, NDArray[np.float32]]:
    """The tokens before each row, each once, and how often the output and the row's path have them."""
    ids, index = history.seen_ids, history.index
    counts = np.tile(history.output_counts, (len(paths), 1))  # [n, S]
    drafted: list[tuple[int, int]] = []  # (row, token) of tokens that only the path has
    times: list[int] = []
    for row, path in enumerate(paths):
        fresh: dict[int, int] = {}
        for token in path:
            at = index.get(token)
            if at is None:
                fresh[token] = fresh.get(token, 0) + 1
            else:
                counts[row, at] += 1
        drafted += [(row, token) for token in fresh]
        times += fresh.values()
    more = np.array(drafted, np.int64).reshape(-1, 2)
    row_of = np.concatenate([np.repeat(np.arange(len(paths)), len(ids)), more[:, 0]])
    token_of = np.concatenate([np.tile(ids, len(paths)), more[:, 1]])
    every = np.concatenate([counts.ravel(), np.array(times, np.float32)])
    return _Entries(np.full(len(every), b), row_of, token_of), every


def _bias(rows: Tensor, todo: Sequence[tuple[int, SequenceRows]]) -> None:
    if not todo:
        return
    edits = [s.params.token_edits for _, s in todo]
    where = _indices(
        [_product(b, len(s.paths), e.biased) for (b, s), e in zip(todo, edits, strict=True)], rows
    )
    bias = [np.tile(e.bias, len(s.paths)) for (_, s), e in zip(todo, edits, strict=True)]
    rows[where] += torch.from_numpy(np.concatenate(bias).astype(np.float32)).to(rows.device)


def _ban(rows: Tensor, todo: Sequence[tuple[int, SequenceRows]]) -> None:
    if todo:
        banned = [_product(b, len(s.paths), s.params.token_edits.banned) for b, s in todo]
        rows[_indices(banned, rows)] = -math.inf


def _allow(rows: Tensor, allowed: NDArray[np.int64]) -> None:
    """Excludes all other tokens of the rows [n, V]."""
    ids = torch.from_numpy(allowed).to(rows.device)
    kept = rows[:, ids]
    rows.fill_(-math.inf)
    rows[:, ids] = kept


def _call_back(rows: Tensor, sequence: SequenceRows, history: TokenHistory) -> None:
    at: dict[tuple[int, ...], int] = {}  # the row that follows a path
    unreachable: set[tuple[int, ...]] = set()
    for row, nodes in enumerate(sequence.paths):
        path = tuple(nodes)
        above = at.get(path[:-1]) if path else None
        if path and (
            path[:-1] in unreachable
            or path[-1] in sequence.ends
            or (above is not None and float(rows[above, path[-1]]) == -math.inf)
        ):
            unreachable.add(path)
            continue
        at.setdefault(path, row)
        rows[row] = called_back(rows[row], sequence.params, [*history.tokens, *path])


def _product(b: int, count: int, tokens: NDArray[np.int64]) -> _Entries:
    """These tokens of the first `count` rows of sequence b."""
    row = np.repeat(np.arange(count), len(tokens))
    return _Entries(np.full(len(row), b), row, np.tile(tokens, count))


def _indices(parts: Sequence[_Entries], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, row, token = (
        torch.from_numpy(np.concatenate(column)).to(rows.device) for column in zip(*parts, strict=True)
    )
    return batch, row, token
