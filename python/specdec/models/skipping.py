"""Sub-layers of a model that are left out.

A block has two sub-layers, the token mixer (a recurrence or attention) and the MLP, each behind a norm and
added to the residual stream. A skipped one is the identity, its norm included. Final norm and head always
run (self-speculative decoding, Zhang et al., 2023, arXiv 2309.08168).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec._checks import check_integer, shown

MAX_LAYERS = 1 << 12


@dataclass(frozen=True)
class SkipSet:
    """Which sub-layers are left out, by the numbers of their layers from 0.

    Attributes:
        mixers: layers whose token mixer is skipped.
        mlps: layers whose MLP is skipped.

    Raises:
        ValueError: one of the two is no frozenset, or a number in it no integer from 0 on.

    Example:
        >>> str(SkipSet.of([4, 5, 6, 8], [5]))
        'mixers 4-6,8; mlps 5'
    """

    mixers: frozenset[int] = frozenset()
    mlps: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name in ("mixers", "mlps"):
            layers = getattr(self, name)
            if not isinstance(layers, frozenset):
                raise ValueError(f"{name}: got {shown(layers)}, want a frozenset of numbers of layers")
            for layer in layers:
                check_integer(name, layer, 0, MAX_LAYERS - 1)

    @classmethod
    def of(cls, mixers: Iterable[int] = (), mlps: Iterable[int] = ()) -> SkipSet:
        """The set of these layers. Raises ValueError like the class itself."""
        return cls(frozenset(mixers), frozenset(mlps))

    def __len__(self) -> int:
        """Sub-layers that are left out."""
        return len(self.mixers) + len(self.mlps)

    def __str__(self) -> str:
        return f"mixers {_ranges(self.mixers)}; mlps {_ranges(self.mlps)}"

    def check_layers(self, count: int) -> None:
        """Refuses a set that names layers beyond a model's.

        Raises:
            ValueError: one is not below `count`.
        """
        for name, layers in (("mixers", self.mixers), ("mlps", self.mlps)):
            if layers and max(layers) >= count:
                raise ValueError(f"{name}: got layer {max(layers)}, want 0 to {count - 1}")


def _ranges(layers: Iterable[int]) -> str:
    """ "4-6,8" of 4, 5, 6 and 8; "none" of no layer."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
