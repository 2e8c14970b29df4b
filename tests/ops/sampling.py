"""Sampling and acceptance in float64, one sequence after the other, with the signatures of `specdec.ops`.

Rows are softmaxes of sorted logits; decisions are those of the rules in `specdec.acceptance`, which the
proofs run. `margin` says how far a decision was from going the other way.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec import acceptance
from specdec.acceptance import SeededDecisions, Stream, uniform
from specdec.acceptance.greedy import walk_greedy
from specdec.acceptance.round import walk
from specdec.ops import Accepted, AcceptRule

Array = NDArray[np.float64]

DRAW_SCALE = 64.0
"""A draw from a row knows its cumulative sums that much better than a test knows the ratio it is about, whose
rows were divided by what rejections left."""


class BadRow(ValueError):
    """A row with a NaN or without a finite maximum."""


def row_of(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Array, float]:
    """Probabilities float64 [V] of logits [V], and the margin of top-p and min-p (probability)."""
    x = logits.double().numpy()
    if np.isnan(x).any() or not np.isfinite(x.max()):
        raise BadRow
    if temperature == 0:
        temperature, top_k = 1.0, 1
    order = np.argsort(-x, kind="stable")
    kept = order[:top_k] if top_k > 0 else order
    weight = np.exp((x - x.max()) / temperature)
    margin = math.inf
    if top_p < 1:
        reached = np.cumsum(weight[kept]) / weight[kept].sum()
        margin = np.abs(reached - top_p).min()
        kept = kept[: int(reached.searchsorted(top_p)) + 1]
    if min_p > 0:
        margin = min(margin, np.abs(weight[kept] - min_p).min())
        kept = kept[weight[kept] >= min_p]
    p = np.zeros_like(weight)
    p[kept] = weight[kept] / weight[kept].sum()
    return p, float(margin)


class Measured(SeededDecisions):
    """Seeded decisions that keep the least distance to another outcome, as a probability."""

    def __init__(self, seed: int, position: int) -> None:
        super().__init__(seed, position)
        self.margin = math.inf
        self._numbers = seed, position

    def accept(self, depth: int, p: float, q: float, rank: int = 0) -> bool:
        seed, position = self._numbers
        self._see(uniform(seed, position + depth, Stream.ACCEPT, rank) - p / q)
        return super().accept(depth, p, q, rank)

    def sample(self, depth: int, weights: Array) -> int:
        seed, position = self._numbers
        total = float(np.sum(weights))  # of what a rejection left, else 1
        edges = np.cumsum(weights) / total
        # Not the ends: below the first positive weight and above the last there is nothing to draw.
        edges = edges[(edges > 0) & (edges < edges[-1])]
        distances = edges - uniform(seed, position + depth, Stream.SAMPLE)
        self._see(*(distances * min(total, 1.0) * DRAW_SCALE))
        return super().sample(depth, weights)

    def keep(self, node: int, chance: float) -> bool:
        seed, position = self._numbers
        self._see(uniform(seed, position, Stream.ROUND, node) - chance)
        return super().keep(node, chance)

    def _see(self, *distances: float) -> None:
        self.margin = min(self.margin, *map(abs, distances)) if distances else self.margin


def accept_with_margins(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    rules: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_probs: Tensor | None = None,
    draft_rows: Tensor | None = None,
    single: bool = False,
    **settings: Tensor,
) -> tuple[Accepted, list[float]]:
    """`accept_sampled` and the margin of each sequence; `single` rounds the target's rows to float32."""
    result, margins = _nothing(tokens), []
    for b in range(len(tokens)):
        length = tokens.shape[1] if lengths is None else int(lengths[b])
        decide = Measured(int(seeds[b]) % 2**64, int(positions[b]))
        if length > 0:
            above = range(-1, length - 1) if parents is None else parents[b, :length].tolist()
            made: dict[int, Array] = {}

            def target(
                node: int, b: int = b, made: dict[int, Array] = made, decide: Measured = decide
            ) -> Array:
                if node not in made:
                    row, margin = row_of(logits[b, node], *_settings_of(settings, b))
                    made[node] = row.astype(np.float32).astype(np.float64) if single else row
                    decide.margin = min(decide.margin, margin)
                return made[node]

            def draft(node: int, b: int = b) -> Array:
                assert draft_probs is not None
                assert draft_rows is not None
                return draft_probs[int(draft_rows[b, node])].double().numpy()

            try:
                path, x = walk(
                    AcceptRule(int(rules[b])), target, draft, tokens[b, :length].tolist(), list(above), decide
                )
                _write(result, b, path, x)
            except BadRow:
                result.next_token[b] = -1
        margins.append(decide.margin)
    return result, margins


def accept_sampled(*args: Tensor, **kwargs: Tensor) -> Accepted:
    return accept_with_margins(*args, **kwargs, single=True)[0]


def accept_greedy(
    logits: Tensor, tokens: Tensor, parents: Tensor | None = None, lengths: Tensor | None = None
) -> Accepted:
    result = _nothing(tokens)
    for b in range(len(tokens)):
        length = tokens.shape[1] if lengths is None else int(lengths[b])
        if length == 0:
            continue
        above = range(-1, length - 1) if parents is None else parents[b, :length].tolist()
        rows = logits[b, :length].float().numpy()
        path, x = walk_greedy(rows.__getitem__, tokens[b, :length].tolist(), list(above))
        last = rows[path[-1]]
        _write(result, b, path, x if np.isfinite(last.max()) else -1)
    return result


def sampling_probs(logits: Tensor, **settings: Tensor) -> Tensor:
    rows = []
    for r, row in enumerate(logits):
        try:
            rows.append(torch.from_numpy(row_of(row, *_settings_of(settings, r))[0]).float())
        except BadRow:
            rows.append(torch.full(row.shape, math.nan))
    return torch.stack(rows)


def draw_tokens(
    probs: Tensor, count: int, *, replacement: bool, seeds: Tensor, positions: Tensor, nodes: Tensor
) -> Tensor:
    tokens = torch.full((len(probs), count), -1)
    for r, row in enumerate(probs.double().numpy()):
        number = functools.partial(uniform, int(seeds[r]) % 2**64, int(positions[r]))
        drawn = acceptance.draw_tokens(row, count, int(nodes[r]), number, replacement=replacement)
        tokens[r, : len(drawn)] = torch.tensor(drawn)
    return tokens


def _settings_of(settings: dict[str, Tensor], row: int) -> tuple[float, int, float, float]:
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    temperature, top_k, top_p, min_p = (
        float(settings[name][row]) if name in settings else value for name, value in default.items()
    )
    return temperature, int(top_k), top_p, min_p


def _nothing(tokens: Tensor) -> Accepted:
    B, N = tokens.shape
    return Accepted(
        torch.zeros(B, N, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int64),
    )


def _write(result: Accepted, b: int, path: list[int], next_token: int) -> None:
    result.path[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
    result.path_lengths[b] = len(path)
    result.next_token[b] = next_token
