"""The training loop: optimisation, held-out loss, and a state on disk from which a run goes on to the bit.

Nothing random is stored: the order of the data and the dropped layers are functions of the seed and the step.
What is stored (weights, AdamW moments) lies in a safetensors file, which, unlike a pickle, cannot run code
when it is read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec._checks import check_integer, check_number
from specdec.models.checkpoint import save_model
from specdec.models.config import GatedDeltaNetConfig
from specdec.training.corpus import TOKENS_NAME, TokenWindows
from specdec.training.model import TrainableGatedDeltaNet, dropout_rates
from specdec.training.optimization import Optimization
from specdec.training.running import Run, saved_history, saved_state


@dataclass(frozen=True)
class TrainingOptions:
    """What defines a run: equal options and token files give equal weights on one machine.

    Attributes:
        config: the model.
        tokens: trained on in all; rounded up to whole steps.
        batch_size: windows in a step.
        seq_len: tokens predicted in a window.
        lr: peak learning rate: warmup over 5% of the steps, at most 200, then cosine decay to a tenth.
        layer_dropout: probability to skip the last layer; it grows with depth from 0 at the first.
        exit_weight: an exit after layer e of L weighs e / L times this; the last layer weighs 1.
        seed: of initial weights, data order and dropped layers.
        device: torch device.

    Raises:
        ValueError: names the option.
    """

    config: GatedDeltaNetConfig
    tokens: int
    batch_size: int = 16
    seq_len: int = 256
    lr: float = 2e-3
    layer_dropout: float = 0.15
    exit_weight: float = 0.3
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "seq_len"):
            check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, 0, (1 << 31) - 1)
        check_number("lr", self.lr, above=0.0, below=1.0)
        check_number("layer_dropout", self.layer_dropout, 0.0, below=1.0)
        check_number("exit_weight", self.exit_weight, 0.0)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return -(-self.tokens // (self.batch_size * self.seq_len))

    def to_json(self) -> str:
        """The options as text, for the state file."""
        return json.dumps({**asdict(self), "config": self.config.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> TrainingOptions:
        """The options that `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "config": GatedDeltaNetConfig.from_dict(values["config"])})


@dataclass
class History:
    """Losses of a run in nats a token.

    Attributes:
        training: `[step, loss of the last layer]`, with layers dropped.
        held_out: `[step, {layers: loss}]` with no layer dropped.
    """

    training: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, dict[str, float]]] = field(default_factory=list)


class Training(Run):
    """A run in the directory `out`, which holds the token file of `write_tokens` already.

    Args:
        out: directory of the run; it becomes a model directory.
        options: what defines the run.

    Attributes:
        step: steps done so far.
        history: losses so far.
    """

    options: TrainingOptions
    history: History

    def __init__(self, out: Path, options: TrainingOptions) -> None:
        self.out = out
        self.options = options
        self.step = 0
        self.history = History()
        self.windows = TokenWindows(out / TOKENS_NAME, options.seq_len, options.seed)
        torch.manual_seed(options.seed)
        self.model = TrainableGatedDeltaNet(options.config).to(options.device)
        self._optimization = Optimization(self.model, options.steps, options.lr)
        self._rates = dropout_rates(options.config.num_hidden_layers, options.layer_dropout)

    @classmethod
    def resume(cls, out: Path) -> Training:
        """The run saved in `out`. Raises ValueError where there is none or its state is damaged."""
        with saved_state(out) as (file, metadata):
            run = cls(out, TrainingOptions.from_json(metadata["options"]))
            run.step = int(metadata["step"])
            run._optimization.restore(file)
            run.history = History(*saved_history(out, run.step))
        return run

    def train_step(self) -> float:
        """One optimiser step; returns the last layer's loss in nats a token. Raises ValueError where it
        diverged.
        """
        o = self.options
        batch = self.windows.batch(self.step, o.batch_size).to(o.device)
        keep = self._kept_layers()
        logits = self.model(batch[:, :-1], keep)
        losses = {depth: _cross_entropy(row, batch[:, 1:]) for depth, row in logits.items()}
        final = losses.pop(o.config.num_hidden_layers)
        weights = {depth: o.exit_weight * depth / o.config.num_hidden_layers for depth in losses}
        total = final + sum(
            (weights[depth] * loss for depth, loss in losses.items()), start=final.new_zeros(())
        )
        total = total / (1 + sum(weights.values()))
        return self._update(total, final)

    def _kept_layers(self) -> Tensor:
        """bool `[layers, batch]`: which sequences go through which layer at this step."""
        o = self.options
        generator = torch.Generator().manual_seed(o.seed * 1_000_003 + self.step)
        drawn = torch.rand(len(self._rates), o.batch_size, generator=generator, dtype=torch.float64)
        return (drawn >= self._rates[:, None]).to(o.device)

    @torch.no_grad()
    def evaluate(self, most: int = 64) -> dict[str, float]:
        """Loss in nats a token on up to `most` held-out windows, by layers; added to the history."""
        sums: dict[int, float] = {}
        count = 0
        for batch in self.windows.held_out(self.options.batch_size, most):
            batch = batch.to(self.options.device)
            count += len(batch)
            for depth, logits in self.model(batch[:, :-1]).items():
                sums[depth] = sums.get(depth, 0.0) + float(_cross_entropy(logits, batch[:, 1:])) * len(batch)
        losses = {str(depth): total / count for depth, total in sums.items()}
        self.history.held_out.append((self.step, losses))
        return losses

    def save(self) -> None:
        """Write the history and the state to resume from, then the model itself (matrices in bfloat16)."""
        self._save_state(self.options.to_json())
        save_model(self.out, self.options.config, self.model.state_dict(), dtype=torch.bfloat16)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
