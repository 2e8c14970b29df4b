"""A Gated DeltaNet in plain PyTorch: the oracle of the fast model and the baseline of the speed figures.

Written as a competent PyTorch user would write a decoder: projections of one input are one matrix product,
the cache is updated in place, the recurrence is batched matrix products. It uses none of this package's ops
and computes in one dtype throughout, float64 included.

Source: Gated DeltaNet, arXiv 2412.06464, equation 10, with the layer layout of flash-linear-attention.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.checkpoint import check_tensors, load_config, load_weights, resolve_model
from specdec.models.config import GatedDeltaNetConfig

_L2_EPS = 1e-6  # added to the sum of squares of a query or key


@dataclass
class ReferenceState:
    """What the model remembers of B sequences, per layer.

    Attributes:
        recurrent: `[B, HV, DV, DK]` per layer.
        conv: `[B, W-1, C]` per layer, the last raw q, k, v rows, oldest first; C is q, k, v side by side.
            `[B, 0, C]` without convolutions.
    """

    recurrent: list[Tensor]
    conv: list[Tensor]

    def clone(self) -> ReferenceState:
        """A copy that shares no memory."""
        return ReferenceState([s.clone() for s in self.recurrent], [c.clone() for c in self.conv])


class _Layer:
    """One block: norm, Gated DeltaNet mixer, norm, SwiGLU MLP."""

    def __init__(self, config: GatedDeltaNetConfig, weights: Mapping[str, Tensor], prefix: str) -> None:
        def get(name: str) -> Tensor:
            return weights[prefix + name]

        self.config = config
        inputs = ["q_proj", "k_proj", "v_proj", "a_proj", "b_proj"] + (["g_proj"] if config.use_gate else [])
        self.in_proj = torch.cat([get(f"attn.{name}.weight") for name in inputs])
        self.splits = [config.conv_dim, config.num_v_heads, config.num_v_heads]
        self.splits += [config.value_dim] if config.use_gate else []
        self.conv_weight: Tensor | None = None
        self.conv_bias: Tensor | None = None
        if config.use_short_conv:
            self.conv_weight = torch.cat([get(f"attn.{c}_conv1d.weight")[:, 0] for c in "qkv"])  # [C, W]
            if config.conv_bias:
                self.conv_bias = torch.cat([get(f"attn.{c}_conv1d.bias") for c in "qkv"])
        self.decay_rate = get("attn.A_log").exp()
        self.dt_bias = get("attn.dt_bias")
        self.attn_norm, self.mlp_norm = get("attn_norm.weight"), get("mlp_norm.weight")
        self.head_norm = get("attn.o_norm.weight")
        self.out_proj = get("attn.o_proj.weight")
        self.up_proj = torch.cat([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
        self.down_proj = get("mlp.down_proj.weight")

    def __call__(self, x: Tensor, recurrent: Tensor, window: Tensor) -> Tensor:
        """`x [B,T,hidden]` -> same shape; `recurrent` and `window` are advanced by T tokens in place."""
        eps = self.config.norm_eps
        x = x + self._mix(_rms_norm(x, self.attn_norm, eps), recurrent, window)
        gate, up = F.linear(_rms_norm(x, self.mlp_norm, eps), self.up_proj).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down_proj)

    def _mix(self, x: Tensor, recurrent: Tensor, window: Tensor) -> Tensor:
        c = self.config
        qkv, a, b, *gate = torch.split(F.linear(x, self.in_proj), self.splits, dim=-1)
        if self.conv_weight is not None:
            rows = torch.cat([window, qkv], dim=1)  # [B, W-1+T, C]
            window.copy_(rows[:, rows.shape[1] - window.shape[1] :])
            qkv = (rows.unfold(1, c.conv_size, 1) * self.conv_weight).sum(-1)  # [B, T, C]
            if self.conv_bias is not None:
                qkv = qkv + self.conv_bias
        q, k, v = torch.split(F.silu(qkv), [c.key_dim, c.key_dim, c.value_dim], dim=-1)
        q = _l2_norm(_heads(q, c.num_heads)) * c.head_k_dim**-0.5
        k = _l2_norm(_heads(k, c.num_heads))
        v = _heads(v, c.num_v_heads)
        group = c.num_v_heads // c.num_heads
        if group > 1:
            q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)  # [B, T, HV, DK]
        decay = torch.exp(-self.decay_rate * F.softplus(a + self.dt_bias))  # [B, T, HV]
        beta = torch.sigmoid(b) * (2 if c.allow_neg_eigval else 1)
        out = _recur(q, k, v, decay, beta, recurrent)  # [B, T, HV, DV]
        out = _rms_norm(out, self.head_norm, c.norm_eps)
        if gate:
            out = out * F.silu(_heads(gate[0], c.num_v_heads))
        return F.linear(out.flatten(-2), self.out_proj)


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, heads * D]` -> `[B, T, heads, D]`."""
    return x.reshape(*x.shape[:-1], heads, -1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)


def _recur(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule token by token: `[B,T,HV,DV]`; `state [B,HV,DV,DK]` is advanced in place."""
    outputs = []
    for t in range(q.shape[1]):
        state.mul_(decay[:, t, :, None, None])
        key = k[:, t, :, :, None]  # [B, HV, DK, 1]
        write = beta[:, t, :, None, None] * (v[:, t, :, :, None] - state @ key)  # [B, HV, DV, 1]
        state.addcmul_(write, key.transpose(-1, -2))
        outputs.append((state @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=1)


class ReferenceGatedDeltaNet:
    """The model, one token at a time (`step`) or over a whole sequence (`forward`), always sequential.

    Args:
        config: sizes and options.
        weights: FLA names -> tensors, as `load_weights` returns them.
        dtype: every tensor and every operation has it.

    Raises:
        ValueError: `weights` do not fit `config`.

    Example:
        >>> model = ReferenceGatedDeltaNet.from_directory("gdn-code")
        >>> state = model.initial_state(batch=1)
        >>> model.step(torch.tensor([0]), state).shape
        torch.Size([1, 4096])
    """

    def __init__(
        self, config: GatedDeltaNetConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        check_tensors(config, {name: tuple(tensor.shape) for name, tensor in weights.items()}, "weights")
        self.config = config
        self.dtype = dtype
        cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self._embedding = cast["model.embeddings.weight"]
        self._head = self._embedding if config.tie_word_embeddings else cast["lm_head.weight"]
        self._norm = cast["model.norm.weight"]
        self._layers = [_Layer(config, cast, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]

    @classmethod
    def from_directory(
        cls, name_or_dir: str | os.PathLike[str], dtype: torch.dtype = torch.float32
    ) -> ReferenceGatedDeltaNet:
        """Load an embedded model by name, or a directory. Raises ValueError as `checkpoint` does."""
        directory = resolve_model(name_or_dir)
        config = load_config(directory)
        return cls(config, load_weights(directory, config, dtype=dtype), dtype)

    def initial_state(self, batch: int) -> ReferenceState:
        """The state of `batch` sequences before their first token: zeros."""
        c = self.config
        rows = c.conv_size - 1 if c.use_short_conv else 0
        device = self._embedding.device

        def zeros(*shape: int) -> list[Tensor]:
            return [torch.zeros(batch, *shape, dtype=self.dtype, device=device) for _ in self._layers]

        return ReferenceState(zeros(c.num_v_heads, c.head_v_dim, c.head_k_dim), zeros(rows, c.conv_dim))

    @torch.inference_mode()
    def step(self, tokens: Tensor, state: ReferenceState) -> Tensor:
        """Logits `[B, vocab]` after one more token each, `tokens [B]`; `state` is advanced in place."""
        return self._run(tokens[:, None], state)[:, 0]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, state: ReferenceState | None = None) -> Tensor:
        """Logits `[B, T, vocab]` of `tokens [B, T]` after `state` (advanced in place; None: from nothing)."""
        return self._run(tokens, self.initial_state(tokens.shape[0]) if state is None else state)

    def _run(self, tokens: Tensor, state: ReferenceState) -> Tensor:
        x = F.embedding(tokens, self._embedding)
        for layer, recurrent, window in zip(self._layers, state.recurrent, state.conv, strict=True):
            x = layer(x, recurrent, window)
        return F.linear(_rms_norm(x, self._norm, self.config.norm_eps), self._head)
