"""Sizes of what one layer remembers."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class KVSpec:
    """Sizes of one attention layer's memory.

    Attributes:
        heads: key heads HK.
        head_dim: D of a key or value head.
    """

    heads: int
    head_dim: int
