"""What one forward pass leaves behind, layer by layer, until it is committed or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec._rows import array_of, tensor_of
from specdec.ops import Factors, Pending, Prefix


class LayerFactors(NamedTuple):
    """What a recurrent layer's verification leaves behind.

    Attributes:
        recurrent: factors of the recurrence, rows as in the call that made them.
        conv: raw inputs of the short convolution, [B, N, C], or None for a layer without one.
    """

    recurrent: Factors
    conv: Tensor | None


class KVEntries(NamedTuple):
    """What an attention layer's verification leaves behind.

    Attributes:
        k: keys of the nodes, [B, N, HK, D], rotated to their positions where the model rotates them.
        v: values of the nodes, [B, N, HK, D].
    """

    k: Tensor
    v: Tensor


LayerEntries = LayerFactors | KVEntries | None
"""Of one layer; None where its mixer was skipped, so that it remembers nothing of these nodes."""


class Round(NamedTuple):
    """What all layers made of the nodes of one forward pass, with the rows they belong to.

    Attributes:
        layers: one entry a layer.
        slots: int32 [B].
        parents: int32 [B, N] of the nodes, or None for chains.
        nodes: N.
    """

    layers: tuple[LayerEntries, ...]
    slots: Tensor
    parents: Tensor | None
    nodes: int

    def joined(self, above: Round) -> Round:
        """This round with what `above` has of the layers that are None here, of the same nodes in the same
        order.
        """
        layers = tuple([a if b is None else b for a, b in zip(above.layers, self.layers, strict=True)])
        return above._replace(layers=layers)


class PendingRound(NamedTuple):
    """An accepted path that is not in the recurrent states yet."""

    round: Round
    path: Tensor | None
    path_lengths: Tensor

    def recurrent(self, layer: int) -> Pending | None:
        """The pending factors of a layer's recurrence, as `ops.verify` takes them; None where it skipped."""
        entries = self.round.layers[layer]
        if not isinstance(entries, LayerFactors):
            return None
        return Pending(entries.recurrent, self.path, self.path_lengths)

    def mixed(self, layer: int) -> Tensor | None:
        """The raw inputs of a layer's convolution, `pending_mixed` of `ops.verify_layer`."""
        entries = self.round.layers[layer]
        return entries.conv if isinstance(entries, LayerFactors) else None


class Steps:
    """What was made of nodes that were verified but not committed, grown call by call: how a drafter moves
    ahead of its state.

    Pass it as `prefix` to a model's `forward`, then `extend` it with the round that came back. Node ids count
    from the first node of the first round; `parents` of later rounds speak of those ids.
    """

    def __init__(self) -> None:
        self.round: Round | None = None

    def __len__(self) -> int:
        return 0 if self.round is None else self.round.nodes

    def extend(self, new: Round) -> None:
        """Appends the nodes of `new`, which was verified with this object as its prefix.

        Raises:
            ValueError: `new` has other rows than the rounds before, or a layer that has no entries in one of
                them has some in another.
        """
        old = self.round
        if old is None:
            self.round = new
            return
        if new.slots.shape != old.slots.shape:
            raise ValueError(
                f"new: got {new.slots.shape[0]} rows, want the {old.slots.shape[0]} of the rounds before"
            )
        layers = tuple(_concat(i, a, b) for i, (a, b) in enumerate(zip(old.layers, new.layers, strict=True)))
        self.replace(layers, new.parents, new.nodes)

    def replace(self, layers: tuple[LayerEntries, ...], parents: Tensor | None, added: int) -> None:
        """Like `extend`, from an operator that has appended the new nodes itself.

        Args:
            layers: entries of all nodes, the new ones last.
            parents: int32 [B, added] of the new nodes; None where they continue the last one as a chain.
            added: new nodes.
        """
        old = self.round
        assert old is not None, "nothing to continue"
        every = None
        if old.parents is not None or parents is not None:
            new = Round(layers, old.slots, parents, added)
            every = torch.cat(
                [_explicit_parents(old, 0, old.nodes), _explicit_parents(new, old.nodes, added)], dim=1
            )
        self.round = Round(layers, old.slots, every, old.nodes + added)

    def arrange(self, rows: Sequence[Sequence[int]]) -> None:
        """Keeps some of the nodes in another order, and drops the others.

        Args:
            rows: for each row its nodes, each below its parent, which is kept too; -1 for a root. Rows that
                keep fewer end in nodes that mean nothing.
        """
        old = self.round
        assert old is not None, "nothing to arrange"
        width = max(map(len, rows))
        first = list(range(width))
        in_turn = all(list(row) == first for row in rows)
        if in_turn and width == old.nodes:
            return
        parents = None
        if old.parents is not None or not in_turn:
            parents = _arranged_parents(_explicit_parents(old, 0, old.nodes).tolist(), rows, width)
        taken = taker(rows)
        layers = tuple([_taken(entries, taken) for entries in old.layers])
        self.round = Round(layers, old.slots, parents, width)

    def recurrent(self, layer: int) -> Prefix | None:
        """The prefix of a layer's recurrence, as `ops.verify` takes it."""
        entries = self._entries(layer)
        if self.round is None or not isinstance(entries, LayerFactors):
            return None
        return Prefix(entries.recurrent, self.round.parents)

    def mixed(self, layer: int) -> Tensor | None:
        """The raw inputs of a layer's convolution, `prefix_mixed` of `ops.verify_layer`."""
        entries = self._entries(layer)
        return entries.conv if isinstance(entries, LayerFactors) else None

    def kv(self, layer: int) -> KVEntries | None:
        """Keys and values of the nodes in an attention layer."""
        entries = self._entries(layer)
        return entries if isinstance(entries, KVEntries) else None

    @property
    def parents(self) -> Tensor | None:
        """int32 [B, NP] parents of the nodes; None for a chain, or where there are none."""
        return None if self.round is None else self.round.parents

    def _entries(self, layer: int) -> LayerEntries:
        return None if self.round is None else self.round.layers[layer]


def taker(rows: Sequence[Sequence[int]]) -> Callable[[Tensor], Tensor]:
    """A function that takes these places of each row: [B, C, ...] -> [B, N, ...], N the longest row's. A view
    where all rows want the same places and these follow each other.

    Args:
        rows: the places; what a shorter row has beyond its own means nothing.
    """
    first = list(rows[0])
    start = first[0] if first else 0
    if first == list(range(start, start + len(first))) and all(list(row) == first for row in rows):
        return lambda tensor: tensor[:, start : start + len(first)]
    width = max(map(len, rows))
    places = np.array([[*row, *[0] * (width - len(row))] for row in rows])
    batch = np.arange(len(rows))[:, None]
    return lambda tensor: tensor_of(array_of(tensor)[batch, places], tensor.dtype)


def _taken(entries: LayerEntries, taken: Callable[[Tensor], Tensor]) -> LayerEntries:
    if entries is None:
        return None
    if isinstance(entries, KVEntries):
        return KVEntries(taken(entries.k), taken(entries.v))
    k, u, g = entries.recurrent
    # Operators take factors as they come from one, without gaps between rows.
    factors = Factors(
        taken(k).contiguous(), taken(u).contiguous(), None if g is None else taken(g).contiguous()
    )
    return LayerFactors(factors, None if entries.conv is None else taken(entries.conv))


def _arranged_parents(
    old: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], width: int
) -> Tensor | None:
    """int32 [B, width] of the nodes kept; None where all rows are chains of this length."""
    new = []
    for above, row in zip(old, rows, strict=True):
        place = {-1: -1, **{node: i for i, node in enumerate(row)}}
        new.append([place[above[node]] for node in row] + [-1] * (width - len(row)))
    chain = list(range(-1, width - 1))
    return None if all(row == chain for row in new) else torch.tensor(new, dtype=torch.int32)


def _concat(layer: int, a: LayerEntries, b: LayerEntries) -> LayerEntries:
    if a is None and b is None:
        return None
    if isinstance(a, KVEntries) and isinstance(b, KVEntries):
        return KVEntries(torch.cat([a.k, b.k], dim=1), torch.cat([a.v, b.v], dim=1))
    if isinstance(a, LayerFactors) and isinstance(b, LayerFactors):
        old, new = a.recurrent, b.recurrent
        recurrent = Factors(
            torch.cat([old.k, new.k], dim=1),
            torch.cat([old.u, new.u], dim=1),
            None if old.g is None or new.g is None else torch.cat([old.g, new.g], dim=1),
        )
        conv = None if a.conv is None or b.conv is None else torch.cat([a.conv, b.conv], dim=1)
        return LayerFactors(recurrent, conv)
    raise ValueError(
        f"new: layer {layer} got {type(b).__name__}, want the {type(a).__name__} of the rounds before"
    )


def _explicit_parents(part: Round, first: int, count: int) -> Tensor:
    """int32 [B, count]: the parents of a round whose first node has id `first`."""
    if part.parents is not None:
        return part.parents
    chain = torch.arange(first - 1, first + count - 1, dtype=torch.int32)
    return chain.expand(part.slots.shape[0], count)
