"""KL(target || drafter) over a vocabulary, without ever holding the logits of a batch.

The head is the target's and is not trained. So a window's logits, their loss and the gradient with respect to
the drafter's output are made together and thrown away, and memory stays that of one window.

Over a large vocabulary the products with the head are nearly all of the work. `VocabularySample` replaces it
by a part that stands for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def distillation_loss(
    outputs: Sequence[Tensor],
    targets: Tensor,
    head: Tensor,
    weights: Sequence[float],
    *,
    later: bool = True,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted mean over outputs of KL(target || drafter), averaged over positions.

    Args:
        outputs: `[B, T, D]` each, what the head is to read. Of a drafter those of `TrainableDrafter.unroll`,
            of exits what the final norm made of them.
        targets: `[B, T, D]`, the target's last hidden state of every token behind its final norm.
        head: `[V, D]`, rows of the target's head; both distributions are over these tokens. Its dtype is that
            of the products; sums and exponentials are float32.
        weights: of the outputs; they sum to 1.
        later: row i of output j, counted from 1, is compared with the target's row i + j, as a drafter's j-th
            position is; False compares row i with row i.
        bias: float32 `[V]`, added to the logits of both distributions.

    Returns:
        The loss, and the KL of every output `[outputs]` (without gradient), in nats a token.
    """
    apply: Any = _Distillation.apply
    shifts = tuple(range(1, len(outputs) + 1)) if later else (0,) * len(outputs)
    loss, each = apply(torch.stack(tuple(outputs)), targets, head, tuple(weights), shifts, bias)
    return loss, each


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        targets: Tensor,
        head: Tensor,
        weights: tuple[float, ...],
        shifts: tuple[int, ...],
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        steps, batch, length, _ = outputs.shape
        outputs, targets = outputs.to(head.dtype), targets.to(head.dtype)
        each = torch.zeros(steps, dtype=torch.float32, device=outputs.device)
        gradient = torch.zeros_like(outputs)
        with torch.autocast(outputs.device.type, enabled=False):
            for row in range(batch):
                log_p = _log_softmax(targets[row], head, bias)  # [T, V]
                p = log_p.exp()
                for j, shift in enumerate(shifts):
                    count = length - shift
                    if count < 1:
                        break
                    p_j = p[shift:]
                    log_q = _log_softmax(outputs[j, row, :count], head, bias)
                    divergence = _dot(p_j, log_p[shift:]) - _dot(p_j, log_q)
                    each[j] += divergence / (batch * count)
                    difference = log_q.exp_().sub_(p_j).to(head.dtype)
                    gradient[j, row, :count] = (difference @ head) * (weights[j] / (batch * count))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(each)
        return (each * each.new_tensor(weights)).sum(), each

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None, None


def _log_softmax(rows: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
    """float32 log-probabilities `[T, V]` of `rows` `[T, D]`."""
    logits = (rows @ head.T).float()
    return torch.log_softmax(logits if bias is None else logits.add_(bias), -1)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of all products of two equal shapes."""
    return torch.dot(x.flatten(), y.flatten())


class VocabularySample:
    """Tokens that stand for a whole vocabulary: the frequent ones, and others drawn anew for every step.

    A drawn token counts for as many as there are others to a drawn one, in the sums of exponentials of both
    distributions: the bias of its logit is the logarithm of that. So no token's logit is free to grow, and
    the divergence is that of the whole vocabulary where the frequent tokens have all of the probability.

    Args:
        frequent: int64 tokens that are always there, distinct.
        vocab_size: tokens in all.
        drawn: how many others a step draws.
        seed: of the draws; those of a step depend on it and on the step alone.
    """

    def __init__(self, frequent: Tensor, vocab_size: int, drawn: int, seed: int) -> None:
        self._frequent = frequent
        others = torch.ones(vocab_size, dtype=torch.bool)
        others[frequent] = False
        self._others = others.nonzero()[:, 0]
        self._drawn = min(drawn, len(self._others))
        self._seed = seed

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The tokens of a step, int64 `[V']`, and the biases of their logits, float32 `[V']`."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        drawn = self._others[torch.randperm(len(self._others), generator=generator)[: self._drawn]]
        weight = len(self._others) / max(1, self._drawn)
        bias = torch.zeros(len(self._frequent) + self._drawn)
        bias[len(self._frequent) :] = math.log(weight) if self._drawn else 0.0
        return torch.cat([self._frequent, drawn]), bias
