"""Llama-family models over specdec's ops.

Verification treats each node alike whatever stands beside it, so its logits are bit for bit those of decoding
its path token by token. A prompt is read with torch's attention, whose rounding is its own; nor does it
depend on the other prompts of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec import ops
from specdec._rows import last_rows, take_rows
from specdec.cache import DecodingCache, KVEntries, KVSpec, Round, Steps
from specdec.models.features import Feature, FeatureTap
from specdec.models.layered import Layered, Pass
from specdec.models.llama_block import LlamaBlock
from specdec.models.llama_checkpoint import load_llama
from specdec.models.llama_config import LlamaConfig
from specdec.models.positions import node_positions
from specdec.models.prompts import padded_prompts
from specdec.models.rope import Rotation


class LlamaForCausalLM(Layered):
    """A Llama-family model for inference.

    Args:
        config: the validated configuration.
        weights: tensors by their checkpoint names.
        dtype: of the activations, keys and values: float32, or bfloat16. Weights that are bfloat16 in the
            checkpoint are read as they are in both cases; sums are float32 in both cases.

    Attributes are those of `Layered`.
    """

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype: got {dtype}, want torch.float32 or torch.bfloat16")
        self.config: LlamaConfig = config
        self.dtype = dtype
        embeddings = weights["model.embed_tokens.weight"]
        self._embeddings = embeddings.to(dtype)
        self._head = ops.pack_weight(embeddings if config.tie_word_embeddings else weights["lm_head.weight"])
        self._final_norm = weights["model.norm.weight"].float()
        self._layers: list[LlamaBlock] = [
            LlamaBlock(config, weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)
        ]
        self._spec = KVSpec(config.num_key_value_heads, config.head_dim)
        self._rotation = Rotation(config.rope, config.head_dim)
        self._eps = config.rms_norm_eps

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        """Loads a directory with config.json and safetensors, or a GGUF file.

        Raises:
            ValueError: the configuration or a tensor is not what the format says; the message names it.
        """
        config, weights = load_llama(Path(path), dtype=dtype)
        model = cls(config, weights, dtype=dtype)
        model.source = Path(path)
        return model

    def feature_size(self, feature: Feature) -> int:
        """Numbers that a feature has for each token; see `CausalLM.feature_size`."""
        last = len(self._layers) - 1
        if feature.kind != "hidden" or not 0 <= feature.layer <= last:
            raise ValueError(f"feature: got {feature}, want hidden:N with a layer from 0 to {last}")
        return self.config.hidden_size

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        cache: DecodingCache,
        slots: Sequence[int],
        tap: FeatureTap | None = None,
    ) -> Tensor:
        """Reads whole prompts into empty slots; see `CausalLM.prefill`."""
        tokens, lengths = padded_prompts(prompts, self.vocab_size)
        cache.reset(slots)
        rotation = self._rotation.at(torch.arange(tokens.shape[1]))  # [T, 2, D']
        x = take_rows(self._embeddings, tokens)  # [B, T, D]
        made: list[KVEntries | None] = []
        for i, layer in enumerate(self._layers):
            x, entries = layer.prefill(x, rotation=rotation, lengths=lengths.tolist())
            made.append(entries)
            if tap is not None:
                tap.offer("hidden", i, x)
        slot_tensor = torch.as_tensor(list(slots), dtype=torch.int32)
        cache.commit(Round(tuple(made), slot_tensor, None, tokens.shape[1]), None, lengths)
        last = last_rows(x, lengths)  # [B, D]
        return self.readout(last)

    def _rotation_at(
        self, cache: DecodingCache, slots: Tensor, nodes: int, parents: Tensor | None, prefix: Steps | None
    ) -> Tensor:
        return self._rotation.at(node_positions(cache, slots, nodes, parents=parents, prefix=prefix))

    def _block(
        self, layer: int, x: Tensor, call: Pass, *, mixer: bool, mlp: bool
    ) -> tuple[Tensor, Tensor | None, KVEntries | None]:
        assert call.rotation is not None
        x, entries = self._layers[layer].verify(
            x,
            cache=call.cache,
            layer=layer,
            slots=call.slots,
            parents=call.parents,
            lengths=call.lengths,
            prefix=call.prefix,
            rotation=call.rotation,
            mixer=mixer,
            mlp=mlp,
        )
        return x, None, entries
