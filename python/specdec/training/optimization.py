"""AdamW with a warmup and a cosine, and what of it has to be saved so that a run goes on to the bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from specdec.models.checkpoint import is_matrix

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_CLIP = 1.0
_FINAL_LR = 0.1  # of the peak, at the end of the cosine
_MOMENTS = ("exp_avg", "exp_avg_sq")


def multiplies_bfloat16() -> bool:
    """Whether the processor has products of bfloat16; without them they are slower than float32."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


class Optimization:
    """The optimiser of a run of `steps` steps; weight decay is for the matrices alone.

    Args:
        model: its parameters are trained.
        steps: of the whole run.
        lr: peak learning rate: warmup over 5% of the steps, at most 200, then cosine decay to a tenth.
    """

    def __init__(self, model: nn.Module, steps: int, lr: float) -> None:
        self._model = model
        self._steps = steps
        self._lr = lr
        named = list(model.named_parameters())
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for n, p in named if is_matrix(n)], "weight_decay": _WEIGHT_DECAY},
                {"params": [p for n, p in named if not is_matrix(n)], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=_BETAS,
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of step number `step`, from 0."""
        warmup = max(1, min(200, self._steps // 20))
        if step < warmup:
            return self._lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self._steps - warmup)
        return self._lr * (_FINAL_LR + (1 - _FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))

    def update(self, loss: Tensor, step: int) -> None:
        """One step along the gradient of `loss`. Raises ValueError where the loss is not finite."""
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"the loss is {float(loss)} at step {step}; try a smaller lr than {self._lr}")
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._adamw.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
        self._adamw.step()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments by name, for `restore`."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            state[f"weights/{name}"] = parameter
            moments: dict[str, Any] = self._adamw.state.get(parameter, {})
            # Not the run's step: a parameter that had no gradient yet begins to count later.
            state[f"step/{name}"] = moments.get("step", torch.zeros(()))
            for moment in _MOMENTS:
                value = moments.get(moment)
                state[f"{moment}/{name}"] = torch.zeros_like(parameter) if value is None else value
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def restore(self, file: Any) -> None:
        """Take weights and moments from an open safetensors file.

        Raises:
            SafetensorError: one is missing.
            ValueError: one has another shape than the model's.
        """
        named = list(self._model.named_parameters())
        found = {}
        for name, parameter in named:
            for kind in ("weights", "step", *_MOMENTS):
                tensor = file.get_tensor(f"{kind}/{name}")
                shape = () if kind == "step" else tuple(parameter.shape)
                if tensor.shape != shape:
                    raise ValueError(f"{kind}/{name}: got shape {tuple(tensor.shape)}, want {shape}")
                found[kind, name] = tensor
        for name, parameter in named:
            parameter.copy_(found["weights", name])
            self._adamw.state[parameter] = {
                "step": found["step", name],
                **{m: found[m, name].to(parameter.device) for m in _MOMENTS},
            }
