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


class PassFeatures:
    """Features of all nodes of a pass, joined when they are first read: a drafter that rests never does.

    Args:
        parts: [B, N, f] each.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = list(parts)

    def rows(self) -> Tensor:
        """Of all nodes, [B, N, F]."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts, dim=-1)]
        return self._parts[0]

    def at(self, row: int, path: Sequence[int]) -> NodeFeatures:
        """Of the nodes of a path, which ascend, of one row of the batch."""
        return NodeFeatures([(self, row, path)])


class NodeFeatures:
    """Features of some nodes, of one pass or of several, joined when they are read.

    Args:
        pieces: a pass, a row of it, and nodes of that row that ascend.
    """

    def __init__(self, pieces: Sequence[tuple[PassFeatures, int, Sequence[int]]]) -> None:
        self._pieces = pieces

    @classmethod
    def of(cls, features: Tensor) -> NodeFeatures:
        """Of m nodes, [m, F]."""
        return cls([(PassFeatures([features[None]]), 0, range(len(features)))])

    @classmethod
    def of_all(cls, parts: Sequence[NodeFeatures]) -> NodeFeatures:
        """Features of the nodes of all parts, one part after the other."""
        return cls([piece for part in parts for piece in part._pieces])

    def __len__(self) -> int:
        return sum(len(path) for _, _, path in self._pieces)

    def after(self, count: int) -> NodeFeatures:
        """Without the first `count` nodes."""
        pieces = []
        for features, row, path in self._pieces:
            if count < len(path):
                pieces.append((features, row, path[count:]))
            count = max(count - len(path), 0)
        return NodeFeatures(pieces)

    def rows(self) -> Tensor:
        """Of every node, [m, F]."""
        found = [_rows_at(features.rows()[row], path) for features, row, path in self._pieces]
        return found[0] if len(found) == 1 else torch.cat(found)


def _rows_at(rows: Tensor, path: Sequence[int]) -> Tensor:
    """`rows[path]` of [N, F], without what indexing does from some thousand numbers on: it wakes torch's own
    threads, which then spin on the cores that the next operators want.
    """
    first, last = path[0], path[-1]
    if last - first == len(path) - 1:  # nodes ascend, so none is left out between these two
        return rows[first : last + 1]
    return torch.stack([rows[node] for node in path])


class FeatureTap:
    """Collects features from a forward pass; the model offers those of the layers that it asks for, and the
    tap keeps what is wanted of them.

    Args:
        features: what is kept, in the order in which it is joined.

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

    def take(self) -> PassFeatures:
        """Takes the features of every node out of the tap, which the next pass fills again.

        Raises:
            ValueError: the model has no such layer, or has not run since.
        """
        missing = [str(f) for f in self.features if f not in self._kept]
        if missing or not self.features:
            raise ValueError(f"features: got {', '.join(missing) or 'none'}, which the model did not offer")
        return PassFeatures([self._kept.pop(f) for f in self.features])

    def rows(self) -> Tensor:
        """As `take`, joined: [B, N, F]."""
        return self.take().rows()
