"""What acceptance and sampling take: errors, padding, nothing at all, and torch's own checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import COMPILED, Backend
from ops.cases import NAN, int32
from ops.rounds import DEFAULTS, random_round
from specdec import ops
from specdec.ops import AcceptRule

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
