"""Llama-family models over specdec's ops.

Verification treats each node alike whatever stands beside it, so its logits are bit for bit those of decoding
its path token by token. A prompt is read with torch's attention, whose rounding is its own; nor does it
depend on the other prompts of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer
from specdec.cache import DecodingCache, KVEntries, KVSpec, Round, Steps
from specdec.models.features import Feature, FeatureTap
from specdec.models.llama_block import LlamaBlock
from specdec.models.llama_checkpoint import load_llama
from specdec.models.llama_config import LlamaConfig
from specdec.models.positions import node_positions
from specdec.models.prompts import padded_prompts
from specdec.models.rope import Rotation
from specdec.models.skip_file import check_vocabulary
from specdec.models.skipping import SkipSet


class LlamaForCausalLM:
    """A Llama-family model for inference.

    Args:
        config: the validated configuration.
        weights: tensors by their checkpoint names.
        dtype: of the activations, keys and values: float32, or bfloat16. Weights that are bfloat16 in the
            checkpoint are read as they are in both cases; sums are float32 in both cases.

    Attributes:
        config: as given.
        dtype: of the activations.
        source: the directory or file that the weights came from; None where they came from somewhere else.
        vocabulary: int64 [V'] the tokens that the columns of its logits stand for, ascending; None: all.
    """

    def __init__(
        self, config: LlamaConfig, weights: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype: got {dtype}, want torch.float32 or torch.bfloat16")
        self.config = config
        self.dtype = dtype
        embeddings = weights["model.embed_tokens.weight"]
        self._embeddings = embeddings.to(dtype)
        self._head = ops.pack_weight(embeddings if config.tie_word_embeddings else weights["lm_head.weight"])
        self._final_norm = weights["model.norm.weight"].float()
        self._layers = [
            LlamaBlock(config, weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)
        ]
        self._spec = KVSpec(config.num_key_value_heads, config.head_dim)
        self._rotation = Rotation(config.rope, config.head_dim)
        self._skips = SkipSet()
        self.source: Path | None = None
        self.vocabulary: Tensor | None = None

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

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return self.config.vocab_size

    @property
    def embeddings(self) -> Tensor:
        """[V, D] the rows that tokens enter as, in the dtype of the activations."""
        return self._embeddings

    @property
    def head(self) -> ops.PackedWeight:
        """[V, D] the output head."""
        return self._head

    @property
    def num_layers(self) -> int:
        """Blocks, each of attention and an MLP."""
        return len(self._layers)

    @property
    def num_parameters(self) -> int:
        """Number of weights that a decode step reads, the embedding counted with a tied head."""
        c, skips = self.config, self._skips
        skipped = len(skips.mixers) * c.mixer_parameters + len(skips.mlps) * c.mlp_parameters
        columns = c.vocab_size if self.vocabulary is None else len(self.vocabulary)
        return c.num_parameters - skipped - (c.vocab_size - columns) * c.hidden_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset(self.config.eos_token_ids)

    def first_layers(self, count: int) -> LlamaForCausalLM:
        """An early exit: the first `count` layers with this model's norm and head. The weights are shared.

        Raises:
            ValueError: `count` is not 1 to the number of layers.
        """
        check_integer("count", count, 1, len(self._layers))
        part = copy(self)
        part.config = replace(self.config, num_hidden_layers=count)
        part._layers = self._layers[:count]
        part.source = None
        return part

    def skipping(self, skips: SkipSet, vocabulary: Sequence[int] | None = None) -> LlamaForCausalLM:
        """A view of this model that leaves sub-layers out; see `SkippableLM.skipping`."""
        skips.check_layers(len(self._layers))
        if self.vocabulary is not None:
            raise ValueError("vocabulary: this view has one already, want a view of the whole model")
        view = copy(self)
        view._skips = skips
        view.source = None
        if vocabulary is not None:
            check_vocabulary(vocabulary, self.vocab_size)
            view.vocabulary = torch.tensor(list(vocabulary))
            view._head = ops.pack_weight(self._head.unpack()[view.vocabulary])
        return view

    def sub_layers(
        self,
        nodes: int,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        prefix: Steps | None = None,
    ) -> list[Callable[[Tensor], Tensor]]:
        """The sub-layers one by one; see `SkippableLM.sub_layers`."""
        cache.flush()
        rotation = self._rotation.at(node_positions(cache, slots, nodes, parents=parents, prefix=prefix))

        def part(number: int) -> Callable[[Tensor], Tensor]:
            layer, mlp = divmod(number, 2)
            return lambda x: self._layers[layer].verify(
                x,
                cache=cache,
                layer=layer,
                slots=slots,
                parents=parents,
                lengths=None,
                prefix=prefix,
                rotation=rotation,
                mixer=not mlp,
                mlp=bool(mlp),
            )[0]

        return [part(number) for number in range(2 * len(self._layers))]

    def new_cache(self, slots: int) -> DecodingCache:
        """An empty cache for `slots` sequences: keys and values in the model's dtype."""
        return DecodingCache([self._spec] * len(self._layers), slots, dtype=self.dtype)

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
        x = self._embeddings[tokens]  # [B, T, D]
        made: list[KVEntries | None] = []
        for i, layer in enumerate(self._layers):
            x, entries = layer.prefill(x, rotation=rotation, lengths=lengths.tolist())
            made.append(entries)
            if tap is not None:
                tap.offer("hidden", i, x)
        slot_tensor = torch.as_tensor(list(slots), dtype=torch.int32)
        cache.commit(Round(tuple(made), slot_tensor, None, tokens.shape[1]), None, lengths)
        last = x[torch.arange(len(prompts)), lengths.long() - 1]  # [B, D]
        return self._logits(last)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        prefix: Steps | None = None,
        tap: FeatureTap | None = None,
    ) -> tuple[Tensor, Round]:
        """Verifies a chain or a tree of tokens a sequence; see `CausalLM.forward`."""
        x = self._embeddings[tokens]  # [B, N, D]; first, as tokens outside the vocabulary fail here
        cache.flush()  # writes keys and values; that needs nothing of a forward pass
        nodes, skips = tokens.shape[1], self._skips
        rotation = self._rotation.at(
            node_positions(cache, slots, nodes, parents=parents, prefix=prefix)
        )  # [B, N, 2, D']
        made: list[KVEntries | None] = []
        for i, layer in enumerate(self._layers):
            x, entries = layer.verify(
                x,
                cache=cache,
                layer=i,
                slots=slots,
                parents=parents,
                lengths=lengths,
                prefix=prefix,
                rotation=rotation,
                mixer=i not in skips.mixers,
                mlp=i not in skips.mlps,
            )
            made.append(entries)
            if tap is not None:
                tap.offer("hidden", i, x)
        return self._logits(x), Round(tuple(made), slots, parents, nodes)

    def _logits(self, x: Tensor) -> Tensor:
        """Final norm and head in float32, so that a bfloat16 model does not round its logits into ties."""
        return ops.rms_norm_linear(x.float(), self._final_norm, self.config.rms_norm_eps, self._head)
