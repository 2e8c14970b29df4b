"""Decoding token by token with a backend's own operators: what `exact` results must equal bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ops.backends import Backend
from ops.cases import Gate, Update, random_tokens
from specdec.ops import Factors


@dataclass
class Layer:
    """One recurrent layer with its convolution, and a table of token inputs: row t of the table is token t.

    The convolution runs over channels of its own, beside the recurrence: both states advance with every
    token.
    """

    backend: Backend
    strategy: str
    tokens: tuple[Tensor | None, ...]  # [1, tokens, ...] q, k, v, g, beta
    x: Tensor  # [1, tokens, C]
    weight: Tensor
    bias: Tensor
    state: Tensor  # [1, HV, DV, DK], the start of every sequence
    window: Tensor  # [1, W-1, C]

    @classmethod
    def random(
        cls,
        backend: Backend,
        strategy: str,
        seed: int,
        tokens: int,
        *,
        gate: Gate = "head",
        update: Update = "delta",
        HK: int = 1,
        HV: int = 2,
        DK: int = 32,
        DV: int = 32,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ) -> Layer:
        rng = torch.Generator().manual_seed(seed)
        C, W = 19, 4
        return cls(
            backend,
            strategy,
            random_tokens(rng, 1, tokens, HK, HV, DK, DV, gate, update, dtype),
            torch.randn(1, tokens, C, generator=rng).to(dtype),
            torch.randn(C, W, generator=rng),
            torch.randn(C, generator=rng),
            torch.randn(1, HV, DV, DK, generator=rng).to(state_dtype),
            torch.randn(1, W - 1, C, generator=rng).to(dtype),
        )

    def inputs(self, ids: Tensor) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """Token ids [B, N] -> q, k, v, g, beta [B, N, ...] and x [B, N, C]."""
        flat = ids.flatten().long()
        pick = [None if t is None else t[0, flat].unflatten(0, ids.shape) for t in (*self.tokens, self.x)]
        x = pick.pop()
        assert x is not None
        return tuple(pick), x

    def verify(self, ids: Tensor, **how: object) -> tuple[Tensor, Factors]:
        tokens, _ = self.inputs(ids)
        return self.backend.verify(*tokens, qk_l2norm=True, strategy=self.strategy, **how)

    def conv_verify(self, ids: Tensor, **how: object) -> Tensor:
        _, x = self.inputs(ids)
        return self.backend.conv_verify(x, self.weight, self.bias, **how)

    def start(self) -> Stepper:
        return Stepper(self, self.state.clone(), self.window.clone())


@dataclass
class Stepper:
    """One sequence, decoded a token at a time: verify one node, commit it."""

    layer: Layer
    state: Tensor
    window: Tensor
    ids: list[int] = field(default_factory=list)

    def copy(self) -> Stepper:
        return Stepper(self.layer, self.state.clone(), self.window.clone(), list(self.ids))

    def step(self, token: int) -> tuple[Tensor, Tensor]:
        """out [HV, DV] and y [C] of one token."""
        ids = torch.tensor([[token]])
        out, factors = self.layer.verify(ids, state=self.state)
        self.layer.backend.commit(self.state, factors)
        y = self.layer.conv_verify(ids, conv_state=self.window)
        self.layer.backend.conv_commit(self.window, self.layer.inputs(ids)[1])
        self.ids.append(token)
        return out[0, 0], y[0, 0]

    def run(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """out [len, HV, DV] and y [len, C] of several tokens."""
        pairs = [self.step(token) for token in tokens]
        return torch.stack([out for out, _ in pairs]), torch.stack([y for _, y in pairs])
