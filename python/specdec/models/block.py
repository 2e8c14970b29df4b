"""One block of a Gated DeltaNet (arXiv 2412.06464) over specdec's ops: token mixer, then MLP, both residual.

A model is a stack of blocks between an embedding and a head; a recurrent drafter has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from specdec import ops
from specdec.cache import DecodingCache, LayerFactors, LayerSpec, PendingRound, Steps
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.solving import solve_layer


def layer_spec(config: GatedDeltaNetConfig) -> LayerSpec:
    """What a block of these sizes remembers."""
    return LayerSpec(
        config.num_v_heads,
        config.head_v_dim,
        config.head_k_dim,
        conv_channels=config.conv_dim,
        conv_width=config.conv_size if config.use_short_conv else 1,
    )


class GatedDeltaNetBlock:
    """The weights of one block as the ops take them, and the block itself.

    Args:
        config: sizes and options.
        weights: tensors by their checkpoint names.
        prefix: what the names of this block's tensors begin with, such as "model.layers.3.".
        dtype: of the matrices, as `ops.pack_weight` takes it; None for one that loses nothing.

    Attributes:
        weights: as `ops.verify_block` takes them.
        scale: of q.
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        weights: Mapping[str, Tensor],
        prefix: str,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        def get(name: str) -> Tensor:
            return weights[prefix + name]

        c = self._config = config
        self._eps = c.norm_eps
        self.scale = float(c.head_k_dim**-0.5)
        # Bounds of what the projections make side by side: q k v, then the gate; a and b are last.
        self._channels, self._gated = c.conv_dim, c.conv_dim + c.value_dim
        self._mixer_norm = get("attn_norm.weight").float()
        # q, k, v, output gate, a, b along the output dimension
        names = (*"qkv", *(["g"] if c.use_gate else []), *"ab")
        self._projections = ops.pack_weight(torch.cat([get(f"attn.{n}_proj.weight") for n in names]), dtype)
        # Without a short convolution q, k, v still pass SiLU: a convolution of one tap that is 1.
        self._conv_weight = torch.ones(c.conv_dim, 1)  # [C, W] over the channels of q, k, v
        self._conv_bias: Tensor | None = None
        if c.use_short_conv:
            taps = torch.cat([get(f"attn.{n}_conv1d.weight") for n in "qkv"])  # [C, 1, W]
            self._conv_weight = taps.squeeze(1).float().contiguous()
        if c.conv_bias:
            self._conv_bias = torch.cat([get(f"attn.{n}_conv1d.bias") for n in "qkv"]).float().contiguous()
        self._A_log = get("attn.A_log").float()
        self._dt_bias = get("attn.dt_bias").float()
        self._head_norm = get("attn.o_norm.weight").float()
        self._out = ops.pack_weight(get("attn.o_proj.weight"), dtype)
        self._mlp_norm = get("mlp_norm.weight").float()
        self._gate_up = ops.pack_weight(
            torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]), dtype
        )
        self._down = ops.pack_weight(get("mlp.down_proj.weight"), dtype)
        self._gather()

    def to_int8(self) -> GatedDeltaNetBlock:
        """A copy whose matrices are int8: for drafts, as it computes something else."""
        part = copy(self)
        part._projections, part._out = self._projections.to_int8(), self._out.to_int8()
        part._gate_up, part._down = self._gate_up.to_int8(), self._down.to_int8()
        part._gather()
        return part

    def _gather(self) -> None:
        """Puts the weights together as `ops.verify_block` takes them."""
        c = self._config
        self.weights = ops.BlockWeights(
            mixer_norm=self._mixer_norm,
            projections=self._projections,
            conv_weight=self._conv_weight,
            conv_bias=self._conv_bias,
            A_log=self._A_log,
            dt_bias=self._dt_bias,
            head_norm=self._head_norm,
            out=self._out,
            mlp_norm=self._mlp_norm,
            gate_up=self._gate_up,
            down=self._down,
            gated=c.use_gate,
            eps=c.norm_eps,
            neg_eigval=c.allow_neg_eigval,
        )
        self._mixer_weights = self.weights.without_mlp()
        self._mlp_weights = self.weights.without_mixer()

    def part(self, *, mixer: bool, mlp: bool) -> ops.BlockWeights | None:
        """The weights without those of the sub-layers that are skipped; None where both are."""
        if mixer:
            return self.weights if mlp else self._mixer_weights
        return self._mlp_weights if mlp else None

    def prefill(
        self, x: Tensor, *, cache: DecodingCache, layer: int, slots: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs whole prompts and moves the state on.

        Args:
            x: [B, T, D] residual stream.
            cache: written at `slots`.
            layer: this block's number in it.
            slots: int32 [B].
            lengths: int32 [B] tokens of each row.

        Returns:
            The residual stream after the block, [B, T, D], and the recurrence's output, [B, T, HV, DV].
        """
        c = self._config
        mixed, gate, a, b = self._project(x)
        window = _given(cache.conv[layer])
        activated = ops.conv_verify(
            mixed, self._conv_weight, self._conv_bias, conv_state=window, slots=slots, lengths=lengths
        )
        ops.conv_commit(window, mixed, None, lengths, slots=slots)
        q, k, v = self._heads(activated)
        g, beta = ops.gated_delta_gates(a, b, self._A_log, self._dt_bias, c.allow_neg_eigval)
        o = ops.prefill(
            q,
            k,
            v,
            g,
            beta,
            state=cache.state[layer],
            slots=slots,
            lengths=lengths,
            scale=self.scale,
            qk_l2norm=True,
        )
        return self._mlp(self._output(x, o, gate)), o

    def verify(
        self,
        x: Tensor,
        *,
        cache: DecodingCache,
        layer: int,
        slots: Tensor,
        parents: Tensor | None,
        lengths: Tensor | None,
        pending: PendingRound | None,
        prefix: Steps | None,
        strategy: str = "exact",
        mixer: bool = True,
        mlp: bool = True,
    ) -> tuple[Tensor, Tensor | None, LayerFactors | None]:
        """Runs chains or trees of tokens over the state, which changes by what is pending alone.

        Args:
            x: [B, N, D] residual stream.
            cache: read at `slots`.
            layer: this block's number in it.
            slots, parents, lengths, prefix: as for `CausalLM.forward`.
            pending: what the cache handed out for these slots.
            strategy: of `ops.verify_block`, or "solve".
            mixer: False skips the token mixer, which then has neither output nor factors.
            mlp: False skips the MLP.

        Returns:
            The residual stream after the block, [B, N, D], the recurrence's output, [B, N, HV, DV], and the
            factors to commit.
        """
        if not mixer:
            return (self._mlp(x) if mlp else x), None, None
        window, state = _given(cache.conv[layer]), cache.state[layer]
        rows: dict[str, Any] = {
            "slots": slots,
            "parents": parents,
            "lengths": lengths,
            "pending": None if pending is None else pending.recurrent(layer),
            "pending_mixed": None if pending is None else pending.mixed(layer),
            "prefix": None if prefix is None else prefix.recurrent(layer),
            "prefix_mixed": None if prefix is None else prefix.mixed(layer),
            "scale": self.scale,
        }
        if strategy != "solve":
            y, o, mixed, factors = ops.verify_block(
                x,
                self.weights if mlp else self._mixer_weights,
                conv_state=window,
                state=state,
                strategy=strategy,
                **rows,
            )
            return y, o, LayerFactors(factors, mixed)
        mixed, gate, a, b = self._project(x)
        o, factors = solve_layer(
            mixed,
            a,
            b,
            conv_weight=self._conv_weight,
            conv_bias=self._conv_bias,
            A_log=self._A_log,
            dt_bias=self._dt_bias,
            neg_eigval=self._config.allow_neg_eigval,
            conv_state=window,
            state=state,
            **rows,
        )
        x = self._output(x, o, gate)
        return (self._mlp(x) if mlp else x), o, LayerFactors(factors, mixed)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """All input projections: (q k v) [B, N, C], gate [B, N, HV * DV] or None, a and b [B, N, HV]."""
        heads = self._config.num_v_heads
        y = ops.rms_norm_linear(x, self._mixer_norm, self._eps, self._projections)
        gate = y[..., self._channels : self._gated] if self._config.use_gate else None
        return y[..., : self._channels], gate, y[..., -2 * heads : -heads], y[..., -heads:]

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, N, C] -> q, k [B, N, HK, DK] and v [B, N, HV, DV], as views."""
        c = self._config
        return (
            _split_heads(mixed[..., : c.key_dim], c.num_heads),
            _split_heads(mixed[..., c.key_dim : 2 * c.key_dim], c.num_heads),
            _split_heads(mixed[..., 2 * c.key_dim :], c.num_v_heads),
        )

    def _output(self, x: Tensor, o: Tensor, gate: Tensor | None) -> Tensor:
        """Head norm and output projection, added to the residual stream: [B, N, D]."""
        o = o.view(*x.shape[:-1], -1)  # [B, N, HV, DV] -> [B, N, HV * DV]
        return ops.rms_norm_linear(o, self._head_norm, self._eps, self._out, gate=gate, residual=x)

    def _mlp(self, x: Tensor) -> Tensor:
        """The MLP, added to the residual stream: [B, N, D]."""
        h = ops.rms_norm_linear(x, self._mlp_norm, self._eps, self._gate_up)
        return ops.swiglu_linear(h, self._down, residual=x)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, heads * D] -> [B, N, heads, D], a view."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads)


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a cache that was made for another model"
    return tensor
