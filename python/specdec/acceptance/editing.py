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
        logits: float32 [B, N, V] on the CPU, or [B, V] where N is 1; any strides.
        sequences: [B]; rows beyond a sequence's paths are left alone. Tokens of its parameters are in the
            vocabulary (`SamplingParams.check_vocabulary`).

    Raises:
        ValueError: a shape, dtype or device is another, a history is missing, or a callback gave something
            else than a row of logits.
    """
    rows = logits if logits.ndim == 3 else logits.unsqueeze(1)  # [B, N, V]
    if logits.ndim not in (2, 3) or logits.dtype != torch.float32:
        raise ValueError(f"logits: got {logits.dtype} {list(logits.shape)}, want float32 [B, N, V] or [B, V]")
    if not logits.is_cpu:
        raise ValueError(f"logits: got a tensor on {logits.device}, want one on the CPU")
    if len(sequences) != len(rows):
        raise ValueError(f"sequences: got {len(sequences)}, want {len(rows)}, one for each row of the batch")
    todo = [(b, s) for b, s in enumerate(sequences) if s is not None and s.params.edited and s.paths]
    for b, s in todo:
        if len(s.paths) > rows.shape[1]:
            raise ValueError(f"sequences[{b}].paths: got {len(s.paths)}, want at most {rows.shape[1]} rows")
        if s.params.contextual and s.history is None:
            raise ValueError(f"sequences[{b}].history: got None, want a TokenHistory for its penalties")
    for b, s in todo:
        part = rows[b, : len(s.paths)]  # [n, V]
        edits = s.params.token_edits
        if s.params.penalised and s.history is not None:
            _penalise(part, s, s.history)
        if len(edits.biased):
            _write(part, edits.biased, _read(part, edits.biased) + edits.bias.astype(np.float32))
        if len(edits.banned):
            _write(part, edits.banned, -math.inf)
        if edits.allowed is not None:
            kept = _read(part, edits.allowed)
            _write(part, slice(None), -math.inf)
            _write(part, edits.allowed, kept)
        if s.params.logits_processor is not None and s.history is not None:
            _call_back(part, s, s.history)


def _penalise(rows: Tensor, sequence: SequenceRows, history: TokenHistory) -> None:
    params, paths = sequence.params, sequence.paths
    ids, counts = history.seen_ids, history.output_counts
    used = np.arange(len(ids)) if params.repetition_penalty != 1.0 else np.flatnonzero(counts)
    column = np.full(len(ids), -1)
    column[used] = np.arange(len(used))
    table = np.zeros((len(paths), len(used)), np.float32)  # [n, S] how often a row's output has a token
    table += counts[used]
    drafted: dict[int, NDArray[np.float32]] = {}  # the same for tokens that only paths have: [n] each
    for row, path in enumerate(paths):
        for token in path:
            at = int(column[history.index[token]]) if token in history.index else -1
            if at >= 0:
                table[row, at] += 1
            else:
                drafted.setdefault(token, np.zeros(len(paths), np.float32))[row] += 1
    tokens = np.concatenate([ids[used], np.array(list(drafted), np.int64)])
    times = np.column_stack([table, *drafted.values()])  # [n, S + drafted]
    x = _read(rows, tokens)
    repetition = np.float32(params.repetition_penalty)
    edited = np.where(x > 0, x / repetition, x * repetition)
    edited -= np.float32(params.presence_penalty) * (times > 0)
    edited -= np.float32(params.frequency_penalty) * times
    # A token that the history does not have is seen by the rows below it alone.
    fresh = slice(len(used), None)
    edited[:, fresh] = np.where(times[:, fresh] > 0, edited[:, fresh], x[:, fresh])
    _write(rows, tokens, edited)


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
        given = called_back(rows[row], sequence.params, [*history.tokens, *path])
        _write(rows[row : row + 1], slice(None), given.cpu().numpy())


# numpy takes microseconds for these few elements, where a parallel region of torch can wait for a thread that
# another process keeps from running.


def _read(rows: Tensor, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Columns of rows [n, V]."""
    return rows.numpy().take(tokens, axis=1)


def _write(rows: Tensor, tokens: NDArray[np.int64] | slice, values: NDArray[np.float32] | float) -> None:
    rows.numpy()[:, tokens] = values
