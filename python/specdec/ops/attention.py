"""Attention of a chain or a tree of new tokens to a key-value cache and to their own ancestors, and
the rotation of its queries and keys: thin wrappers, every check of an argument is in C++.

Letters: B rows, N new nodes, NP prefix nodes, HQ query heads, HK key heads (HQ % HK == 0, query head h reads
key head h // (HQ / HK)), D width of a head, S slots, Tmax tokens that a slot has room for.
"""

from __future__ import annotations

from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operator's fake
from specdec.ops._operator import operator

_rotate_heads = operator("rotate_heads")
_tree_attention = operator("tree_attention")


def rotate_heads(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns heads to their tokens' positions (RoPE, arXiv 2104.09864), dimension i with i + D/2.

    `y = x cos + swap(x) sin`, where `swap` exchanges the halves of a head: two products and a sum in float32,
    each rounded by itself, so that an element's bits are those of plain code.

    Args:
        x: [B, N, H, D] float32, bfloat16 or float16, D contiguous and even; queries, keys or both.
        rotation: float32 [B, N, 2, D], [2, D] contiguous: cosines, then sines, negative for the lower half.
            An expanded tensor will do.

    Returns:
        [B, N, H, D] in x's dtype, contiguous.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride or device, or requires grad in grad mode.
        TypeError: an argument has the wrong type.

    Example:
        >>> quarter = torch.tensor([[0.0, 0.0], [-1.0, 1.0]])  # cos and sin of 90 degrees, D = 2
        >>> rotate_heads(torch.tensor([[[[3.0, 4.0]]]]), quarter.expand(1, 1, 2, 2))
        tensor([[[[-4.,  3.]]]])
    """
    y: Tensor = _rotate_heads(x, rotation)
    return y


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

    Nothing is written: a commit puts the accepted nodes' k and v into the cache. Keys come as they are
    compared, rotated at their positions. A node's output has the bits of decoding its path token by token,
    whatever tree, batch and split into rounds it is computed in (`docs/architecture.md`, "Attention, to the
    bit"). For prompts use torch's `scaled_dot_product_attention`, which is made for many queries and promises
    no such bits.

    Args:
        q: [B, N, HQ, D], float32, bfloat16 or float16, D contiguous, a multiple of 16 up to 256.
        k, v: [B, N, HK, D] of the new nodes, dtype of q, D contiguous. At most 256 nodes, a prefix included.
        k_cache, v_cache: [S, HK, Tmax, D], dtype of q, D contiguous.
        cache_lengths: int32 [S], committed tokens of every slot, at most Tmax. What a slot holds beyond is
            not read.
        slots: int32 [B], the slot of every row, distinct; negative rows are padding. None: row b uses slot b,
            S == B.
        parents: int32 [B, N] with parents[i] < i and -1 for a root; None for a chain. With a prefix of NP
            nodes the ids are 0..NP-1 for the prefix and NP + i for new node i, and None is a chain that
            continues at NP-1.
        lengths: int32 [B], valid new nodes, clamped to [0, N]; None for all N.
        prefix_k, prefix_v: [B, NP, HK, D] of nodes that came before in this round and are not committed,
            dtype of q, D contiguous; both or none.
        prefix_parents: int32 [B, NP], -1 for a root; None for a chain.
        scale: multiplies q; None for D ** -0.5.

    Returns:
        [B, N, HQ, D] in q's dtype, from float32 sums; rows beyond `lengths` and of negative slots are zero.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value, or an input requires grad
            in grad mode.
        TypeError: an argument has the wrong type.

    Example:
        >>> q = torch.randn(1, 3, 4, 64)  # a root and two children of it
        >>> k, v = torch.randn(2, 1, 3, 2, 64)
        >>> k_cache, v_cache = torch.randn(2, 1, 2, 100, 64)
        >>> committed = torch.tensor([80], dtype=torch.int32)
        >>> tree = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
        >>> out = tree_attention(
        ...     q, k, v, k_cache=k_cache, v_cache=v_cache, cache_lengths=committed, parents=tree
        ... )
    """
    out: Tensor = _tree_attention(
        q,
        k,
        v,
        k_cache,
        v_cache,
        cache_lengths,
        slots,
        parents,
        lengths,
        prefix_k,
        prefix_v,
        prefix_parents,
        scale,
    )
    return out
