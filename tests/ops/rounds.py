"""Rounds of acceptance at random, and the settings that their sequences have."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ops.cases import NAN, int32
from specdec import ops
from specdec.ops import Accepted, AcceptRule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITHOUT_REPLACEMENT = (AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT, AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT)
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.05},
]
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def settings_of(rows: int, first: int = 0) -> dict[str, Tensor]:
    """A tensor for each setting; row r has SETTINGS[first + r], from the start again after the last."""
    chosen = [{**DEFAULTS, **SETTINGS[(first + r) % len(SETTINGS)]} for r in range(rows)]
    return {
        name: torch.tensor([s[name] for s in chosen], dtype=torch.int32 if name == "top_k" else torch.float32)
        for name in DEFAULTS
    }


def gapped(x: Tensor, gap: int = 5) -> Tensor:
    """x within a wider buffer of NaN: rows are strided, and whoever reads beside them finds out."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 2 * gap), NAN, dtype=x.dtype)
    view = wide[..., gap : gap + x.shape[-1]]
    view.copy_(x)
    return view


def random_logits(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some rows of few values, some impossible tokens."""
    x = 2.5 * torch.randn(shape, generator=g)
    coarse = torch.rand(*shape[:-1], 1, generator=g) < 0.3
    x = torch.where(coarse, x.round(), x)
    impossible = torch.rand(shape, generator=g) < 0.05
    impossible[..., 0] = False
    return x.masked_fill(impossible, -math.inf).to(dtype)


def random_tree(g: torch.Generator, B: int, N: int) -> Tensor:
    rows = [[-1] + [int(torch.randint(n, (), generator=g)) for n in range(1, N)] for _ in range(B)]
    return int32(rows)


def random_round(
    seed: int, rule: AcceptRule, *, B: int, N: int, V: int, tree: bool, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Arguments of `accept_sampled` with drafts drawn as the rule wants them; padding is poisoned."""
    g = torch.Generator().manual_seed(seed)
    logits = random_logits(g, B, N, V, dtype=dtype)
    settings = settings_of(B, seed)
    every = {name: x.repeat_interleave(N) for name, x in settings.items()}
    noise = torch.randn(B, N, V, generator=g) * torch.rand(B, N, 1, generator=g)
    probs = ops.sampling_probs((logits.float() + noise).view(B * N, V), **every)
    parents = random_tree(g, B, N) if tree else int32([list(range(-1, N - 1))] * B)
    tokens = torch.zeros(B, N, dtype=torch.int64)
    rows = torch.full((B, N), 1 << 30, dtype=torch.int32)
    for b in range(B):
        for n in range(1, N):
            parent = int(parents[b, n])
            rows[b, n] = b * N + parent
            q = probs[b * N + parent].clone()
            if rule in WITHOUT_REPLACEMENT:
                q[[int(tokens[b, m]) for m in range(1, n) if parents[b, m] == parent]] = 0
            tokens[b, n] = torch.multinomial(q, 1, generator=g) if q.sum() > 0 else 0
    lengths = int32([0 if b % 6 == 4 else N - b % 3 for b in range(B)]).clamp(min=0)
    for b in range(B):
        n = int(lengths[b])
        logits[b, n:], tokens[b, n:], parents[b, n:], rows[b, n:] = NAN, 1 << 60, 1 << 30, 1 << 30
    return {
        "logits": gapped(logits),
        "tokens": tokens,
        "parents": parents if tree else None,
        "lengths": lengths,
        "rules": int32([rule] * B),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (B,), generator=g),
        "positions": torch.randint(2**40, (B,), generator=g),
        "draft_probs": gapped(probs),
        "draft_rows": rows,
        **settings,
    }


def expect_same(got: Accepted, want: Accepted, rows: list[int] | None = None) -> None:
    chosen = list(range(len(got.next_token))) if rows is None else rows
    for name, x, y in zip(Accepted._fields, got, want, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x[chosen], y[chosen]), name
