"""The durable memory of a batch of sequences: recurrent states and convolution windows, keys and values.

A verification leaves it alone. Accepting a path either commits it at once (`commit`) or leaves it pending
(`defer`), and then the next forward pass over the same slots takes it: keys and values are written first, and
recurrent layers fold it in while they read their state anyway. Everything else that touches the memory
(`commit`, `reset`, `snapshot`) settles what is pending first, so that a late commit can never land on a slot
that was freed or moved in the meantime.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy

import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer
from specdec.cache.pool import Accepted, KVPool
from specdec.cache.rounds import KVEntries, LayerFactors, PendingRound, Round
from specdec.cache.specs import KVSpec, LayerSpec


def path_tensor(paths: Sequence[Sequence[int]]) -> Tensor:
    """Accepted paths as an operator takes them: int32 [B, P], P at least 1; 0 beyond a path's length."""
    longest = max(1, max(map(len, paths)))
    return torch.tensor([[*p, *[0] * (longest - len(p))] for p in paths], dtype=torch.int32)


class DecodingCache:
    """The durable memory of a batch of sequences, addressed by slot.

    Args:
        layers: the sizes of each layer.
        slots: how many sequences fit.
        state_dtype: float32 (default) or bfloat16.
        dtype: of convolution windows, keys and values: that of the model's activations.
        device: where it lives.

    Attributes:
        specs: the sizes of each layer.
        slots: how many sequences fit.
        state: of each recurrent layer by its number, [S, HV, DV, DK].
        conv: of each recurrent layer by its number, [S, W-1, C], or None for a layer without a convolution.
        lengths: int32 [S], tokens that each slot's keys and values hold; zeros where no layer keeps any. The
            next token's position where nothing is pending.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec | KVSpec],
        slots: int,
        *,
        state_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_integer("slots", slots, 1)
        self.specs = tuple(layers)
        self.slots = slots
        self.state: dict[int, Tensor] = {}
        self.conv: dict[int, Tensor | None] = {}
        pooled: dict[KVSpec, list[int]] = {}
        for layer, spec in enumerate(self.specs):
            if isinstance(spec, KVSpec):
                pooled.setdefault(spec, []).append(layer)
                continue
            self.state[layer] = torch.zeros(
                slots, spec.heads, spec.value_dim, spec.key_dim, dtype=state_dtype, device=device
            )
            self.conv[layer] = (
                torch.zeros(slots, spec.conv_width - 1, spec.conv_channels, dtype=dtype, device=device)
                if spec.conv_channels
                else None
            )
        self._pools = [
            (KVPool(spec, len(numbers), slots, dtype, device), numbers) for spec, numbers in pooled.items()
        ]
        self._pooled = _by_layer(self._pools)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        self._pending: PendingRound | None = None

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of an attention layer, each [S, HK, T, D] with rows up to `lengths` valid.

        Views that a commit may leave behind as it makes room: fetch them again after one.
        """
        pool, place = self._pooled[layer]
        keys, values = pool.rows[place]
        return keys, values

    @property
    def has_pending(self) -> bool:
        """Whether an accepted path waits to be folded in."""
        return self._pending is not None

    def take_pending(self, slots: Tensor) -> PendingRound | None:
        """Writes the keys and values of the pending round, and hands the round to a forward pass over exactly
        these slots, whose recurrent layers must fold it in.

        With other slots the pending round is committed here instead, and None is returned.

        Raises:
            ValueError: as `commit`, about what was deferred.
        """
        pending = self._pending
        if pending is None:
            return None
        if pending.round.slots is slots or torch.equal(pending.round.slots, slots):
            self._pending = None
            self._append(pending, self._accepted(pending))
            return pending
        self.flush()
        return None

    def flush(self) -> None:
        """Commits what is pending."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._commit(pending)

    def settle(self, layers: Collection[int]) -> None:
        """Commits what is pending in these layers; recurrent layers that are not among them go on waiting."""
        pending = self._pending
        if pending is None or not any(pending.round.layers[i] is not None for i in layers):
            return  # nothing, or settled by the draft's first pass
        if self._pools:  # keys and values of all layers are written at once
            self.flush()
            return
        now, later = (
            tuple(
                [
                    entries if (i in layers) == ready else None
                    for i, entries in enumerate(pending.round.layers)
                ]
            )
            for ready in (True, False)
        )
        self._commit(pending._replace(round=pending.round._replace(layers=now)))
        self._pending = pending._replace(round=pending.round._replace(layers=later))

    def commit(self, round: Round, path: Tensor | None, path_lengths: Tensor) -> None:
        """Adds an accepted path to the memory now.

        Args:
            round: what the verification made.
            path: int32 [B, P] node indices root to leaf, or None for the first nodes of a chain. That they
                exist and ascend is checked; that each is the parent of the next is up to the caller
                (`ops.check_path`), who has the tree at hand where this would copy it from the device.
            path_lengths: int32 [B]; 0 leaves a sequence as it is.

        Raises:
            ValueError: `path` or `path_lengths` has another shape, or a path's nodes do not exist or ascend.
                The round was not added.
        """
        self.flush()
        self._commit(PendingRound(round, path, path_lengths))

    def defer(self, round: Round, path: Tensor | None, path_lengths: Tensor) -> None:
        """Like `commit`, but the next forward pass over the same slots does the work.

        Raises:
            ValueError: what was pending before is refused by `commit`. A mistake in these arguments is
                raised by whatever takes them up.
        """
        self.flush()
        self._pending = PendingRound(round, path, path_lengths)

    def _commit(self, pending: PendingRound) -> None:
        accepted = self._accepted(pending)  # first: what is wrong is refused before anything is written
        slots = pending.round.slots
        for layer, entries in enumerate(pending.round.layers):
            if not isinstance(entries, LayerFactors):
                continue
            ops.commit(self.state[layer], entries.recurrent, pending.path, pending.path_lengths, slots=slots)
            window = self.conv[layer]
            if window is not None and entries.conv is not None:
                ops.conv_commit(window, entries.conv, pending.path, pending.path_lengths, slots=slots)
        self._append(pending, accepted)

    def _accepted(self, pending: PendingRound) -> list[Accepted]:
        """What each sequence appends to its keys and values; nothing where no layer keeps any."""
        if not self._pools:
            return []
        round, path, path_lengths = pending
        rows = round.slots.shape[0]
        if path_lengths.shape != (rows,) or (path is not None and path.shape[:-1] != (rows,)):
            given = f"{None if path is None else list(path.shape)} and {list(path_lengths.shape)}"
            raise ValueError(f"path, path_lengths: got shapes {given}, want [{rows}, P] and [{rows}]")
        most = round.nodes if path is None else path.shape[1]
        paths = None if path is None else path.tolist()
        held = self.lengths.tolist()
        accepted = []
        for row, (slot, length) in enumerate(zip(round.slots.tolist(), path_lengths.tolist(), strict=True)):
            count = min(length, most)
            if slot < 0 or count <= 0:
                continue
            nodes = count if paths is None else _checked_path(row, paths[row][:count], round.nodes)
            accepted.append(Accepted(row, slot, held[slot], nodes))
        return accepted

    def _append(self, pending: PendingRound, accepted: Sequence[Accepted]) -> None:
        if not accepted:
            return
        layers = pending.round.layers
        for pool, numbers in self._pools:
            entries = [layers[i] for i in numbers]
            pool.append([e if isinstance(e, KVEntries) else None for e in entries], accepted)
        for part in accepted:
            self.lengths[part.slot] = part.at + part.size

    def reset(self, slots: Sequence[int]) -> None:
        """Empties the given slots, for sequences that are about to be prefilled.

        Raises:
            ValueError: there is no such slot.
        """
        self.flush()
        for slot in slots:
            check_integer("slots", slot, 0, self.slots - 1)
        for layer, state in self.state.items():
            window = self.conv[layer]
            for slot in slots:  # an index of all slots would start threads for each write
                state[slot].zero_()
                if window is not None:
                    window[slot].zero_()
        if self._pools:
            for slot in slots:
                self.lengths[slot] = 0

    def frozen(self, slot: int) -> DecodingCache:
        """What a slot holds now, as the slot 0 of a cache for passes that commit nothing.

        Recurrent states and windows are copies, keys and values are shared: it is as it was until the slot is
        emptied for another sequence.

        Raises:
            ValueError: there is no such slot.
        """
        check_integer("slot", slot, 0, self.slots - 1)
        self.flush()
        part = copy(self)
        one = slice(slot, slot + 1)
        part.slots = 1
        part.state = {layer: state[one].clone() for layer, state in self.state.items()}
        part.conv = {layer: None if w is None else w[one].clone() for layer, w in self.conv.items()}
        part._pools = [(pool.of_slot(slot), numbers) for pool, numbers in self._pools]
        part._pooled = _by_layer(part._pools)
        part.lengths = self.lengths[one].clone()
        return part

    def snapshot(self, slot: int) -> list[dict[str, Tensor]]:
        """Copies of a slot's memory, a layer's tensors by what they are: "state" and, where there is one,
        "convolution window", or "keys" and "values", [HK, length, D]. Raises ValueError like `reset`.
        """
        check_integer("slot", slot, 0, self.slots - 1)
        self.flush()
        length = int(self.lengths[slot])
        memory = []
        for layer in range(len(self.specs)):
            if layer in self.state:
                tensors = {"state": self.state[layer][slot]}
                window = self.conv[layer]
                if window is not None:
                    tensors["convolution window"] = window[slot]
            else:
                keys, values = self.keys_values(layer)
                tensors = {"keys": keys[slot, :, :length], "values": values[slot, :, :length]}
            memory.append({name: tensor.clone() for name, tensor in tensors.items()})
        return memory


def _by_layer(pools: Sequence[tuple[KVPool, list[int]]]) -> dict[int, tuple[KVPool, int]]:
    """The pool of each layer that keeps keys and values, and its place there."""
    return {layer: (pool, i) for pool, numbers in pools for i, layer in enumerate(numbers)}


def _checked_path(row: int, path: list[int], nodes: int) -> list[int] | int:
    """A path's nodes, or their number where they are the first ones in turn."""
    if path == list(range(len(path))) and len(path) <= nodes:
        return len(path)
    before = -1
    for i, node in enumerate(path):
        if not before < node < nodes:
            raise ValueError(
                f"path: row {row} entry {i} is {node} after {before}, want ascending nodes below {nodes}"
            )
        before = node
    return path
