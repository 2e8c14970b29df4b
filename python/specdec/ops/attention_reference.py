"""The operators of `specdec.ops.attention` in plain PyTorch: keys gathered along a node's path, float64.

Same names and arguments, and no code shared with the fast forms. `tree_attention` has one argument more:
`dtype=None` computes in float64 and returns q's dtype; a dtype computes in it and returns it, unrounded.
Arguments are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_heads(x: Tensor, rotation: Tensor) -> Tensor:
    """`specdec.ops.rotate_heads`, to the bit: in float32."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return (x.float() * rotation[:, :, :1] + swapped.float() * rotation[:, :, 1:]).to(x.dtype)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lengths: Tensor,
    slots: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    prefix_parents: Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`specdec.ops.tree_attention`, a node at a time."""
    real = dtype or torch.float64
    B, N, HQ, D = q.shape
    groups = HQ // k.shape[2]
    out = q.new_zeros(B, N, HQ, D, dtype=real)
    before = 0 if prefix_k is None else prefix_k.shape[1]
    node_k = k if prefix_k is None else torch.cat([prefix_k, k], dim=1)  # [B, NP + N, HK, D]
    node_v = v if prefix_v is None else torch.cat([prefix_v, v], dim=1)
    for b, slot in enumerate(range(B) if slots is None else slots.tolist()):
        if slot < 0:
            continue
        committed = int(cache_lengths[slot])
        tree = _tree(prefix_parents, parents, b, before, N)
        nodes = N if lengths is None else min(max(int(lengths[b]), 0), N)
        for n in range(nodes):
            path = _path(tree, before + n)
            keys, values = (
                torch.cat([cache[slot, :, :committed], entries[b, path].transpose(0, 1)], dim=1)
                .to(real)
                .repeat_interleave(groups, dim=0)  # [HQ, T, D]
                for cache, entries in ((k_cache, node_k), (v_cache, node_v))
            )
            query = q[b, n].to(real) * (D**-0.5 if scale is None else scale)  # [HQ, D]
            weights = torch.softmax((keys @ query[:, :, None])[:, :, 0], dim=-1)  # [HQ, T]
            out[b, n] = (weights[:, None] @ values)[:, 0]
    return out.to(q.dtype) if dtype is None else out


def _tree(prefix_parents: Tensor | None, parents: Tensor | None, b: int, before: int, N: int) -> list[int]:
    """The parent of every node, prefix first; a chain where none is given."""
    first = list(range(-1, before - 1)) if prefix_parents is None else prefix_parents[b].tolist()
    new = list(range(before - 1, before + N - 1)) if parents is None else parents[b].tolist()
    return [*first, *new]


def _path(tree: list[int], node: int) -> list[int]:
    """The nodes from a root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = tree[node]
    return path[::-1]
