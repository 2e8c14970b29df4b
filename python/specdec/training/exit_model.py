"""Differentiable exit adapters; the state dict has exactly the names of their `model.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_INIT_STD = 0.02


class _Adapter(nn.Module):
    """See `models.exit_adapter.ExitAdapter`."""

    def __init__(self, hidden_size: int, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps)
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        out: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return out


class TrainableExitAdapters(nn.Module):
    """The adapters of some exits, for training. They start as the identity.

    Weights are drawn from torch's global generator: call `torch.manual_seed` first for a repeatable start.

    Args:
        widths: inner width of the adapter behind the first N layers, by N.
        hidden_size: of the model.
        eps: of the norms.
    """

    def __init__(self, widths: Mapping[int, int], hidden_size: int, eps: float) -> None:
        super().__init__()
        self.exits = nn.ModuleDict(
            {str(exit): _Adapter(hidden_size, width, eps) for exit, width in sorted(widths.items())}
        )
        for name, parameter in self.named_parameters():
            if name.endswith("down_proj.weight"):
                nn.init.zeros_(parameter)
            elif name.endswith("_proj.weight"):
                nn.init.normal_(parameter, std=_INIT_STD)

    @torch.no_grad()
    def balance(self, exit: int, hidden: Tensor) -> None:
        """Starts the norm of an exit so that all channels come out of it equally large.

        A few channels of a Transformer's residual stream are hundreds of times larger than the others.

        Args:
            exit: whose.
            hidden: `[..., D]` hidden states there.
        """
        channels = hidden.flatten(0, -2)
        rows = channels * channels.square().mean(-1, keepdim=True).rsqrt()
        size = rows.square().mean(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        self.get_submodule(f"exits.{exit}.norm").get_parameter("weight").copy_(1.0 / size)

    def forward(self, hidden: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Hidden states `[B, T, D]` by exit, adapted."""
        return {exit: self.exits[str(exit)](x) for exit, x in hidden.items()}
