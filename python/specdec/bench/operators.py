"""Workloads of the operator benchmarks: random tokens of the gated delta rule over the states of a model.

Sizes are those of SpecLA's evaluation (arXiv 2607.16673): H = 8 heads, DK = DV = 256, float32 states of 24
layers that take turns (48 MiB at batch 1), so that no state waits in a cache for the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec import ops
from specdec.ops import Factors, Pending, reference

HEADS, WIDTH, LAYERS = 8, 256, 24
STRATEGIES = ("serial", "hybrid", "solve")

Tokens = tuple[Tensor, ...]  # q, k, v [B, N, H, D], g, beta [B, N, H]


@dataclass
class Workload:
    """Random tokens, and as many states as a model has layers.

    Attributes:
        tokens: q, k, v [B, N, H, D], g, beta [B, N, H].
        states: [B, H, D, D], one a layer.
        parents: int32 [B, N], or None for chains.
        turn: the layer that was used last.
    """

    tokens: Tokens
    states: list[Tensor]
    parents: Tensor | None = None
    turn: int = 0

    @classmethod
    def random(
        cls, B: int, N: int, layers: int, parents: Sequence[int] | None = None, *, width: int = WIDTH
    ) -> Workload:
        """B sequences of N nodes, one tree (or a chain) for all of them."""
        rng = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(B, N, HEADS, width, generator=rng) for _ in range(3))
        g, beta = -torch.rand(B, N, HEADS, generator=rng), torch.rand(B, N, HEADS, generator=rng)
        states = [torch.randn(B, HEADS, width, width, generator=rng) for _ in range(layers)]
        tree = None if parents is None else torch.tensor([list(parents)] * B, dtype=torch.int32)
        return cls((q, k, v, g, beta), states, tree)

    def next_layer(self) -> int:
        """The layer whose turn it is."""
        self.turn = (self.turn + 1) % len(self.states)
        return self.turn

    def verify(self, layer: int, strategy: str = "exact", **how: Any) -> tuple[Tensor, Factors]:
        """`ops.verify` of all tokens over a layer's state."""
        return ops.verify(
            *self.tokens,
            state=self.states[layer],
            parents=self.parents,
            qk_l2norm=True,
            strategy=strategy,
            **how,
        )

    def expected(self, layer: int) -> tuple[Tensor, Factors]:
        """What `verify` should give, in float64."""
        return reference.verify(
            *self.tokens, state=self.states[layer], parents=self.parents, qk_l2norm=True, dtype=torch.float64
        )

    def row(self) -> Workload:
        """The first sequence on the first layer alone, enough to check values."""
        tree = None if self.parents is None else self.parents[:1]
        return Workload(tuple(t[:1] for t in self.tokens), [self.states[0][:1]], tree)

    def nodes(self, chosen: Sequence[int]) -> Tokens:
        """The tokens of the chosen nodes, contiguous."""
        return tuple(t[:, list(chosen)].contiguous() for t in self.tokens)


def require(actual: Tensor, expected: Tensor, what: str) -> None:
    """Relative error below 1e-5: some hundred float32 roundings, far from any real mistake.

    Raises:
        RuntimeError: it is larger, so that nothing is timed.
    """
    error = float((actual.double() - expected).norm() / expected.norm())
    if not error < 1e-5:
        raise RuntimeError(
            f"{what}: relative error {error:.2e} against the float64 reference, nothing is timed"
        )


class DecodeSteps:
    """Decoding one token a call, each with the deferred commit of the layer's previous token: the state is
    read and written once a token, as it is when no drafts are verified.
    """

    def __init__(self, work: Workload) -> None:
        self.states = [state.clone() for state in work.states]
        self.pending: list[Pending | None] = [None] * len(self.states)
        self.turn = 0
        self.singles = [tuple(t[:, i : i + 1] for t in work.tokens) for i in range(work.tokens[0].shape[1])]

    def step(self, token: int, layer: int) -> Tensor:
        """One token on one layer: its output."""
        out, factors = ops.verify(
            *self.singles[token],
            state=self.states[layer],
            pending=self.pending[layer],
            qk_l2norm=True,
            strategy="exact",
        )
        self.pending[layer] = Pending(factors)
        return out

    def run(self) -> None:
        """As many calls as there are tokens, each on the next layer, as a model makes them."""
        for token in range(len(self.singles)):
            self.turn = (self.turn + 1) % len(self.states)
            self.step(token, self.turn)

    def check(self, expected: Tensor) -> None:
        """Compares the outputs of all tokens on layer 0 with the reference; raises as `require`."""
        outs = [self.step(token, 0) for token in range(len(self.singles))]
        require(torch.cat(outs, dim=1), expected, "decode steps")
        self.pending[0] = None
