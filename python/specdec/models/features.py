"""What a drafter may read off the target while it runs: its layers' hidden states and recurrent read-outs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from specdec._checks import shown

FeatureKind = Literal["hidden", "readout"]


class Feature(NamedTuple):
    """One vector a token that a layer of the target makes on the way.

    Attributes:
        kind: "hidden" is the residual stream after the layer; "readout" is `S^T q`, what the layer's query
            reads from its recurrent state, all value heads one after the other, before head norm and gate.
        layer: counted from 0.

    Example:
        >>> str(Feature.parse("hidden:9"))
        'hidden:9'
    """

    kind: FeatureKind
    layer: int

    @classmethod
    def parse(cls, text: str) -> Feature:
        """Reads what `str` writes.

        Raises:
            ValueError: it is no such text.
        """
        kind, _, layer = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind not in get_args(FeatureKind) or not layer.isdecimal() or len(layer) > 6:
            raise ValueError(f"feature: got {shown(text)}, want hidden:N or readout:N, N a layer from 0")
        return cls(cast(FeatureKind, kind), int(layer))

    def __str__(self) -> str:
        return f"{self.kind}:{self.layer}"


class FeatureTap:
    """Collects features from a forward pass; the model offers those of the layers that it asks for, and the
    tap keeps what is wanted of them.

    Args:
        features: what is kept, in the order in which `rows` concatenates it.

    Attributes:
        features: as given.
        layers: whose features are wanted.
    """

    def __init__(self, features: Sequence[Feature]) -> None:
        self.features = tuple(features)
        self.layers = frozenset(feature.layer for feature in self.features)
        self._wanted = frozenset(self.features)
        self._kept: dict[Feature, Tensor] = {}

    def offer(self, kind: FeatureKind, layer: int, value: Tensor) -> None:
        """Takes a layer's vectors, [B, N, width] or [B, N, heads, width]; models call it."""
        if (kind, layer) in self._wanted:
            self._kept[Feature(kind, layer)] = value.flatten(2)

    def rows(self) -> Tensor:
        """Takes the features of every node out of the tap, which the next pass fills again.

        Returns:
            [B, N, F].

        Raises:
            ValueError: the model has no such layer, or has not run since.
        """
        missing = [str(f) for f in self.features if f not in self._kept]
        if missing or not self.features:
            raise ValueError(f"features: got {', '.join(missing) or 'none'}, which the model did not offer")
        parts = [self._kept.pop(f) for f in self.features]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
