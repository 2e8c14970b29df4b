"""The operators of acceptance in Python, until they are built."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.acceptance import SamplingParams, SeededDecisions, process_logits
from specdec.acceptance.round import walk
from specdec.acceptance.rules import AcceptRule


class Accepted(NamedTuple):
    """What the operators return."""

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor


def accept_greedy(logits: Tensor, tokens: Tensor, *, parents: Tensor | None, lengths: Tensor) -> Accepted:
    """See docs/architecture.md."""
    batch = len(logits)
    zeros = torch.zeros(batch)
    return accept_sampled(
        logits,
        tokens,
        parents=parents,
        lengths=lengths,
        draft_probs=None,
        draft_rows=None,
        rules=zeros.int(),
        temperature=zeros,
        top_k=zeros.int(),
        top_p=zeros + 1,
        min_p=zeros,
        seeds=zeros.long(),
        positions=zeros.long(),
    )


def accept_sampled(
    logits: Tensor,
    tokens: Tensor,
    *,
    parents: Tensor | None,
    lengths: Tensor,
    draft_probs: Tensor | None,
    draft_rows: Tensor | None,
    rules: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Accepted:
    """See docs/architecture.md."""
    batch, nodes, _ = logits.shape
    path = torch.zeros(batch, nodes, dtype=torch.int32)
    path_lengths = torch.zeros(batch, dtype=torch.int32)
    next_token = torch.zeros(batch, dtype=torch.int64)
    for b in range(batch):
        n = int(lengths[b])
        params = SamplingParams(
            float(temperature[b]), int(top_k[b]), min(1.0, float(top_p[b])), float(min_p[b])
        )
        above = list(range(-1, n - 1)) if parents is None else parents[b, :n].tolist()
        largest = logits[b, :n].max(-1).values
        if not largest.isfinite().all():
            bad = int((~largest.isfinite()).nonzero()[0])
            path[b, 0], path_lengths[b], next_token[b] = bad, 1, -1
            continue

        def p(node: int, b: int = b, params: SamplingParams = params) -> np.ndarray:
            return process_logits(logits[b, node], params).numpy()

        def q(node: int, b: int = b) -> np.ndarray:
            assert draft_probs is not None
            assert draft_rows is not None
            return draft_probs[int(draft_rows[b, node])].numpy()

        decide = SeededDecisions(int(seeds[b]) % 2**64, int(positions[b]))
        got = walk(AcceptRule(int(rules[b])), p, q, tokens[b, :n].tolist(), above, decide)
        path[b, : len(got.path)] = torch.tensor(got.path, dtype=torch.int32)
        path_lengths[b], next_token[b] = len(got.path), got.next_token
    return Accepted(path, path_lengths, next_token)
