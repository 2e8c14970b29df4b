"""The training loop: optimisation, held-out loss, and a state on disk from which a run goes on to the bit.

Nothing random is stored: the order of the data and the dropped layers are functions of the seed and the step.
What is stored (weights, AdamW moments) lies in a safetensors file, which, unlike a pickle, cannot run code
when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from specdec._checks import check_integer, check_number
from specdec.models.checkpoint import is_matrix, open_weights, save_model, write_json, write_tensors
from specdec.models.config import GatedDeltaNetConfig, read_json_object
from specdec.training.corpus import TOKENS_NAME, TokenWindows
from specdec.training.model import TrainableGatedDeltaNet, dropout_rates

STATE_NAME = "training.safetensors"
HISTORY_NAME = "losses.json"

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_CLIP = 1.0
_FINAL_LR = 0.1  # of the peak, at the end of the cosine
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAX_HISTORY_BYTES = 1 << 28


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

    def learning_rate(self, step: int) -> float:
        """Learning rate of step number `step`, from 0."""
        warmup = max(1, min(200, self.steps // 20))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * (_FINAL_LR + (1 - _FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))

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


class Training:
    """A run in the directory `out`, which holds the token file of `write_tokens` already.

    Args:
        out: directory of the run; it becomes a model directory.
        options: what defines the run.

    Attributes:
        step: steps done so far.
        history: losses so far.
    """

    def __init__(self, out: Path, options: TrainingOptions) -> None:
        self.out = out
        self.options = options
        self.step = 0
        self.history = History()
        self.windows = TokenWindows(out / TOKENS_NAME, options.seq_len, options.seed)
        torch.manual_seed(options.seed)
        self.model = TrainableGatedDeltaNet(options.config).to(options.device)
        named = list(self.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in named if is_matrix(n)], "weight_decay": _WEIGHT_DECAY},
                {"params": [p for n, p in named if not is_matrix(n)], "weight_decay": 0.0},
            ],
            lr=options.lr,
            betas=_BETAS,
        )
        self._rates = dropout_rates(options.config.num_hidden_layers, options.layer_dropout)

    @classmethod
    def resume(cls, out: Path) -> Training:
        """The run saved in `out`. Raises ValueError where there is none or its state is damaged."""
        path = out / STATE_NAME
        if not path.is_file():
            raise ValueError(f"{out}: has no {STATE_NAME} to resume from")
        with open_weights(path) as file:
            metadata = file.metadata() or {}
            try:
                run = cls(out, TrainingOptions.from_json(metadata["options"]))
                run.step = int(metadata["step"])
                with torch.no_grad():
                    for name, parameter in run.model.named_parameters():
                        parameter.copy_(file.get_tensor(f"weights/{name}"))
                        run._optimizer.state[parameter] = {
                            "step": torch.tensor(float(run.step)),
                            **{m: file.get_tensor(f"{m}/{name}").to(parameter.device) for m in _MOMENTS},
                        }
                saved = read_json_object(out / HISTORY_NAME, _MAX_HISTORY_BYTES)
                run.history.training = [(s, x) for s, x in saved["training"] if s < run.step]
                run.history.held_out = [(s, x) for s, x in saved["held_out"] if s <= run.step]
            except (KeyError, TypeError, RuntimeError, SafetensorError) as error:
                raise ValueError(f"{path}: not the state of a run ({error})") from None
        return run

    def train_step(self) -> float:
        """One optimiser step; returns the last layer's loss in nats a token. Raises ValueError where it
        diverged.
        """
        o = self.options
        batch = self.windows.batch(self.step, o.batch_size).to(o.device)
        keep = self._kept_layers()
        for group in self._optimizer.param_groups:
            group["lr"] = o.learning_rate(self.step)
        logits = self.model(batch[:, :-1], keep)
        losses = {depth: _cross_entropy(row, batch[:, 1:]) for depth, row in logits.items()}
        final = losses.pop(o.config.num_hidden_layers)
        weights = {depth: o.exit_weight * depth / o.config.num_hidden_layers for depth in losses}
        total = final + sum(
            (weights[depth] * loss for depth, loss in losses.items()), start=final.new_zeros(())
        )
        total = total / (1 + sum(weights.values()))
        if not bool(torch.isfinite(total)):
            raise ValueError(f"the loss is {float(total)} at step {self.step}; try a smaller lr than {o.lr}")
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self._optimizer.step()
        loss = float(final.detach())
        self.history.training.append((self.step, loss))
        self.step += 1
        return loss

    def _kept_layers(self) -> Tensor:
        """bool `[layers, batch]`: which sequences go through which layer at this step."""
        o = self.options
        generator = torch.Generator().manual_seed(o.seed * 1_000_003 + self.step)
        drawn = torch.rand(len(self._rates), o.batch_size, generator=generator, dtype=torch.float64)
        return (drawn >= self._rates[:, None]).to(o.device)

    @torch.no_grad()
    def held_out_loss(self, most: int = 64) -> dict[str, float]:
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
        """Write the state to resume from, then the model itself (matrices in bfloat16) and the history."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            state[f"weights/{name}"] = parameter.detach().cpu().contiguous()
            moments: dict[str, Any] = self._optimizer.state.get(parameter, {})
            for moment in _MOMENTS:
                value = moments.get(moment)
                state[f"{moment}/{name}"] = torch.zeros_like(parameter) if value is None else value
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        metadata = {"options": self.options.to_json(), "step": str(self.step)}
        write_tensors(self.out / STATE_NAME, state, metadata)
        write_json(self.out / HISTORY_NAME, asdict(self.history))
        save_model(self.out, self.options.config, self.model.state_dict(), dtype=torch.bfloat16)

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[float], None] = lambda loss: None,
        *,
        every: int = 200,
    ) -> bool:
        """Train to the end or until `should_stop`, then save.

        Args:
            should_stop: asked before every step.
            on_step: called with the loss after every step.
            every: steps between two held-out losses and saves.

        Returns:
            True where the run is complete.
        """
        while self.step < self.options.steps and not should_stop():
            on_step(self.train_step())
            if self.step % every == 0 and self.step < self.options.steps:
                self.held_out_loss()
                self.save()
        finished = self.step >= self.options.steps
        if finished and not (self.history.held_out and self.history.held_out[-1][0] == self.step):
            self.held_out_loss()
        self.save()
        return finished


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens, in nats."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
