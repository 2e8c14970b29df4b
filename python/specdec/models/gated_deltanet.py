"""Gated DeltaNet (arXiv 2412.06464) over specdec's ops.

Every op treats a row alike whatever stands beside it, so the logits of a verified node are bit for bit those
of decoding its path token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from specdec import ops
from specdec._rows import last_rows, take_rows
from specdec.cache import DecodingCache, LayerFactors
from specdec.models.block import GatedDeltaNetBlock, layer_spec
from specdec.models.checkpoint import load_config, load_weights
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.features import Feature, FeatureTap
from specdec.models.layered import Layered, Pass
from specdec.models.prompts import padded_prompts
from specdec.ops.strategy import STRATEGIES


class GatedDeltaNetForCausalLM(Layered):
    """A Gated DeltaNet in the FLA `gated_deltanet` checkpoint format, for inference.

    Args:
        config: the validated configuration.
        weights: tensors by their checkpoint names.
        dtype: of the activations: float32, or bfloat16. Weights that are bfloat16 in the checkpoint are read
            as they are in both cases; the recurrent state, its factors, gates and beta are float32 in both
            cases.

    Attributes are those of `Layered`.
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype: got {dtype}, want torch.float32 or torch.bfloat16")
        self.config: GatedDeltaNetConfig = config
        self.dtype = dtype
        self._strategy = "exact"
        embeddings = weights["model.embeddings.weight"]
        self._embeddings = embeddings.to(dtype)
        self._head = ops.pack_weight(embeddings if config.tie_word_embeddings else weights["lm_head.weight"])
        self._final_norm = weights["model.norm.weight"].float()
        self._layers: list[GatedDeltaNetBlock] = [
            GatedDeltaNetBlock(config, weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)
        ]
        self._spec = layer_spec(config)
        self._eps = config.norm_eps

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype = torch.float32
    ) -> GatedDeltaNetForCausalLM:
        """Loads a directory with config.json and safetensors.

        Raises:
            ValueError: the configuration or a tensor is not what the format says; the message names it.
        """
        config = load_config(path)
        model = cls(config, load_weights(path, config, dtype=dtype), dtype=dtype)
        model.source = Path(path)
        return model

    @property
    def early_exit_layers(self) -> tuple[int, ...]:
        """Numbers of layers, ascending, after which norm and head were trained to predict too."""
        return self.config.early_exit_layers

    def with_strategy(self, strategy: str) -> GatedDeltaNetForCausalLM:
        """This model with a fixed strategy of verification, for studies. The weights are shared.

        Args:
            strategy: "serial" or "hybrid"; "exact", which every model starts with: the faster of the two by
                the measured table; or "solve", whose rounding is not that of decoding, so that texts may part
                at near-ties.

        Raises:
            ValueError: there is no such strategy.
        """
        if strategy not in ("exact", *STRATEGIES):
            raise ValueError(f"strategy: got {strategy!r}, want 'exact', 'serial', 'hybrid' or 'solve'")
        fixed = copy(self)
        fixed._strategy = strategy
        return fixed

    def feature_size(self, feature: Feature) -> int:
        """Numbers that a feature has for each token; see `CausalLM.feature_size`."""
        last = len(self._layers) - 1
        if not 0 <= feature.layer <= last:
            raise ValueError(f"feature: got {feature}, want a layer from 0 to {last}")
        return self.config.hidden_size if feature.kind == "hidden" else self.config.value_dim

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
        slot_tensor = torch.as_tensor(list(slots), dtype=torch.int32)
        x = take_rows(self._embeddings, tokens)  # [B, T, D]
        for i, layer in enumerate(self._layers):
            x, o = layer.prefill(x, cache=cache, layer=i, slots=slot_tensor, lengths=lengths)
            if tap is not None and i in tap.layers:
                tap.offer("readout", i, o)
                tap.offer("hidden", i, x)
        last = last_rows(x, lengths)  # [B, D]
        return self.readout(last)

    def _block(
        self, layer: int, x: Tensor, call: Pass, *, mixer: bool, mlp: bool
    ) -> tuple[Tensor, Tensor | None, LayerFactors | None]:
        return self._layers[layer].verify(
            x,
            cache=call.cache,
            layer=layer,
            slots=call.slots,
            parents=call.parents,
            lengths=call.lengths,
            pending=call.pending,
            prefix=call.prefix,
            strategy=self._strategy,
            mixer=mixer,
            mlp=mlp,
        )
