"""Copies of rows, without waking torch's threads.

From some thousand numbers on, torch's copies and look-ups run on its own threads. They wake late where the
machine is busy, and then spin on the cores that the next operators want: looking up twelve embeddings could
take as long as the rest of a round. A copy of a few rows is no work for threads; numpy has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_FEW = 2048  # numbers that torch copies without its threads, and faster than numpy is called


def array_of(tensor: Tensor) -> Any:
    """The numpy array that shares a CPU tensor's memory, to copy from and into; bfloat16 as its bits, which
    numpy has no type for. The tensor itself on a GPU: indices mean the same to both.
    """
    if tensor.is_cuda:
        return tensor
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


def tensor_of(array: Any, dtype: torch.dtype) -> Tensor:
    """What `array_of` made an array of, or a part of it, as a tensor again."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array).view(dtype)


def take_rows(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]`.

    Args:
        table: [V, ...], contiguous.
        rows: integer, of any shape R.

    Returns:
        [*R, ...], a copy.

    Raises:
        IndexError: a row is not in the table.
    """
    if table.is_cuda or rows.numel() * table.stride(0) <= _FEW:
        return table[rows]
    return tensor_of(array_of(table)[rows.numpy()], table.dtype)


def last_rows(x: Tensor, lengths: Tensor) -> Tensor:
    """The last row of each sequence of a padded batch.

    Args:
        x: [B, N, D].
        lengths: integer [B], each 1 to N.

    Returns:
        [B, D].
    """
    return tensor_of(array_of(x)[np.arange(len(x)), lengths.cpu().numpy() - 1], x.dtype)
