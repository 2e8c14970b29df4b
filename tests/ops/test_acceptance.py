"""Acceptance and sampling on every backend: against float64, and to the bit where bits are promised."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.backends import BACKENDS, COMPILED, Backend
from ops.cases import NAN, int32
from ops.sampling import accept_greedy, accept_with_margins, draw_tokens, row_of
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


# --- rows ---


def probs_bound(logits: Tensor, want: np.ndarray, temperature: float) -> np.ndarray:
    """What float32 may make of a row. The scaled distance x from the largest logit has two roundings, which
    move e^x by |x| 2^-23; e^x itself is good to 1.5 units of 2^-23, its sum, the inverse and the product
    round once each. Below e^-87 there is nothing."""
    x = logits.double().numpy()
    x = (x.max() - x) / (temperature or 1.0)
    return np.where(want > 0, want * (np.minimum(x, 90) + 4) * 2.0**-23, 0) + 2.0**-125


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probs_match_float64(backend: Backend, dtype: torch.dtype) -> None:
    close = rows = 0
    for V in backend.some([1, 2, 5, 127, 129, 1000, 4096, 8193, 300]):
        g = torch.Generator().manual_seed(V)
        logits = random_logits(g, 12, V, dtype=dtype)
        settings = settings_of(12)
        got = backend.sampling_probs(gapped(logits), **settings)
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        for r in range(12):
            of_row = {name: x[r].item() for name, x in settings.items()}
            want, margin = row_of(logits[r], **of_row)
            rows += 1
            if margin < 1e-5:  # top-p or min-p may end at another token
                close += 1
                continue
            error = np.abs(got[r].double().numpy() - want)
            assert (error <= probs_bound(logits[r], want, of_row["temperature"])).all(), (V, r, error.max())
            assert ((got[r].numpy() > 0) <= (want > 0)).all()
    assert close < rows / 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_smaller_token(backend: Backend) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -0.0, 0.0, -0.0, -1.0]])
    for k, kept in ((1, 1), (2, 2), (3, 3)):
        probs = backend.sampling_probs(logits, top_k=int32([k, k]))
        assert probs[0].nonzero().flatten().tolist() == [1, 2, 4][:kept]
        assert probs[1].nonzero().flatten().tolist() == [0, 1, 2][:kept]
    half = backend.sampling_probs(torch.zeros(1, 8), top_p=torch.tensor([0.5]))
    assert half[0].tolist() == [0.25] * 4 + [0.0] * 4
    greedy = backend.sampling_probs(logits, temperature=torch.zeros(2))
    assert greedy.argmax(1).tolist() == [1, 0]
    assert greedy.sum(1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_settings(backend: Backend) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, -1e30], [3e38, -3e38, 0.0, 3e38], [-1e30, -2e30, -math.inf, -3e30]]
    )
    hot = backend.sampling_probs(logits[:2], temperature=torch.tensor([3e38, 3e38]))
    assert torch.allclose(hot[0], torch.tensor([0.25, 0.25, 0.25, 0.25]), atol=1e-6)
    cold = backend.sampling_probs(logits, temperature=torch.full((3,), 1e-30))
    assert cold.tolist() == [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [1, 0, 0, 0]]
    narrow = backend.sampling_probs(logits, top_p=torch.full((3,), 1e-30))
    assert narrow.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    strict = backend.sampling_probs(logits, min_p=torch.ones(3))
    assert strict.tolist() == [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [1, 0, 0, 0]]


def spoil(logits: Tensor, kind: int, at: int) -> None:
    """Makes a row [V] one that nothing can be drawn from."""
    logits[at] = (NAN, math.inf, -NAN, 0.0)[kind]
    if kind == 3:
        logits[:] = -math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_have_no_maximum(backend: Backend) -> None:
    V = 300
    logits = torch.randn(6, V)
    for kind in range(4):
        spoil(logits[kind], kind, 77 * kind)
    probs = backend.sampling_probs(logits, top_k=int32([0, 5, 0, 5, 0, 5]))
    assert probs.isnan().all(1).tolist() == [True] * 4 + [False] * 2
    assert not probs[4:].isnan().any()
    # Node 1 is right and its row is spoiled: the walk ends there. Node 2 is wrong, its row does not count.
    rounds = torch.zeros(4, 3, V)
    rounds[:, 0, 9] = 1000.0
    for kind in range(4):
        spoil(rounds[kind, 1], kind, 77 * kind)
        spoil(rounds[kind, 2], kind, 0)
    tokens = torch.tensor([[0, 9, 8]] * 4)
    parents = int32([[-1, 0, 0]] * 4)
    how = {"rules": int32([0] * 4), "seeds": torch.arange(4), "positions": torch.arange(4)}
    for right, found in ((9, -1), (7, 9)):
        tokens[:, 1] = right
        greedy = backend.accept_greedy(rounds, tokens, parents)
        sampled = backend.accept_sampled(rounds, tokens, parents, **how)
        for got in (greedy, sampled):
            assert got.next_token.tolist() == [found] * 4
            if backend.name != "reference" or found >= 0:
                assert got.path_lengths.tolist() == [2 if right == 9 else 1] * 4


# --- decisions ---

# A target row is off by about 2^-18 of its numbers (`probs_bound` at |x| < 28). What a rejection leaves is
# off by twice that over its sum, which seldom is below 2^-5: by 2^-12 then, and a walk meets a few of them.
# Draws, which are as near to other tokens as the vocabulary is large, count their distance times DRAW_SCALE
# and times the sum of what the last rejection left: 2^-16 of a whole row.
NEAR = 2.0**-10
SIZES = [1, 2, 5, 127, 129, 1000, 4096, 8193, 60]  # V


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", list(AcceptRule))
def test_decisions_match_float64(backend: Backend, rule: AcceptRule, tree: bool) -> None:
    accepted = near = total = 0
    for i, V in enumerate(SIZES if backend.share < 32 else SIZES[1:4]):
        B, N = (6, 6) if V > 1000 else (12, 9)
        case = random_round(i, rule, B=B, N=N, V=V, tree=tree, dtype=DTYPES[i % 3])
        got = backend.accept_sampled(**case)
        want, margins = accept_with_margins(**case)
        far = [b for b in range(B) if margins[b] > NEAR]
        expect_same(got, want, far)
        near, total = near + B - len(far), total + B
        accepted += int((want.path_lengths[far] - 1).clamp(min=0).sum())
    assert near < total / 3  # ever more as V grows
    assert accepted > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy(backend: Backend, dtype: torch.dtype) -> None:
    for V in backend.some([1, 2, 5, 127, 129, 4096, 8193, 33]):
        for tree in (False, True):
            case = random_round(V, AcceptRule.FOLLOW, B=12, N=7, V=V, tree=tree, dtype=dtype)
            arguments = [case[name] for name in ("logits", "tokens", "parents", "lengths")]
            logits, tokens, parents, lengths = arguments
            for b in range(12):  # most drafts become right
                for n in range(1, int(lengths[b])):
                    above = n - 1 if parents is None else int(parents[b, n])
                    if (b + n) % 4:
                        tokens[b, n] = logits[b, above].float().argmax()
            want = accept_greedy(*arguments)
            expect_same(backend.accept_greedy(*arguments), want)
            assert V == 1 or want.path_lengths.unique().numel() > 2


@pytest.mark.parametrize("backend", COMPILED)
def test_temperature_zero_is_greedy(backend: Backend) -> None:
    for rule in AcceptRule:
        case = random_round(3, rule, B=6, N=6, V=200, tree=rule % 2 == 0)
        case["temperature"] = torch.zeros(6)
        if rule != AcceptRule.FOLLOW:  # a drafter at temperature 0 draws the argmax of its own row
            best = case["draft_probs"].nan_to_num().argmax(1)
            case["draft_probs"] = torch.nn.functional.one_hot(best, 200).float()
            for b, n in np.ndindex(6, 6):
                if 0 < n < case["lengths"][b]:
                    case["tokens"][b, n] = best[case["draft_rows"][b, n]]
        sampled = backend.accept_sampled(**case)
        if rule in WITHOUT_REPLACEMENT:
            continue  # the second child of a one-hot row has probability 0 and is refused, as it has to be
        greedy = backend.accept_greedy(*(case[name] for name in ("logits", "tokens", "parents", "lengths")))
        assert torch.equal(sampled.path_lengths, greedy.path_lengths)
        assert torch.equal(sampled.next_token, greedy.next_token)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("rule", list(AcceptRule))
def test_a_sequence_alone_and_in_a_batch(backend: Backend, rule: AcceptRule) -> None:
    case = random_round(11, rule, B=7, N=8, V=700, tree=True)
    together = backend.accept_sampled(**case)
    again = backend.accept_sampled(**case)
    expect_same(again, together)
    for b in backend.some(range(7)):
        alone = {name: x if name == "draft_probs" else x[b : b + 1] for name, x in case.items()}
        got = backend.accept_sampled(**alone)
        expect_same(got, Accepted(*(x[b : b + 1] for x in together)))
    other = backend.accept_sampled(**{**case, "seeds": case["seeds"] + 1})
    assert not torch.equal(other.next_token, together.next_token)


def test_a_long_row() -> None:
    for rule in (AcceptRule.FOLLOW, AcceptRule.K_SEQ, AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT):
        case = random_round(int(rule), rule, B=6, N=4, V=150_001, tree=True)
        got = ops.accept_sampled(**case)
        want, margins = accept_with_margins(**case)
        far = [b for b in range(6) if margins[b] > NEAR]
        assert len(far) > 1
        expect_same(got, want, far)
        one = {name: x if name == "draft_probs" else x[:1] for name, x in case.items()}
        expect_same(ops.accept_sampled(**one), Accepted(*(x[:1] for x in got)))


def test_threads_do_not_matter() -> None:
    before = torch.get_num_threads()
    case = random_round(5, AcceptRule.TRAVERSAL, B=1, N=4, V=40_000, tree=False)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.accept_sampled(**case))
    finally:
        torch.set_num_threads(before)
    expect_same(results[1], results[0])
    expect_same(results[2], results[0])


# --- draws ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("replacement", [True, False])
def test_draws(backend: Backend, replacement: bool) -> None:
    for V in backend.some([1, 3, 129, 8193, 100]):
        g = torch.Generator().manual_seed(V)
        probs = torch.rand(8, V, generator=g) ** 4
        probs[torch.rand(8, V, generator=g) < 0.4] = 0
        probs[5], probs[6] = 0, NAN
        how = {
            "seeds": torch.randint(-(2**63), 2**63 - 1, (8,), generator=g),
            "positions": torch.randint(2**40, (8,), generator=g),
            "nodes": torch.randint(64, (8,), generator=g, dtype=torch.int32),
        }
        got = backend.draw_tokens(gapped(probs), 5, replacement=replacement, **how)
        assert torch.equal(got, draw_tokens(probs, 5, replacement=replacement, **how))
        assert (got[5:7] == -1).all()


# --- arguments ---

B, N, V, R = 2, 3, 7, 4


def sampled_arguments() -> dict[str, Any]:
    return {
        "logits": torch.zeros(B, N, V),
        "tokens": torch.zeros(B, N, dtype=torch.int64),
        "rules": int32([1, 1]),
        "seeds": torch.zeros(B, dtype=torch.int64),
        "positions": torch.zeros(B, dtype=torch.int64),
        "draft_probs": torch.full((R, V), 1 / V),
        "draft_rows": int32([[0, 1, 2]] * B),
    }


CASES: list[tuple[dict[str, Any], str]] = [
    ({"logits": None}, r"logits: got None, want a tensor"),
    ({"logits": torch.zeros(B, V)}, r"logits: got shape \[2, 7\], want \[B, N, V\]"),
    ({"logits": torch.zeros(B, N, V).double()}, r"logits: got dtype Double, want float32, bfloat16 or"),
    ({"logits": torch.zeros(B, V, N).mT}, r"logits: the last dimension has stride 3, want 1"),
    ({"logits": torch.zeros(B, N, 0)}, r"logits: got V = 0, want 1 to"),
    ({"tokens": torch.zeros(B, N, dtype=torch.int32)}, r"tokens: got dtype Int, want Long"),
    (
        {"tokens": torch.zeros(B, 4, dtype=torch.int64)},
        r"tokens: got shape \[2, 4\], want \[B, N\] = \[2, 3\]",
    ),
    ({"parents": int32([[-1, 0]] * B)}, r"parents: got shape \[2, 2\], want \[B, N\]"),
    ({"lengths": int32([1, 2, 3])}, r"lengths: got shape \[3\], want \[B\] = \[2\]"),
    ({"rules": torch.zeros(B)}, r"rules: got dtype Float, want Int"),
    ({"seeds": int32([0, 0])}, r"seeds: got dtype Int, want Long"),
    ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions: got shape \[3\], want \[B\]"),
    ({"draft_probs": None}, r"draft_rows: got a tensor, want None without draft_probs"),
    ({"draft_rows": None}, r"draft_rows: got None, want a tensor with draft_probs"),
    ({"draft_probs": torch.zeros(R, 6)}, r"draft_probs: got shape \[4, 6\], want \[R, V\] = \[any, 7\]"),
    ({"draft_probs": torch.zeros(R, V).half()}, r"draft_probs: got dtype Half, want Float"),
    ({"temperature": torch.ones(B).double()}, r"temperature: got dtype Double, want Float"),
    ({"top_k": torch.ones(B)}, r"top_k: got dtype Float, want Int"),
    ({"top_p": torch.ones(3)}, r"top_p: got shape \[3\], want \[B\]"),
]
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"tokens": torch.tensor([[0, 1, 7]] * B)}, r"tokens: row 0 node 2 is 7, want a token in \[0, 7\)"),
    ({"tokens": torch.tensor([[0, -1, 0]] * B)}, r"tokens: row 0 node 1 is -1, want a token"),
    ({"parents": int32([[-1, 0, 2]] * B)}, r"parents: row 0 node 2 is 2, want -1 \(a root\) or an earlier"),
    ({"parents": int32([[-1, -1, 0]] * B)}, r"parents: row 0 node 1 is -1, want an earlier node: node 0 is"),
    ({"rules": int32([0, 6])}, r"rules: row 1 is 6, want an AcceptRule, 0 to 5"),
    ({"draft_rows": int32([[0, 1, 4]] * B)}, r"draft_rows: row 0 node 2 is 4, want a row of draft_probs in"),
    ({"draft_rows": int32([[0, -1, 1]] * B)}, r"draft_rows: row 0 node 1 is -1, want a row"),
    (
        {"draft_probs": None, "draft_rows": None},
        r"draft_probs: got None, want the rows that the drafts of row 0 were drawn from, for rule 1",
    ),
    (
        {"rules": int32([3, 3]), "parents": int32([[-1, 0, 0]] * B)},
        r"draft_rows: row 0 node 2 is 2, want the row of its eldest sibling, for rule 3",
    ),
    (
        {"temperature": torch.tensor([1.0, -1.0])},
        r"temperature: row 1 is -1, want 0 \(greedy\) or a positive",
    ),
    ({"temperature": torch.tensor([NAN, 1.0])}, r"temperature: row 0 is -?nan, want 0"),
    ({"top_k": int32([-1, 0])}, r"top_k: row 0 is -1, want 0 \(all\) or more"),
    ({"top_p": torch.tensor([1.0, 0.0])}, r"top_p: row 1 is 0, want 0 < top_p <= 1"),
    ({"top_p": torch.tensor([1.5, 1.0])}, r"top_p: row 0 is 1.5, want 0 < top_p <= 1"),
    ({"min_p": torch.tensor([NAN, 0.0])}, r"min_p: row 0 is -?nan, want 0 <= min_p <= 1"),
]


@pytest.mark.parametrize("backend", COMPILED)
def test_argument_errors(backend: Backend) -> None:
    for change, message in CASES + (VALUES if backend.checks_values else []):
        with pytest.raises(ValueError, match=f"^{message}") as caught:
            backend.accept_sampled(**{**sampled_arguments(), **change})
        assert "csrc" not in str(caught.value)
        names = ("logits", "tokens", "parents", "lengths")
        if next(iter(change)) in names and "draft" not in message:
            arguments = {name: {**sampled_arguments(), **change}.get(name) for name in names}
            with pytest.raises(ValueError, match=f"^{message}"):
                backend.accept_greedy(*arguments.values())


@pytest.mark.parametrize("backend", COMPILED)
def test_argument_errors_of_rows(backend: Backend) -> None:
    rows = torch.zeros(2, 5)
    how = {"seeds": torch.zeros(2, dtype=torch.int64), "positions": torch.zeros(2, dtype=torch.int64)}
    nodes = int32([0, 0])
    checks: list[tuple[str, Any]] = [
        (r"logits: got shape \[5\], want \[R, V\]", lambda: backend.sampling_probs(torch.zeros(5))),
        (r"top_p: got shape \[1\], want \[R\]", lambda: backend.sampling_probs(rows, top_p=torch.ones(1))),
        (
            r"count: got 0, want 1 to 256",
            lambda: backend.draw_tokens(rows, 0, replacement=True, nodes=nodes, **how),
        ),
        (
            r"probs: got dtype Double, want Float",
            lambda: backend.draw_tokens(rows.double(), 1, replacement=True, nodes=nodes, **how),
        ),
        (
            r"probs: got V = 2097153, want 1 to 2097152",
            lambda: backend.draw_tokens(torch.empty(1, 2**21 + 1), 1, replacement=False, nodes=nodes, **how),
        ),
    ]
    if backend.checks_values:
        negative = int32([0, -1])
        checks.append(
            (
                r"nodes: row 1 is -1, want 0 to 4095",
                lambda: backend.draw_tokens(rows, 1, replacement=True, nodes=negative, **how),
            )
        )
    for message, function in checks:
        with pytest.raises(ValueError, match=f"^{message}"):
            function()
    with torch.enable_grad(), pytest.raises(ValueError, match=r"^logits: got a tensor that requires grad"):
        backend.sampling_probs(rows.clone().requires_grad_())


@pytest.mark.parametrize("backend", COMPILED)
def test_padding_is_not_checked(backend: Backend) -> None:
    """Absent rows may hold anything."""
    case = sampled_arguments()
    got = backend.accept_sampled(
        **{
            **case,
            "tokens": torch.full((B, N), -5),
            "parents": int32([[9, 9, 9]] * B),
            "lengths": int32([0, 0]),
            "rules": int32([77, 77]),
            "draft_rows": int32([[99] * N] * B),
            "temperature": torch.full((B,), NAN),
        }
    )
    assert got.path.tolist() == [[0, 0, 0]] * B
    assert got.path_lengths.tolist() == [0] * B
    assert got.next_token.tolist() == [0] * B


@pytest.mark.parametrize("backend", COMPILED)
def test_no_sequences(backend: Backend) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    got = backend.accept_sampled(
        torch.zeros(0, 3, 5), empty.view(0, 3), rules=empty.int(), seeds=empty, positions=empty
    )
    assert [tuple(x.shape) for x in got] == [(0, 3), (0,), (0,)]
    assert backend.sampling_probs(torch.zeros(0, 5)).shape == (0, 5)


# --- torch ---


def test_opcheck() -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    case = random_round(1, AcceptRule.RECURSIVE, B=3, N=4, V=20, tree=True)
    case["logits"], case["draft_probs"] = torch.randn(3, 4, 20), case["draft_probs"].nan_to_num()
    tree = (case["logits"], case["tokens"], case["parents"], case["lengths"])
    settings = [case[name] for name in DEFAULTS]
    check, space = torch.library.opcheck, torch.ops.specdec
    check(space.accept_greedy.default, tree, test_utils=checks)
    drawn = (case["draft_probs"], case["draft_rows"], case["rules"])
    check(
        space.accept_sampled.default,
        (*tree, *drawn, *settings, case["seeds"], case["positions"]),
        test_utils=checks,
    )
    check(space.sampling_probs.default, (torch.randn(3, 9), *settings), test_utils=checks)
    numbers = (case["seeds"], case["positions"], int32([0, 1, 2]))
    check(space.draw_tokens.default, (torch.rand(3, 9), 2, False, *numbers), test_utils=checks)


def test_compiles_without_graph_breaks() -> None:
    case = random_round(2, AcceptRule.TRAVERSAL, B=2, N=4, V=30, tree=True)

    def decide(logits: Tensor, case: dict[str, Any]) -> tuple[Tensor, Tensor]:
        got = ops.accept_sampled(logits, **case)
        return got.path_lengths + 1, ops.accept_greedy(logits, case["tokens"], case["parents"]).next_token

    case["lengths"] = int32([4, 4])
    for name in ("tokens", "parents", "draft_rows"):
        case[name] = random_round(2, AcceptRule.TRAVERSAL, B=2, N=4, V=30, tree=True)[name].clamp(max=3)
    case["parents"] = int32([[-1, 0, 1, 1]] * 2)
    logits = case.pop("logits").nan_to_num()
    case["draft_probs"] = case["draft_probs"].nan_to_num()
    compiled = torch.compile(decide, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(logits, case), decide(logits, case), strict=True):
        assert torch.equal(got, want)


# --- instruction sets ---

_BITS = """
import sys; sys.path[:0] = {path!r}
import hashlib
import torch
from ops.test_acceptance import DTYPES, random_logits, random_round, settings_of
from specdec import ops
from specdec.ops import AcceptRule
digest = hashlib.sha256()
for i, V in enumerate((5, 129, 1000, 8193, 20000)):
    logits = random_logits(torch.Generator().manual_seed(i), 12, V, dtype=DTYPES[i % 3])
    probs = ops.sampling_probs(logits, **settings_of(12))
    digest.update(probs.numpy().tobytes())
    how = dict(seeds=torch.arange(12), positions=torch.arange(12), nodes=torch.arange(12, dtype=torch.int32))
    for replacement in (True, False):
        digest.update(ops.draw_tokens(probs, 3, replacement=replacement, **how).numpy().tobytes())
    for rule in AcceptRule:
        for x in ops.accept_sampled(**random_round(i, rule, B=6, N=6, V=min(V, 2000), tree=True)):
            digest.update(x.numpy().tobytes())
print(ops.cpu_isa(), digest.hexdigest())
"""


@pytest.mark.skipif("SPECDEC_CPU_ISA" in os.environ, reason="this run is for one instruction set already")
def test_instruction_sets_agree() -> None:
    code = _BITS.format(path=[*sys.path, str(Path(__file__).resolve().parent.parent)])
    found = {}
    for isa in ops._load.cpu_isa_builds():
        environment = {**os.environ, "SPECDEC_CPU_ISA": isa}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode != 0 and re.search("SPECDEC_CPU_ISA: got", run.stderr):
            continue  # not on this machine
        assert run.returncode == 0, run.stderr
        name, digest = run.stdout.split()
        found[name] = digest
    assert ops.cpu_isa() in found
    assert len(set(found.values())) == 1, found
