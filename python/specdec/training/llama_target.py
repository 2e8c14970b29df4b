"""A Llama-family model that is read and never changed, in plain PyTorch: many texts of one length at a time.

The package's own prefill computes every row by itself, for exactness' sake. What a model computes on a text
to train on need not be exact, and a library's products and attention over whole batches are many times
faster.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.features import Feature, FeatureTap
from specdec.models.llama_checkpoint import load_llama
from specdec.models.rope import Rotation
from specdec.training.target import FrozenModel


class FrozenLlama(FrozenModel):
    """A Llama-family model.

    Args:
        directory: of its checkpoint, or its GGUF file.
        autocast: multiply in bfloat16; the residual stream and all sums stay float32.

    Raises:
        ValueError: it cannot be loaded.
    """

    def __init__(self, directory: Path, *, autocast: bool) -> None:
        self._config, weights = load_llama(directory)
        c, embeddings = self._config, weights["model.embed_tokens.weight"]
        super().__init__(
            directory,
            num_layers=c.num_hidden_layers,
            norm=weights["model.norm.weight"],
            norm_eps=c.rms_norm_eps,
            head=embeddings if c.tie_word_embeddings else weights["lm_head.weight"],
            eos_token_ids=c.eos_token_ids,
        )
        self._embeddings = embeddings
        self._rotation = Rotation(c.rope, c.head_dim)
        self._autocast = autocast
        self._blocks = [
            {
                name.removeprefix(prefix): x.bfloat16() if autocast and x.dim() == 2 else x
                for name, x in weights.items()
                if name.startswith(prefix)
            }
            for prefix in (f"model.layers.{i}." for i in range(c.num_hidden_layers))
        ]

    def feature_size(self, feature: Feature) -> int:
        if feature.kind != "hidden" or not 0 <= feature.layer < self.num_layers:
            raise ValueError(
                f"feature: got {feature}, want hidden:N with a layer from 0 to {self.num_layers - 1}"
            )
        return self.hidden_size

    @torch.inference_mode()
    def read(self, tokens: Tensor, tap: FeatureTap) -> None:
        rotation = self._rotation.at(torch.arange(tokens.shape[1]))  # [T, 2, D']
        x = self._embeddings[tokens]  # [B, T, D]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            for i, block in enumerate(self._blocks[: max(tap.layers) + 1]):
                x = x + self._attention(block, x, rotation)
                x = x + self._mlp(block, x)
                tap.offer("hidden", i, x)

    def _normed(self, block: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        weight = block[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.norm_eps)

    def _attention(self, block: dict[str, Tensor], x: Tensor, rotation: Tensor) -> Tensor:
        normed = self._normed(block, "input_layernorm", x)
        q, k, v = (
            _linear(block, f"self_attn.{name}_proj", normed)
            .view(*x.shape[:2], -1, self._config.head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )  # [B, H, T, D']
        o = F.scaled_dot_product_attention(
            _turned(q, rotation), _turned(k, rotation), v, is_causal=True, enable_gqa=True
        )
        return _linear(block, "self_attn.o_proj", o.transpose(1, 2).flatten(2))

    def _mlp(self, block: dict[str, Tensor], x: Tensor) -> Tensor:
        normed = self._normed(block, "post_attention_layernorm", x)
        gate, up = (_linear(block, f"mlp.{name}_proj", normed) for name in ("gate", "up"))
        return _linear(block, "mlp.down_proj", F.silu(gate) * up)


def _linear(block: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, block[f"{name}.weight"], block.get(f"{name}.bias"))


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Heads [B, H, T, D'] turned to their positions by `rotation` [T, 2, D']; see `ops.rotate_heads`."""
    cos, sin = rotation.unbind(1)
    swapped = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    return (x * cos + swapped * sin).to(x.dtype)
