"""A trainable Gated DeltaNet whose state dict is an FLA checkpoint, with layer dropout and early exits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.config import GatedDeltaNetConfig
from specdec.training.chunked import gated_delta_chunked

_INIT_STD = 0.02


class _Mixer(nn.Module):
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

    def _stream(self, name: str, x: Tensor, heads: int) -> Tensor:
        """Projection, causal convolution, SiLU: `[B, T, hidden]` -> `[B, T, heads, D]`."""
        x = self.get_submodule(f"{name}_proj")(x)
        if self.config.use_short_conv:
            conv = self.get_submodule(f"{name}_conv1d")
            x = conv(F.pad(x.transpose(1, 2), (self.config.conv_size - 1, 0))).transpose(1, 2)
        x = F.silu(x)
        return x.reshape(*x.shape[:2], heads, -1)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        q, k = (_l2_norm(self._stream(name, x, c.num_heads)) for name in "qk")
        v = self._stream("v", x, c.num_v_heads)
        group = c.num_v_heads // c.num_heads
        q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))
        g = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        beta = torch.sigmoid(self.b_proj(x)) * (2 if c.allow_neg_eigval else 1)
        out = self.o_norm(gated_delta_chunked(q * c.head_k_dim**-0.5, k, v, g, beta))
        if c.use_gate:
            out = out * F.silu(self.g_proj(x).reshape(out.shape))
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


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


class _Layer(nn.Module):
    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = _Mixer(config)
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
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
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
        for name, parameter in self.named_parameters():
            if name.endswith("_proj.weight") or "embeddings" in name or "lm_head" in name:
                # The two products that write into the residual stream start smaller, so that its size does
                # not grow with depth.
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * config.num_hidden_layers) ** -0.5 if into_stream else 1.0
                nn.init.normal_(parameter, std=_INIT_STD * scale)

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


def dropout_rates(layers: int, most: float) -> Tensor:
    """Probability to skip each layer, 0 at the first to `most` at the last (arXiv 2404.16710, 4.1)."""
    depth = torch.arange(layers, dtype=torch.float64) / max(layers - 1, 1)
    return most * (torch.exp(depth * math.log(2)) - 1)
