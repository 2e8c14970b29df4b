"""Gated DeltaNet (arXiv 2412.06464) over specdec's ops.

Every op treats a row alike whatever stands beside it, so the logits of a verified node are bit for bit those
of decoding its path token by token.
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
from specdec.cache import DecodingCache, Round, Steps
from specdec.models.block import GatedDeltaNetBlock, layer_spec
from specdec.models.checkpoint import load_config, load_weights
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.features import Feature, FeatureTap
from specdec.models.prompts import padded_prompts
from specdec.models.skip_file import check_vocabulary
from specdec.models.skipping import SkipSet
from specdec.ops.strategy import STRATEGIES


class GatedDeltaNetForCausalLM:
    """A Gated DeltaNet in the FLA `gated_deltanet` checkpoint format, for inference.

    Args:
        config: the validated configuration.
        weights: tensors by their checkpoint names.
        dtype: of the activations: float32, or bfloat16. Weights that are bfloat16 in the checkpoint are read
            as they are in both cases; the recurrent state, its factors, gates and beta are float32 in both
            cases.

    Attributes:
        source: the directory that the weights came from; None where they came from somewhere else.
        vocabulary: int64 [V'] the tokens that the columns of its logits stand for, ascending; None: all.
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
        self.config = config
        self.dtype = dtype
        self._strategy = "exact"
        embeddings = weights["model.embeddings.weight"]
        self._embeddings = embeddings.to(dtype)
        self._head = ops.pack_weight(embeddings if config.tie_word_embeddings else weights["lm_head.weight"])
        self._final_norm = weights["model.norm.weight"].float()
        self._layers = [
            GatedDeltaNetBlock(config, weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)
        ]
        self._spec = layer_spec(config)
        self._skips = SkipSet()
        self._reads: frozenset[int] | None = None  # layers whose memory a view reads; None: no view
        self.source: Path | None = None
        self.vocabulary: Tensor | None = None

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
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self._layers)

    @property
    def embeddings(self) -> Tensor:
        """[V, D] the rows that tokens enter as, in the dtype of the activations."""
        return self._embeddings

    @property
    def head(self) -> ops.PackedWeight:
        """[V, D] the output head."""
        return self._head

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

    def first_layers(self, count: int) -> GatedDeltaNetForCausalLM:
        """An early exit: the first `count` layers with this model's norm and head. The weights are shared.

        Raises:
            ValueError: `count` is not 1 to the number of layers.
        """
        check_integer("count", count, 1, len(self._layers))
        part = copy(self)
        exits = tuple(layer for layer in self.config.early_exit_layers if layer < count)
        part.config = replace(self.config, num_hidden_layers=count, early_exit_layers=exits)
        part._layers = self._layers[:count]
        part.source = None
        return part

    def skipping(self, skips: SkipSet, vocabulary: Sequence[int] | None = None) -> GatedDeltaNetForCausalLM:
        """A view of this model that leaves sub-layers out; see `SkippableLM.skipping`."""
        skips.check_layers(len(self._layers))
        if self.vocabulary is not None:
            raise ValueError("vocabulary: this view has one already, want a view of the whole model")
        view = copy(self)
        view._skips = skips
        view._reads = frozenset(range(len(self._layers))) - skips.mixers
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

        def part(number: int) -> Callable[[Tensor], Tensor]:
            layer, mlp = divmod(number, 2)
            return lambda x: self._layers[layer].verify(
                x,
                cache=cache,
                layer=layer,
                slots=slots,
                parents=parents,
                lengths=None,
                pending=None,
                prefix=prefix,
                mixer=not mlp,
                mlp=bool(mlp),
            )[0]

        return [part(number) for number in range(2 * len(self._layers))]

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

    def new_cache(self, slots: int) -> DecodingCache:
        """An empty cache for `slots` sequences: float32 state, windows in the model's dtype."""
        return DecodingCache([self._spec] * len(self._layers), slots, dtype=self.dtype)

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
        x = self._embeddings[tokens]  # [B, T, D]
        for i, layer in enumerate(self._layers):
            x, o = layer.prefill(x, cache=cache, layer=i, slots=slot_tensor, lengths=lengths)
            if tap is not None and i in tap.layers:
                tap.offer("readout", i, o)
                tap.offer("hidden", i, x)
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
        skips, pending = self._skips, None
        if self._reads is None:
            pending = cache.take_pending(slots)
        else:
            cache.settle(self._reads)
        factors = []
        for i, layer in enumerate(self._layers):
            x, o, made = layer.verify(
                x,
                cache=cache,
                layer=i,
                slots=slots,
                parents=parents,
                lengths=lengths,
                pending=pending,
                prefix=prefix,
                strategy=self._strategy,
                mixer=i not in skips.mixers,
                mlp=i not in skips.mlps,
            )
            factors.append(made)
            if tap is not None and i in tap.layers:
                if o is not None:
                    tap.offer("readout", i, o)
                tap.offer("hidden", i, x)
        return self._logits(x), Round(tuple(factors), slots, parents, tokens.shape[1])

    def _logits(self, x: Tensor) -> Tensor:
        """Final norm and head in float32, so that a bfloat16 model does not round its logits into ties."""
        return ops.rms_norm_linear(x.float(), self._final_norm, self.config.norm_eps, self._head)
