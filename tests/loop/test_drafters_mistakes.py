"""What a drafter must not give: one error that names it, before the target sees anything."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from loop.models import random_model
from specdec.acceptance import SamplingParams
from specdec.budget import DraftBudget
from specdec.drafters.base import DraftRequest
from specdec.drafters.proposal import Proposal, ProposalKind
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.tree import TokenTree

V = 61


class Giving:
    """Gives what it was told to, wherever drafts are asked for."""

    name = "giving"
    features = ()
    draws = False

    def __init__(self) -> None:
        self.given: Any = []

    def begin(self, slot: int, prompt: Any, features: Any = None) -> None:
        pass

    def propose(self, requests: list[DraftRequest]) -> Any:
        return self.given if requests[0].max_nodes else [Proposal.empty()]

    def observe(self, slot: int, path: Any, tokens: Any, features: Any = None) -> None:
        pass

    def end(self, slot: int) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


def run(loop: Loop, temperature: float = 1.0, tokens: int = 9) -> list[int]:
    sampling = SamplingParams(temperature=temperature, seed=3)
    return loop.run([Request((1, 2), tokens, sampling, ignore_eos=True)])[0].tokens


def drawn(probs: torch.Tensor, rows: tuple[int, ...] = (0, 1)) -> list[Proposal]:
    return [Proposal(TokenTree([1] * len(rows)), ProposalKind.IID, probs, rows)]


def row(**changes: float) -> torch.Tensor:
    """float32 [2, V]: a distribution, and one with these numbers at tokens t0, t1, ..."""
    probs = torch.full((2, V), 1 / V)
    for name, value in changes.items():
        probs[1, int(name[1:])] = value
    return probs


DRAFT = Proposal(TokenTree([1, 2, 3]), ProposalKind.DETERMINISTIC)
MISTAKES = {
    "nothing": (None, "None from propose, want a list of 1 Proposals"),
    "one that is no list": (DRAFT, "Proposal(tree="),
    "too many": ([DRAFT, DRAFT], "2 proposals, want 1"),
    "none for a request": ([None], "None for slot 0, want a Proposal; Proposal.empty() for no drafts"),
    "tokens alone": ([[1, 2]], "[1, 2] for slot 0, want a Proposal"),
    "a row of twice the sum": (
        drawn(2 * row()),
        "row 0 of draft_probs with least number 0.0327869",
    ),
    "a negative number": (
        drawn(row(t0=-0.5, t1=0.5 + 2 / V)),
        "row 1 of draft_probs with least number -0.5 and sum 1, want none below 0 and sum 1",
    ),
    "nan": (drawn(row(t3=math.nan)), "row 1 of draft_probs with least number nan and sum nan,"),
    "inf": (drawn(row(t3=math.inf)), f"row 1 of draft_probs with least number {1 / V:g} and sum inf,"),
    "both infinities": (drawn(row(t3=math.inf, t4=-math.inf)), "row 1 of draft_probs with least number -inf"),
    "zeros": (drawn(0 * row()), "row 0 of draft_probs with least number 0 and sum 0,"),
    "bfloat16 rows": (drawn(row() * (1 + 2**-9)), "row 0 of draft_probs"),
    "a narrow row": (drawn(torch.full((2, 50), 0.02)), "draft_probs [2, 50] on cpu for slot 0, want [R, 61]"),
}


@pytest.mark.parametrize("rule", ["auto", "typical"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_leaves_the_loop_usable(name: str, rule: str, model: Any) -> None:
    given, message = MISTAKES[name]
    drafter = Giving()
    loop = Loop(model, drafter, budget=DraftBudget(4, adaptive=False), acceptance=rule)
    for temperature in (0.0, 1.0):
        drafter.given = given
        with pytest.raises(ValueError, match=f"^drafter giving: got {re.escape(message)}"):
            run(loop, temperature)
        drafter.given = [Proposal.empty()]
        assert run(loop, temperature) == run(Loop(model), temperature)


def test_a_path_deeper_than_was_asked_for_is_refused(model: Any) -> None:
    drafter = Giving()
    loop = Loop(model, drafter, budget=DraftBudget(8, adaptive=False))
    for parents in (None, [-1, 0, 1]):
        drafter.given = [Proposal(TokenTree([1, 2, 3], parents), ProposalKind.DETERMINISTIC)]
        # Three tokens: the prefill gives one, and the round its own beside at most one draft.
        message = "^drafter giving: got a path of 3 nodes for slot 0, want at most max_depth = 1"
        with pytest.raises(ValueError, match=message):
            run(loop, tokens=3)
    star = [Proposal(TokenTree([1, 2, 3], [-1, -1, -1]), ProposalKind.DETERMINISTIC)]
    drafter.given = star
    assert run(loop, tokens=3) == run(Loop(model), tokens=3)


def test_rows_that_no_draft_names_are_not_looked_at(model: Any) -> None:
    drafter = Giving()
    loop = Loop(model, drafter, budget=DraftBudget(4, adaptive=False))
    for value in (math.nan, -1.0, 5.0):
        drafter.given = drawn(row(t3=value), rows=(0, 0))
        assert len(run(loop)) == 9


@pytest.mark.parametrize("vocab", [2, 4096, 150_001])
def test_rows_of_float32_pass_whatever_made_them(vocab: int, model: Any) -> None:
    from specdec import ops
    from specdec.drafters.checking import check_proposals

    logits = 4 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    sequential = torch.exp(logits).numpy()
    sequential /= sequential.cumsum(axis=1)[:, -1:]  # added up one by one
    for probs in (torch.softmax(logits, -1), ops.sampling_probs(logits), torch.from_numpy(sequential)):
        check_proposals("x", [DraftRequest(0, 3, 3)], drawn(probs, (0, 1, 2)), vocab)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((DRAFT.tree, "IID", row(), (0, 0, 0)), "kind: got 'IID', want a ProposalKind, such as"),
        (([1, 2], ProposalKind.DETERMINISTIC), r"tree: got \[1, 2\], want a TokenTree"),
        ((DRAFT.tree, ProposalKind.IID, [[1.0]]), r"draft_probs: got \[\[1.0\]\], want float32 \[R, V\]"),
        ((DRAFT.tree, ProposalKind.DETERMINISTIC, [[1.0]]), r"draft_probs: got \[\[1.0\]\], want None"),
    ],
)
def test_a_proposal_of_other_types_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Proposal(*arguments)
