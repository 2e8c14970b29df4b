"""Where the nodes of a round stand in their texts."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.cache import DecodingCache, Steps


def node_positions(
    cache: DecodingCache,
    slots: Tensor,
    nodes: int,
    *,
    parents: Tensor | None,
    prefix: Steps | None,
) -> Tensor:
    """The position of each node: what its slot holds, and its depth below that.

    Args:
        cache: with nothing pending for these slots.
        slots: int32 [B], negative for padding rows.
        nodes: N of each row.
        parents: int32 [B, N], counted over `prefix` and the nodes; None for a chain that goes on where the
            prefix ends.
        prefix: uncommitted nodes before these.

    Returns:
        int64 [B, N].
    """
    held = cache.lengths[slots.clamp(min=0).long()].long()[:, None]  # [B, 1]
    first = 0 if prefix is None else len(prefix)
    above = None if prefix is None else prefix.parents
    if parents is None and above is None:
        return held + torch.arange(first, first + nodes)
    rows = slots.shape[0]
    before = [list(range(-1, first - 1))] * rows if above is None else above.tolist()
    new = [list(range(first - 1, first + nodes - 1))] * rows if parents is None else parents.tolist()
    depths = [_depths([*a, *b])[first:] for a, b in zip(before, new, strict=True)]
    return held + torch.tensor(depths)


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if 0 <= parent < node else 0)
    return depths
