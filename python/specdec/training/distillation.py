"""KL(target || drafter) over a vocabulary, without ever holding the logits of a batch.

The head is the target's and is not trained. So a window's logits, their loss and the gradient with respect to
the drafter's output are made together and thrown away, and memory stays that of one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def distillation_loss(
    outputs: Sequence[Tensor], targets: Tensor, head: Tensor, weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The weighted mean over steps of KL(target || drafter), averaged over positions.

    Args:
        outputs: of `TrainableDrafter.unroll`, one `[B, T, D]` a step.
        targets: `[B, T, D]`, the target's last hidden state of every token behind its final norm.
        head: `[V, D]`, rows of the target's head; both distributions are over these tokens. Its dtype is that
            of the products; sums and exponentials are float32.
        weights: of the steps; they sum to 1.

    Returns:
        The loss, and the KL of every step `[steps]` (without gradient), in nats a token.
    """
    apply: Any = _Distillation.apply
    loss, each = apply(torch.stack(tuple(outputs)), targets, head, tuple(weights))
    return loss, each


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, targets: Tensor, head: Tensor, weights: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        steps, batch, length, _ = outputs.shape
        outputs, targets = outputs.to(head.dtype), targets.to(head.dtype)
        each = torch.zeros(steps, dtype=torch.float32, device=outputs.device)
        gradient = torch.zeros_like(outputs)
        with torch.autocast(outputs.device.type, enabled=False):
            for row in range(batch):
                log_p = torch.log_softmax((targets[row] @ head.T).float(), -1)  # [T, V]
                p = log_p.exp()
                for j in range(steps):
                    count = length - 1 - j  # row i of step j + 1 predicts the target's row i + j + 1
                    if count < 1:
                        break
                    p_j = p[j + 1 :]
                    log_q = torch.log_softmax((outputs[j, row, :count] @ head.T).float(), -1)
                    divergence = _dot(p_j, log_p[j + 1 :]) - _dot(p_j, log_q)
                    each[j] += divergence / (batch * count)
                    difference = log_q.exp_().sub_(p_j).to(head.dtype)
                    gradient[j, row, :count] = (difference @ head) * (weights[j] / (batch * count))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(each)
        return (each * each.new_tensor(weights)).sum(), each

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of all products of two equal shapes."""
    return torch.dot(x.flatten(), y.flatten())
