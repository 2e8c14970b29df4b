"""Gated DeltaNet (arXiv 2412.06464) over specdec's ops.

Every op treats a row alike whatever stands beside it, so the logits of a verified node are bit for bit those
of decoding its path token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specdec import ops
from specdec._rows import last_rows, take_rows
from specdec.cache import DecodingCache, LayerEntries, LayerFactors, PendingRound, Round, Steps
from specdec.models.block import GatedDeltaNetBlock, layer_spec
from specdec.models.checkpoint import load_config, load_weights
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.features import Feature, FeatureTap
from specdec.models.layered import Layered, Pass
from specdec.models.prompts import padded_prompts
from specdec.ops.strategy import STRATEGIES


class Span(NamedTuple):
    """Consecutive layers as the operators run them in one call.

    Attributes:
        stack: their weights; None where all of their sub-layers are skipped.
        layers: those that do anything.
        mixers: those whose mixer runs.
    """

    stack: ops.BlockStack | None
    layers: list[int]
    mixers: list[int]


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
        self._spans: dict[tuple[int, ...], Span] = {}

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
        fixed = self._copied()
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

    def _run(
        self, x: Tensor, layers: range, call: Pass, made: list[LayerEntries], tap: FeatureTap | None
    ) -> Tensor:
        if self._strategy == "solve":  # which verify_stack does not take
            return super()._run(x, layers, call, made, tap)
        cache, pending = call.cache, call.pending
        for part in self._parts(layers, pending):
            span = self._span(part)
            if span.stack is None:
                continue
            waits = pending is not None and any(pending.round.layers[i] is not None for i in span.mixers)
            found = ops.verify_stack(
                x,
                span.stack,
                conv_states=[_window(cache, i) for i in span.mixers],
                states=[cache.state[i] for i in span.mixers],
                slots=call.slots,
                parents=call.parents,
                lengths=call.lengths,
                pending=_pending_of(pending, span.mixers) if waits and pending is not None else None,
                prefix=_prefix_of(call.prefix, span.mixers),
                scale=self._layers[0].scale,
                strategy=self._strategy,
            )
            for i, entries in zip(span.mixers, found.entries, strict=True):
                made[i] = LayerFactors(*entries)
            if tap is not None:
                read = dict(zip(span.mixers, found.read, strict=True))
                for i, after in zip(span.layers, found.hidden, strict=True):
                    if i in tap.layers:
                        if i in read:
                            tap.offer("readout", i, read[i])
                        tap.offer("hidden", i, after)
            x = found.hidden[-1]
        return x

    def grow(
        self,
        logits: Tensor,
        requests: Sequence[ops.TreeRequest],
        rules: ops.TreeRules,
        *,
        outputs: Tensor,
        layers: range,
        cache: DecodingCache,
        prefix: Steps,
        head: ops.PackedWeight | None = None,
        adapter: ops.DraftAdapter | None = None,
        sampling: ops.DraftSampling | None = None,
    ) -> ops.GrownTrees | None:
        """Drafts with the first layers in one call; see `LayeredLM.grow`."""
        span, round = self._span(layers), prefix.round
        if span.stack is None or round is None or self._strategy == "solve":
            return None
        return ops.draft_tree(
            logits,
            requests,
            rules,
            ops.Drafting(
                self._embeddings,
                None,
                span.stack,
                self._final_norm,
                self._head if head is None else head,
                adapter,
            ),
            ops.DraftPlace(
                outputs,
                _prefix_of(prefix, span.mixers) or ops.StackPrefix([], round.parents),
                [_window(cache, i) for i in span.mixers],
                [cache.state[i] for i in span.mixers],
                round.slots,
                self._layers[0].scale,
            ),
            sampling=sampling,
        )

    def _span(self, layers: Sequence[int]) -> Span:
        """These layers, made once."""
        key = tuple(layers)
        if key not in self._spans:
            skips = self._skips
            parts = {
                i: self._layers[i].part(mixer=i not in skips.mixers, mlp=i not in skips.mlps) for i in key
            }
            blocks = {i: block for i, block in parts.items() if block is not None}
            stack = ops.BlockStack(list(blocks.values())) if blocks else None
            self._spans[key] = Span(stack, list(blocks), [i for i in blocks if i not in skips.mixers])
        return self._spans[key]

    def _copied(self) -> GatedDeltaNetForCausalLM:
        part = super()._copied()
        part._spans = {}
        return part

    @staticmethod
    def _parts(layers: range, pending: PendingRound | None) -> Sequence[Sequence[int]]:
        """The layers in runs of those in which something is pending and those in which nothing is, as a draft
        settles those that it reads.
        """
        if pending is None:
            return [layers]
        waits = [pending.round.layers[i] is not None for i in layers]
        if all(waits):
            return [layers]
        return [
            [i for i, _ in run]
            for _, run in groupby(zip(layers, waits, strict=True), key=lambda pair: pair[1])
        ]

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


def _window(cache: DecodingCache, layer: int) -> Tensor:
    window = cache.conv[layer]
    assert window is not None, "a cache that was made for another model"
    return window


def _prefix_of(prefix: Steps | None, mixers: Sequence[int]) -> ops.StackPrefix | None:
    """What the steps have of these layers; None where that is nothing."""
    if prefix is None or prefix.round is None or not mixers:
        return None
    return ops.StackPrefix(_entries_of(prefix.round, mixers), prefix.round.parents)


def _pending_of(pending: PendingRound, mixers: Sequence[int]) -> ops.StackPending:
    return ops.StackPending(_entries_of(pending.round, mixers), pending.path, pending.path_lengths)


def _entries_of(round: Round, mixers: Sequence[int]) -> list[ops.BlockEntries]:
    found = []
    for i in mixers:
        entries = round.layers[i]
        assert isinstance(entries, LayerFactors), "a round of another model"
        assert entries.conv is not None
        found.append(ops.BlockEntries(entries.recurrent, entries.conv))
    return found
