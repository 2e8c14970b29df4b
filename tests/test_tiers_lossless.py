"""Proofs by enumeration that rounds within rounds have the target's law: a draft exit, a middle exit that
decides about its drafts, and the target that decides about what came through; and controls that must fail.

Float64 rows, the joint law of three tokens. `drafters/hierarchical.py` does with operators what is done here
with the rules themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from lossless.biased import resample_from_target
from lossless.enumeration import emitted_law, planned_law
from lossless.toys import PROMPT, Drafts, Round, Text, Toy, Walk
from specdec.acceptance import SamplingParams
from specdec.acceptance.recursive import walk_recursive
from specdec.acceptance.traversal import walk_traversal

EXACT = 1e-12
FOUND = 2e-3  # what a biased round misses the law by at least
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "filters": SamplingParams(temperature=1.2, top_k=2),
    "penalties": SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=-0.4),
}
WALKS: dict[str, Walk] = {"speculative": walk_recursive, "block": walk_traversal}
SHAPES = {"chain": [-1, 0, 1], "tree": [-1, 0, 0]}  # of what the draft exit drafts, the root first


class Tiers:
    """Three models: what drafts, what checks, and the target."""

    def __init__(self, seed: int, params: SamplingParams, vocab: int = 3) -> None:
        self.target = Toy.random(seed, params, vocab)
        # Closer to the target than the draft exit is, and of another law.
        middle = 0.6 * self.target.target + 0.4 * self.target.draft.roll(1, 0)
        self.low = Toy(middle, self.target.draft, params)


def tiers_round(
    tiers: Tiers,
    tentative: int,
    *,
    inner: Walk,
    outer: Walk,
    shape: str = "chain",
    ends: bool = False,
    rows: str = "middle",
    passed: list[int] | None = None,
) -> Round:
    """Rounds of rounds.

    Args:
        tiers: the models.
        tentative: tokens that the target checks at least.
        inner: rule of the middle exit.
        outer: rule of the target.
        shape: of the drafts.
        ends: nothing is drafted below token 0, as if it ended the text.
        rows: "middle": what came through, the middle's own token with it, tested against the middle exit's
            rows, as is exact. "draft": the middle exit only deletes, and the target tests what is left
            against the rows of the draft exit.
        passed: is told how many drafts passed each check.
    """

    def round_(text: Text, decide: Any) -> list[int]:
        came: list[int] = []
        while len(came) < tentative:
            before = (*text, *came)
            nodes = Drafts(tiers.low, before, list(SHAPES[shape]), decide, replacement=True)
            path, x = inner(nodes.p_target, nodes.p_draft, nodes, SHAPES[shape], decide)
            if passed is not None:
                passed.append(len(path) - 1)
            new = [*nodes.text(path[-1])[len(before) :], x]
            if rows == "draft":
                came += new[:-1]
                break
            came += new
            if ends and 0 in new:
                break
        texts = [(*text, *came[:i]) for i in range(len(came) + 1)]
        p_draft = tiers.low.p if rows == "middle" else tiers.low.q
        path, x = outer(
            lambda i: tiers.target.p(texts[i]),
            lambda i: p_draft(texts[i - 1]),
            [text[-1], *came],
            list(range(-1, len(came))),
            decide,
        )
        return [*came[: len(path) - 1], x]

    return round_


def planned(
    tiers: Tiers, *, inner: Walk, outer: Walk, peeks: bool = False
) -> Callable[[Text, tuple[int, ...], Any], tuple[list[int], tuple[int, ...]]]:
    """Rounds of plain decoding, of two tiers and of three, by how many drafts the exits kept before.

    Args:
        tiers: the models.
        inner: rule of the middle exit.
        outer: rule of the target.
        peeks: the first draft of a round has a say as well: after token 0 the round is plain decoding.
    """

    def round_(text: Text, past: tuple[int, ...], decide: Any) -> tuple[list[int], tuple[int, ...]]:
        told = sum(past)
        which = (3 + told) % 4
        passed: list[int] = []
        if which == 3:
            emitted = tiers_round(tiers, 2, inner=inner, outer=outer, passed=passed)(text, decide)
        else:
            parents = list(range(-1, which))  # of 0 to 2 drafts
            nodes = Drafts(tiers.target, text, parents, decide, replacement=True)
            if peeks and which and nodes.text(1)[-1] == 0:
                parents = parents[:1]
            path, x = outer(nodes.p_target, nodes.p_draft, nodes, parents, decide)
            emitted = [*nodes.text(path[-1])[len(text) :], x]
        return emitted, ((told + len(emitted) + 3 * sum(passed)) % 4,)

    return round_


def error(rounds: Round, toy: Toy, length: int = 3) -> float:
    law = emitted_law(rounds, PROMPT, toy.vocab, length, toy.context)
    return float(np.abs(law - toy.law(length)).max())


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("outer", WALKS)
@pytest.mark.parametrize("inner", WALKS)
@pytest.mark.parametrize("name", PARAMS)
def test_law_of_three_tiers(name: str, inner: str, outer: str, ends: bool) -> None:
    tiers = Tiers(3, PARAMS[name])
    rounds = tiers_round(tiers, 2, inner=WALKS[inner], outer=WALKS[outer], ends=ends)
    assert error(rounds, tiers.target) <= EXACT


@pytest.mark.parametrize("tentative", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_law_of_other_lengths_and_of_trees(shape: str, tentative: int) -> None:
    tiers = Tiers(4, PARAMS["plain"], vocab=2 if tentative > 1 else 3)
    rounds = tiers_round(tiers, tentative, inner=walk_traversal, outer=walk_traversal, shape=shape)
    assert error(rounds, tiers.target) <= EXACT


def planned_error(tiers: Tiers, length: int, **options: Any) -> float:
    toy = tiers.target
    law = planned_law(planned(tiers, **options), PROMPT, toy.vocab, length, toy.context)
    return float(np.abs(law - toy.law(length)).max())


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("name", PARAMS)
def test_law_of_tiers_that_earlier_rounds_choose(name: str, walk: str) -> None:
    tiers = Tiers(3, PARAMS[name])
    length = 3 if PARAMS[name].contextual else 4
    assert planned_error(tiers, length, inner=WALKS[walk], outer=WALKS[walk]) <= EXACT


@pytest.mark.parametrize("walk", WALKS)
def test_a_plan_that_the_rounds_own_drafts_choose_is_found_out(walk: str) -> None:
    tiers = Tiers(3, PARAMS["plain"])
    assert planned_error(tiers, 3, inner=WALKS[walk], outer=WALKS[walk], peeks=True) > FOUND


BIASED = {
    "the middle exit resamples from its own row": {"inner": resample_from_target},
    "the middle exit deletes, the target tests the draft exit's rows": {"rows": "draft"},
}


@pytest.mark.parametrize("outer", WALKS)
@pytest.mark.parametrize("name", BIASED)
def test_biased_tiers_are_found_out(name: str, outer: str) -> None:
    tiers = Tiers(3, PARAMS["plain"])
    rounds = partial(tiers_round, tiers, 2, outer=WALKS[outer])
    assert error(rounds(**{"inner": walk_recursive, **BIASED[name]}), tiers.target) > FOUND
