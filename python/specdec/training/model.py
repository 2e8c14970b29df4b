"""A trainable Gated DeltaNet whose state dict is an FLA checkpoint, with layer dropout and early exits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.checkpoint import is_matrix
from specdec.models.config import GatedDeltaNetConfig
from specdec.training.chunked import gated_delta_chunked

_INIT_STD = 0.02


class Mixer(nn.Module):
    """The gated delta rule between its projections, in steps that a drafter can take one by one."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        c, hidden = config, config.hidden_size
        self.config = config
        self.q_proj = nn.Linear(hidden, c.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden, c.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden, c.value_dim, bias=False)
        self.a_proj = nn.Linear(hidden, c.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden, c.num_v_heads, bias=False)
        if c.use_gate:
            self.g_proj = nn.Linear(hidden, c.value_dim, bias=False)
        if c.use_short_conv:
            for name, channels in (("q", c.key_dim), ("k", c.key_dim), ("v", c.value_dim)):
                conv = nn.Conv1d(channels, channels, c.conv_size, groups=channels, bias=c.conv_bias)
                self.add_module(f"{name}_conv1d", conv)
        self.o_norm = nn.RMSNorm(c.head_v_dim, eps=c.norm_eps)
        self.o_proj = nn.Linear(c.value_dim, hidden, bias=False)
        # Decay rates over a wide range and small steps: heads that forget fast and heads that hardly forget.
        self.A_log = nn.Parameter(torch.empty(c.num_v_heads).uniform_(1, 16).log())
        step = torch.empty(c.num_v_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) == step

    def project(self, x: Tensor) -> Tensor:
        """What the short convolution reads: q, k and v side by side, `[B, T, hidden]` -> `[B, T, C]`."""
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)

    def _taps(self) -> tuple[Tensor, Tensor | None]:
        """Weights `[C, W]` (the newest token's last) and bias `[C]` of the convolutions of q, k and v."""
        if not self.config.use_short_conv:
            return torch.ones(self.config.conv_dim, 1, device=self.A_log.device), None
        weight = torch.cat([self.get_parameter(f"{name}_conv1d.weight") for name in "qkv"]).squeeze(1)
        if not self.config.conv_bias:
            return weight, None
        return weight, torch.cat([self.get_parameter(f"{name}_conv1d.bias") for name in "qkv"])

    def streams(self, window: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution, SiLU, and the heads as the rule takes them.

        Args:
            window: W tensors `[B, T, C]` of `project`: every token's own, its predecessor's, and so on.

        Returns:
            q (normalised and scaled) and k (normalised), `[B, T, HV, DK]`, and v `[B, T, HV, DV]`.
        """
        c = self.config
        weight, bias = self._taps()
        weight = weight.to(window[0].dtype)
        mixed = window[0] * weight[:, -1]
        for i in range(1, weight.shape[1]):
            mixed = torch.addcmul(mixed, window[i], weight[:, -1 - i])
        # The rule runs in the parameters' dtype, also where autocast made the projections bfloat16.
        mixed = F.silu(mixed if bias is None else mixed + bias).to(self.A_log.dtype)
        q, k, v = torch.split(mixed, [c.key_dim, c.key_dim, c.value_dim], dim=-1)
        q, k = (_l2_norm(t.reshape(*t.shape[:2], c.num_heads, -1)) for t in (q, k))
        q, k = (t.repeat_interleave(c.num_v_heads // c.num_heads, dim=2) for t in (q, k))
        return q * c.head_k_dim**-0.5, k, v.reshape(*v.shape[:2], c.num_v_heads, -1)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g and write strength beta, `[B, T, HV]` each."""
        g = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        return g, torch.sigmoid(self.b_proj(x).to(g.dtype)) * (2 if self.config.allow_neg_eigval else 1)

    def finish(self, x: Tensor, out: Tensor) -> Tensor:
        """Head norm, gate and output projection of what was read: `[B, T, HV, DV]` -> `[B, T, hidden]`."""
        out = self.o_norm(out)
        if self.config.use_gate:
            out = out * F.silu(self.g_proj(x).reshape(out.shape))
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.streams(shifted(self.project(x), self.config.conv_size))
        g, beta = self.gates(x)
        return self.finish(x, gated_delta_chunked(q, k, v, g, beta))


def shifted(x: Tensor, count: int) -> list[Tensor]:
    """`x` `[B, T, C]` as it was 0, 1, ..., `count - 1` tokens before, zero before the first."""
    return [F.pad(x, (0, 0, i, 0))[:, : x.shape[1]] for i in range(count)]


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class _Mlp(nn.Module):
    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One block: mixer and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = Mixer(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _Stack(nn.Module):
    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)


class TrainableGatedDeltaNet(nn.Module):
    """The model for training. `state_dict()` has exactly the names of `expected_tensors(config)`.

    Weights are drawn from torch's global generator: call `torch.manual_seed` first for a repeatable start.
    """

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Stack(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        init_matrices(self, config.num_hidden_layers)

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> dict[int, Tensor]:
        """Logits after each early-exit layer and after the last layer, all through the shared norm and head.

        Args:
            tokens: `[B, T]`.
            keep: bool `[layers, B]`, False where a sequence skips a layer (layer dropout); None for none.

        Returns:
            Number of layers -> logits `[B, T, vocab]`, in increasing order; the last entry is the model's
            output.
        """
        x = self.model.embeddings(tokens)
        head = self.model.embeddings.weight if self.lm_head is None else self.lm_head.weight
        logits: dict[int, Tensor] = {}
        for i, layer in enumerate(self.model.layers):
            rows = None if keep is None or bool(keep[i].all()) else keep[i].nonzero()[:, 0]
            if rows is None:
                x = layer(x)
            elif len(rows):
                x = x.index_copy(0, rows, layer(x[rows]))
            if i + 1 in self.config.early_exit_layers or i + 1 == self.config.num_hidden_layers:
                logits[i + 1] = F.linear(self.model.norm(x), head)
        return logits


def init_matrices(model: nn.Module, layers: int) -> None:
    """Draw the matrices of a model of `layers` blocks from torch's global generator."""
    for name, parameter in model.named_parameters():
        if is_matrix(name):
            # The two products that write into the residual stream start smaller, so that its size does not
            # grow with depth.
            into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=_INIT_STD * ((2 * layers) ** -0.5 if into_stream else 1.0))


def dropout_rates(layers: int, most: float) -> Tensor:
    """Probability to skip each layer, 0 at the first to `most` at the last (arXiv 2404.16710, 4.1)."""
    depth = torch.arange(layers, dtype=torch.float64) / max(layers - 1, 1)
    return most * (torch.exp(depth * math.log(2)) - 1)
