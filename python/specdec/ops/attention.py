"""Attention of a chain or a tree of new tokens to a key-value cache and to their own ancestors.

Letters: B rows, N new nodes, NP prefix nodes, HQ query heads, HK key heads (HQ % HK == 0, query head h reads
key head h // (HQ / HK)), D width of a head, S slots, Tmax tokens that a slot has room for.
"""

from __future__ import annotations

from torch import Tensor

from specdec.ops import attention_reference


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
) -> Tensor:
    """Softmax attention of every new node to its slot's committed tokens, to its ancestors and to itself.

    Nothing is written: the cache gets the accepted nodes' k and v when they are committed. Keys are expected
    as they are compared, rotated at their positions.

    Args:
        q: [B, N, HQ, D], float32 or bfloat16, D contiguous.
        k, v: [B, N, HK, D] of the new nodes, dtype of q, D contiguous.
        k_cache, v_cache: [S, HK, Tmax, D], dtype of q, D contiguous.
        cache_lengths: int32 [S], committed tokens of every slot. What a slot holds beyond is not read.
        slots: int32 [B], the slot of every row, distinct; negative rows are padding. None: row b uses slot b,
            S == B.
        parents: int32 [B, N] with parents[i] < i and -1 for a root; None for a chain. With a prefix of NP
            nodes the ids are 0..NP-1 for the prefix and NP + i for new node i, and None is a chain that
            continues at NP-1.
        lengths: int32 [B], valid new nodes, clamped to [0, N]; None for all N.
        prefix_k, prefix_v: [B, NP, HK, D] of nodes that came before and are not committed, dtype of q, D
            contiguous; both or none.
        prefix_parents: int32 [B, NP], -1 for a root; None for a chain.
        scale: multiplies q; None for D ** -0.5.

    Returns:
        [B, N, HQ, D] in q's dtype; rows beyond `lengths` and of negative slots are zero.
    """
    return attention_reference.tree_attention(
        q,
        k,
        v,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_lengths=cache_lengths,
        slots=slots,
        parents=parents,
        lengths=lengths,
        prefix_k=prefix_k,
        prefix_v=prefix_v,
        prefix_parents=prefix_parents,
        scale=scale,
    )
