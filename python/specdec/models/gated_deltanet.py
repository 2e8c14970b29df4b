"""Gated DeltaNet (arXiv 2412.06464) over specdec's ops.

Every op treats a row alike whatever stands beside it, so the logits of a verified node are bit for bit those
of decoding its path token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer
from specdec.cache import DecodingCache, LayerFactors, LayerSpec, Round, Steps
from specdec.models.checkpoint import load_config, load_weights
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.features import Feature, FeatureTap
from specdec.models.solving import solve_layer
from specdec.ops.strategy import STRATEGIES


@dataclass(frozen=True)
class _Layer:
    """Weights of one block, as the ops take them."""

    mixer_norm: Tensor
    projections: ops.PackedWeight  # q, k, v, output gate, a, b along the output dimension
    conv_weight: Tensor  # [C, W] over the channels of q, k, v
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor
    head_norm: Tensor
    out: ops.PackedWeight
    mlp_norm: Tensor
    gate_up: ops.PackedWeight
    down: ops.PackedWeight


class GatedDeltaNetForCausalLM:
    """A Gated DeltaNet in the FLA `gated_deltanet` checkpoint format, for inference.

    Args:
        config: the validated configuration.
        weights: tensors by their checkpoint names.
        dtype: of the activations: float32, or bfloat16. Weights that are bfloat16 in the checkpoint are read
            as they are in both cases; the recurrent state, its factors, gates and beta are float32 in both
            cases.
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
        self._layers = [self._layer(weights, i) for i in range(config.num_hidden_layers)]
        self._spec = LayerSpec(
            config.num_v_heads,
            config.head_v_dim,
            config.head_k_dim,
            conv_channels=config.conv_dim,
            conv_width=config.conv_size if config.use_short_conv else 1,
        )

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype = torch.float32
    ) -> GatedDeltaNetForCausalLM:
        """Loads a directory with config.json and safetensors.

        Raises:
            ValueError: the configuration or a tensor is not what the format says; the message names it.
        """
        config = load_config(path)
        return cls(config, load_weights(path, config, dtype=dtype), dtype=dtype)

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return self.config.vocab_size

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return self.config.num_parameters

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
        return part

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
        return DecodingCache([self._spec] * len(self._layers), slots, conv_dtype=self.dtype)

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
        lengths = [len(p) for p in prompts]
        if not prompts or min(lengths) < 1:
            raise ValueError(f"prompts: got lengths {lengths}, want at least one token in each")
        tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.long)
        _check_tokens(tokens, self.vocab_size)
        cache.reset(slots)
        slot_tensor = torch.as_tensor(list(slots), dtype=torch.int32)
        length_tensor = torch.as_tensor(lengths, dtype=torch.int32)

        x = self._embeddings[tokens]  # [B, T, D]
        for i, layer in enumerate(self._layers):
            mixed, gate, a, b = self._project(layer, x)
            window = _given(cache.conv[i])
            activated = ops.conv_verify(
                mixed,
                layer.conv_weight,
                layer.conv_bias,
                conv_state=window,
                slots=slot_tensor,
                lengths=length_tensor,
            )
            ops.conv_commit(window, mixed, None, length_tensor, slots=slot_tensor)
            q, k, v = self._heads(activated)
            g, beta = ops.gated_delta_gates(a, b, layer.A_log, layer.dt_bias, self.config.allow_neg_eigval)
            o = ops.prefill(
                q,
                k,
                v,
                g,
                beta,
                state=cache.state[i],
                slots=slot_tensor,
                lengths=length_tensor,
                scale=self._scale,
                qk_l2norm=True,
            )
            x = self._finish(layer, x, o, gate)
            if tap is not None:
                tap.offer("readout", i, o)
                tap.offer("hidden", i, x)
        last = x[torch.arange(len(prompts)), length_tensor.long() - 1]  # [B, D]
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
        pending = cache.take_pending(slots)
        factors = []
        verify_layer = solve_layer if self._strategy == "solve" else ops.verify_layer
        for i, layer in enumerate(self._layers):
            mixed, gate, a, b = self._project(layer, x)
            o, recurrent = verify_layer(
                mixed,
                a,
                b,
                conv_weight=layer.conv_weight,
                conv_bias=layer.conv_bias,
                A_log=layer.A_log,
                dt_bias=layer.dt_bias,
                neg_eigval=self.config.allow_neg_eigval,
                conv_state=_given(cache.conv[i]),
                state=cache.state[i],
                slots=slots,
                parents=parents,
                lengths=lengths,
                pending=None if pending is None else pending.recurrent(i),
                pending_mixed=None if pending is None else pending.mixed(i),
                prefix=None if prefix is None else prefix.recurrent(i),
                prefix_mixed=None if prefix is None else prefix.mixed(i),
                scale=self._scale,
                strategy=self._strategy,
            )
            factors.append(LayerFactors(recurrent, mixed))
            x = self._finish(layer, x, o, gate)
            if tap is not None:
                tap.offer("readout", i, o)
                tap.offer("hidden", i, x)
        return self._logits(x), Round(tuple(factors), slots, parents)

    # --- parts of a block ---

    @property
    def _scale(self) -> float:
        return float(self.config.head_k_dim**-0.5)

    def _project(self, layer: _Layer, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """All input projections: (q k v) [B, N, C], gate [B, N, HV * DV] or None, a and b [B, N, HV]."""
        c = self.config
        y = ops.rms_norm_linear(x, layer.mixer_norm, c.norm_eps, layer.projections)
        channels = c.conv_dim
        gate = y[..., channels : channels + c.value_dim] if c.use_gate else None
        a = y[..., -2 * c.num_v_heads : -c.num_v_heads]
        b = y[..., -c.num_v_heads :]
        return y[..., :channels], gate, a, b

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, C] -> q, k [B, N, HK, DK] and v [B, N, HV, DV], as views."""
        c = self.config
        return (
            _split_heads(mixed[..., : c.key_dim], c.num_heads),
            _split_heads(mixed[..., c.key_dim : 2 * c.key_dim], c.num_heads),
            _split_heads(mixed[..., 2 * c.key_dim :], c.num_v_heads),
        )

    def _finish(self, layer: _Layer, x: Tensor, o: Tensor, gate: Tensor | None) -> Tensor:
        """Head norm, output projection and the MLP, with both residuals: [B, N, D]."""
        eps = self.config.norm_eps
        o = o.view(*x.shape[:-1], -1)  # [B, N, HV, DV] -> [B, N, HV * DV]
        x = ops.rms_norm_linear(o, layer.head_norm, eps, layer.out, gate=gate, residual=x)
        h = ops.rms_norm_linear(x, layer.mlp_norm, eps, layer.gate_up)
        return ops.swiglu_linear(h, layer.down, residual=x)

    def _logits(self, x: Tensor) -> Tensor:
        """Final norm and head in float32, so that a bfloat16 model does not round its logits into ties."""
        return ops.rms_norm_linear(x.float(), self._final_norm, self.config.norm_eps, self._head)

    def _layer(self, weights: Mapping[str, Tensor], index: int) -> _Layer:
        c = self.config
        prefix = f"model.layers.{index}"

        def get(name: str) -> Tensor:
            return weights[f"{prefix}.{name}"]

        projections = [get(f"attn.{n}_proj.weight") for n in (*"qkv", *(["g"] if c.use_gate else []), *"ab")]
        # Without a short convolution q, k, v still pass SiLU: a convolution of one tap that is 1.
        conv_weight, conv_bias = torch.ones(c.conv_dim, 1), None
        if c.use_short_conv:
            taps = torch.cat([get(f"attn.{n}_conv1d.weight") for n in "qkv"])  # [C, 1, W]
            conv_weight = taps.squeeze(1).float().contiguous()
        if c.conv_bias:
            conv_bias = torch.cat([get(f"attn.{n}_conv1d.bias") for n in "qkv"]).float().contiguous()
        return _Layer(
            mixer_norm=get("attn_norm.weight").float(),
            projections=ops.pack_weight(torch.cat(projections)),
            conv_weight=conv_weight,
            conv_bias=conv_bias,
            A_log=get("attn.A_log").float(),
            dt_bias=get("attn.dt_bias").float(),
            head_norm=get("attn.o_norm.weight").float(),
            out=ops.pack_weight(get("attn.o_proj.weight")),
            mlp_norm=get("mlp_norm.weight").float(),
            gate_up=ops.pack_weight(torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])),
            down=ops.pack_weight(get("mlp.down_proj.weight")),
        )


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, heads * D] -> [B, N, heads, D], a view."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a cache that was made for another model"
    return tensor


def _check_tokens(tokens: Tensor, vocab_size: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"prompts: got token ids from {low} to {high}, want 0 to {vocab_size - 1}")
