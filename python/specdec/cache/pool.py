"""Keys and values of the attention layers of one size, of all slots, in one tensor.

One tensor, so that room for longer sequences is made for all of them at once. What a round appends is a few
rows a layer: numpy copies them, which wakes no threads (`_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch

from specdec._rows import array_of
from specdec.cache.rounds import KVEntries
from specdec.cache.specs import KVSpec

_FIRST_CAPACITY = 256  # tokens a slot has room for at first; doubled when one needs more


class Accepted(NamedTuple):
    """One sequence's part of a commit.

    Attributes:
        row: its row in the round.
        slot: where its memory is.
        at: tokens that the slot holds.
        nodes: what to append, not empty: nodes from root to leaf, or the number of the first ones in turn.
    """

    row: int
    slot: int
    at: int
    nodes: Sequence[int] | int

    @property
    def size(self) -> int:
        """How many nodes."""
        return self.nodes if isinstance(self.nodes, int) else len(self.nodes)


class KVPool:
    """The memory of attention layers that have the same sizes.

    Args:
        spec: the sizes.
        layers: how many layers.
        slots: how many sequences fit.
        dtype: of the model's activations.
        device: where it lives.

    Attributes:
        spec: as given.
        rows: [L, 2, S, HK, T, D]: of each layer the keys, then the values. What a slot has beyond its length
            means nothing, and T doubles when a sequence outgrows it, which makes a new tensor.
    """

    def __init__(
        self, spec: KVSpec, layers: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.spec = spec
        self.rows = torch.empty(
            layers, 2, slots, spec.heads, _FIRST_CAPACITY, spec.head_dim, dtype=dtype, device=device
        )

    def of_slot(self, slot: int) -> KVPool:
        """A pool of this slot alone, whose rows are a view of this one's: to read what it holds now."""
        part = copy(self)
        part.rows = self.rows[:, :, slot : slot + 1]
        return part

    def reserve(self, tokens: int) -> None:
        """Makes room for sequences of this length."""
        capacity = self.rows.shape[4]
        if tokens <= capacity:
            return
        while capacity < tokens:
            capacity *= 2
        old = self.rows
        with torch.inference_mode(False):  # whoever commits outside of it has to be able to write
            grown = torch.empty(*old.shape[:4], capacity, old.shape[5], dtype=old.dtype, device=old.device)
        grown[:, :, :, :, : old.shape[4]] = old
        self.rows = grown

    def append(self, entries: Sequence[KVEntries | None], accepted: Sequence[Accepted]) -> None:
        """Writes the accepted nodes' keys and values behind what their slots hold.

        Args:
            entries: of each layer of this pool; None leaves that layer's rows as they are.
            accepted: of each sequence.
        """
        given = [(i, e) for i, e in enumerate(entries) if e is not None]
        if not given or not accepted:
            return
        self.reserve(max(part.at + part.size for part in accepted))
        pool = array_of(self.rows)  # [L, 2, S, HK, T, D]
        for layer, entry in given:
            for which, made in enumerate((entry.k, entry.v)):  # [B, N, HK, D]
                new = array_of(made.to(self.rows.dtype))
                for part in accepted:
                    nodes = slice(part.nodes) if isinstance(part.nodes, int) else part.nodes
                    kept = new[part.row, nodes].swapaxes(0, 1)  # [HK, n, D]
                    pool[layer, which, part.slot, :, part.at : part.at + part.size] = kept
