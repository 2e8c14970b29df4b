"""What a recurrent model remembers: one state and one convolution window per layer and slot, and the round in
between.

A verification leaves the durable state alone and returns *factors*. Accepting a path either commits it at
once (`commit`) or leaves it pending (`defer`), and then the next forward pass over the same slots folds it in
while it reads the state anyway. Everything else that touches the state (`commit`, `reset`, `snapshot`)
settles what is pending first, so that a late commit can never land on a slot that was freed or moved in the
meantime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer
from specdec.ops import Factors, Pending, Prefix


class LayerFactors(NamedTuple):
    """What one layer's verification leaves behind.

    Attributes:
        recurrent: factors of the recurrence, rows as in the call that made them.
        conv: raw inputs of the short convolution, [B, N, C], or None for a layer without one.
    """

    recurrent: Factors
    conv: Tensor | None


class Round(NamedTuple):
    """Factors of all layers of one forward pass, with the rows they belong to.

    Attributes:
        layers: one `LayerFactors` a layer.
        slots: int32 [B].
        parents: int32 [B, N] of the nodes, or None for chains.
    """

    layers: tuple[LayerFactors, ...]
    slots: Tensor
    parents: Tensor | None


class PendingRound(NamedTuple):
    """An accepted path that is not in the state yet."""

    round: Round
    path: Tensor | None
    path_lengths: Tensor

    def recurrent(self, layer: int) -> Pending:
        """The pending factors of a layer's recurrence, as `ops.verify` takes them."""
        return Pending(self.round.layers[layer].recurrent, self.path, self.path_lengths)

    def mixed(self, layer: int) -> Tensor | None:
        """The raw inputs of a layer's convolution, `pending_mixed` of `ops.verify_layer`."""
        return self.round.layers[layer].conv


class Steps:
    """Factors of nodes that were verified but not committed, grown call by call: how a drafter moves ahead of
    its state.

    Pass it as `prefix` to a model's `forward`, then `extend` it with the round that came back. Node ids count
    from the first node of the first round; `parents` of later rounds speak of those ids.
    """

    def __init__(self) -> None:
        self.round: Round | None = None

    def __len__(self) -> int:
        return 0 if self.round is None else self.round.layers[0].recurrent.u.shape[1]

    def extend(self, new: Round) -> None:
        """Appends the nodes of `new`, which was verified with this object as its prefix.

        Raises:
            ValueError: `new` has other rows than the rounds before.
        """
        old = self.round
        if old is None:
            self.round = new
            return
        if new.slots.shape != old.slots.shape:
            raise ValueError(
                f"new: got {new.slots.shape[0]} rows, want the {old.slots.shape[0]} of the rounds before"
            )
        self.replace(tuple(_concat(a, b) for a, b in zip(old.layers, new.layers, strict=True)), new.parents)

    def replace(self, layers: tuple[LayerFactors, ...], parents: Tensor | None) -> None:
        """Like `extend`, from an operator that has appended the new nodes.

        Args:
            layers: factors of all nodes, the new ones last.
            parents: int32 [B, N] of the new nodes; None where they continue the last one as a chain.
        """
        old, count = self.round, len(self)
        assert old is not None, "nothing to continue"
        nodes = layers[0].recurrent.u.shape[1]
        every = None
        if old.parents is not None or parents is not None:
            new = Round(layers, old.slots, parents)
            every = torch.cat(
                [_explicit_parents(old, 0, count), _explicit_parents(new, count, nodes - count)], dim=1
            )
        self.round = Round(layers, old.slots, every)

    def recurrent(self, layer: int) -> Prefix | None:
        """The prefix of a layer's recurrence, as `ops.verify` takes it."""
        if self.round is None:
            return None
        return Prefix(self.round.layers[layer].recurrent, self.round.parents)

    def mixed(self, layer: int) -> Tensor | None:
        """The raw inputs of a layer's convolution, `prefix_mixed` of `ops.verify_layer`."""
        return None if self.round is None else self.round.layers[layer].conv


def _concat(a: LayerFactors, b: LayerFactors) -> LayerFactors:
    old, new = a.recurrent, b.recurrent
    recurrent = Factors(
        torch.cat([old.k, new.k], dim=1),
        torch.cat([old.u, new.u], dim=1),
        None if old.g is None or new.g is None else torch.cat([old.g, new.g], dim=1),
    )
    conv = None if a.conv is None or b.conv is None else torch.cat([a.conv, b.conv], dim=1)
    return LayerFactors(recurrent, conv)


def _explicit_parents(part: Round, first: int, count: int) -> Tensor:
    """int32 [B, count]: the parents of a round whose first node has id `first`."""
    if part.parents is not None:
        return part.parents
    chain = torch.arange(first - 1, first + count - 1, dtype=torch.int32)
    return chain.expand(part.slots.shape[0], count)


@dataclass(frozen=True)
class LayerSpec:
    """Sizes of one recurrent layer's memory.

    Attributes:
        heads: value heads HV.
        value_dim: DV of a head.
        key_dim: DK of a head.
        conv_channels: C of the short convolution, 0 for none.
        conv_width: taps W of the short convolution.
    """

    heads: int
    value_dim: int
    key_dim: int
    conv_channels: int = 0
    conv_width: int = 1


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
        conv_dtype: dtype of the convolution windows: that of the model's activations.
        device: where the state lives.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        slots: int,
        *,
        state_dtype: torch.dtype = torch.float32,
        conv_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_integer("slots", slots, 1)
        self.specs = tuple(layers)
        self.slots = slots
        # One tensor a layer: [S, HV, DV, DK]
        self.state = [
            torch.zeros(slots, s.heads, s.value_dim, s.key_dim, dtype=state_dtype, device=device)
            for s in self.specs
        ]
        # [S, W-1, C], or None
        self.conv = [
            torch.zeros(slots, s.conv_width - 1, s.conv_channels, dtype=conv_dtype, device=device)
            if s.conv_channels
            else None
            for s in self.specs
        ]
        self._pending: PendingRound | None = None

    @property
    def has_pending(self) -> bool:
        """Whether an accepted path waits to be folded in."""
        return self._pending is not None

    def take_pending(self, slots: Tensor) -> PendingRound | None:
        """Hands the pending round to a forward pass over exactly these slots, which must fold it in.

        With other slots the pending round is committed here instead, and None is returned.
        """
        pending = self._pending
        if pending is None:
            return None
        if pending.round.slots is slots or torch.equal(pending.round.slots, slots):
            self._pending = None
            return pending
        self.flush()
        return None

    def flush(self) -> None:
        """Commits what is pending."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._commit(pending)

    def commit(self, round: Round, path: Tensor | None, path_lengths: Tensor) -> None:
        """Folds an accepted path into the state now.

        Args:
            round: the factors of the verification.
            path: int32 [B, P] node indices root to leaf, or None for the first nodes of a chain. That they
                exist and ascend is checked; that each is the parent of the next is up to the caller
                (`ops.check_path`), who has the tree at hand where this would copy it from the device.
            path_lengths: int32 [B]; 0 leaves a sequence as it is.

        Raises:
            ValueError: `path` or `path_lengths` is refused by `ops.commit`. The round was not folded in.
        """
        self.flush()
        self._commit(PendingRound(round, path, path_lengths))

    def defer(self, round: Round, path: Tensor | None, path_lengths: Tensor) -> None:
        """Like `commit`, but the next forward pass over the same slots does the work.

        Raises:
            ValueError: what was pending before is refused by `ops.commit`. A mistake in these arguments is
                raised by whatever folds them in.
        """
        self.flush()
        self._pending = PendingRound(round, path, path_lengths)

    def _commit(self, pending: PendingRound) -> None:
        slots = pending.round.slots
        for layer, factors in enumerate(pending.round.layers):
            ops.commit(self.state[layer], factors.recurrent, pending.path, pending.path_lengths, slots=slots)
            window = self.conv[layer]
            if window is not None and factors.conv is not None:
                ops.conv_commit(window, factors.conv, pending.path, pending.path_lengths, slots=slots)

    def reset(self, slots: Sequence[int]) -> None:
        """Zeroes the given slots, for sequences that are about to be prefilled.

        Raises:
            ValueError: there is no such slot.
        """
        self.flush()
        for slot in slots:
            check_integer("slots", slot, 0, self.slots - 1)
        for state, window in zip(self.state, self.conv, strict=True):
            for slot in slots:  # an index of all slots would start threads for each write
                state[slot].zero_()
                if window is not None:
                    window[slot].zero_()

    def snapshot(self, slot: int) -> list[tuple[Tensor, Tensor | None]]:
        """Copies of a slot's memory, a (state, window) a layer. Raises ValueError like `reset`."""
        check_integer("slot", slot, 0, self.slots - 1)
        self.flush()
        return [
            (state[slot].clone(), None if window is None else window[slot].clone())
            for state, window in zip(self.state, self.conv, strict=True)
        ]
