"""One block of a Llama-family model over specdec's ops: attention, then MLP, both residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specdec import ops
from specdec.cache import DecodingCache, KVEntries, Steps
from specdec.models.llama_config import LlamaConfig


class LlamaBlock:
    """The weights of one block as the ops take them, and the block itself.

    Args:
        config: sizes and options.
        weights: tensors by their checkpoint names.
        prefix: what the names of this block's tensors begin with, such as "model.layers.3.".
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Tensor], prefix: str) -> None:
        def pack(*names: str) -> ops.PackedWeight:
            """Projections side by side, with their biases where any has one."""
            matrices = [weights[f"{prefix}{name}.weight"] for name in names]
            biases = [weights.get(f"{prefix}{name}.bias") for name in names]
            present = [b for b in biases if b is not None]
            return ops.pack_weight(matrices, bias=torch.cat(present) if present else None)

        self._eps = config.rms_norm_eps
        self._heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.head_dim
        self._scale = float(config.head_dim**-0.5)
        self._attention_norm = weights[f"{prefix}input_layernorm.weight"].float()
        self._qkv = pack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._out = pack("self_attn.o_proj")
        self._mlp_norm = weights[f"{prefix}post_attention_layernorm.weight"].float()
        self._gate_up = pack("mlp.gate_proj", "mlp.up_proj")
        self._down = pack("mlp.down_proj")

    def to_int8(self) -> LlamaBlock:
        """A copy whose matrices are int8: for drafts, as it computes something else."""
        part = copy(self)
        part._qkv, part._out = self._qkv.to_int8(), self._out.to_int8()
        part._gate_up, part._down = self._gate_up.to_int8(), self._down.to_int8()
        return part

    def prefill(self, x: Tensor, *, rotation: Tensor, lengths: Sequence[int]) -> tuple[Tensor, KVEntries]:
        """Runs whole prompts.

        Args:
            x: [B, T, D] residual stream.
            rotation: float32 [T, 2, D'] of positions 0 to T - 1.
            lengths: tokens of each row.

        Returns:
            The residual stream after the block, [B, T, D], and the keys and values.
        """
        q, k, v = self._project(x, rotation[None])
        o = torch.zeros_like(q)
        for row, length in enumerate(lengths):
            # Each prompt by itself: beside a longer one, what it sums would be cut into other blocks.
            heads = (t[row : row + 1, :length].transpose(1, 2).contiguous() for t in (q, k, v))
            query, key, value = heads  # [1, H, T, D']
            seen = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=True
            )
            o[row, :length] = seen[0].transpose(0, 1)  # [H, T, D'] -> [T, H, D']
        return self._mlp(self._joined(x, o)), KVEntries(k, v)

    def verify(
        self,
        x: Tensor,
        *,
        cache: DecodingCache,
        layer: int,
        slots: Tensor,
        parents: Tensor | None,
        lengths: Tensor | None,
        prefix: Steps | None,
        rotation: Tensor,
        mixer: bool = True,
        mlp: bool = True,
    ) -> tuple[Tensor, KVEntries | None]:
        """Runs chains or trees of tokens over the cache, which does not change.

        Args:
            x: [B, N, D] residual stream.
            cache: read at `slots`.
            layer: this block's number in it.
            slots, parents, lengths, prefix: as for `CausalLM.forward`.
            rotation: float32 [B, N, 2, D'] of the nodes' positions.
            mixer: False skips attention, which then leaves no keys and values.
            mlp: False skips the MLP.

        Returns:
            The residual stream after the block, [B, N, D], and the nodes' keys and values.
        """
        if not mixer:
            return (self._mlp(x) if mlp else x), None
        q, k, v = self._project(x, rotation)
        keys, values = cache.keys_values(layer)
        before = None if prefix is None else prefix.kv(layer)
        o = ops.tree_attention(
            q,
            k,
            v,
            k_cache=keys,
            v_cache=values,
            cache_lengths=cache.lengths,
            slots=slots,
            parents=parents,
            lengths=lengths,
            prefix_k=None if before is None else before.k,
            prefix_v=None if before is None else before.v,
            prefix_parents=None if prefix is None else prefix.parents,
            scale=self._scale,
        )
        x = self._joined(x, o)
        return (self._mlp(x) if mlp else x), KVEntries(k, v)

    def _mlp(self, x: Tensor) -> Tensor:
        """The MLP with its residual: [B, N, D]."""
        h = ops.rms_norm_linear(x, self._mlp_norm, self._eps, self._gate_up)
        return ops.swiglu_linear(h, self._down, residual=x)

    def _project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, N, HQ, D'], k and v [B, N, HK, D'], turned to their positions."""
        queries, keys = self._heads
        y = ops.rms_norm_linear(x, self._attention_norm, self._eps, self._qkv)
        heads = y.view(*x.shape[:-1], queries + 2 * keys, self._head_dim)
        rows = rotation.expand(len(x), -1, -1, -1)
        turned = ops.rotate_heads(heads[:, :, : queries + keys], rows)
        return turned[:, :, :queries], turned[:, :, queries:], heads[:, :, queries + keys :]

    def _joined(self, x: Tensor, o: Tensor) -> Tensor:
        """The residual stream with the heads' outputs o, [B, N, HQ, D']: [B, N, D]."""
        return ops.linear(o.flatten(2), self._out, residual=x)
