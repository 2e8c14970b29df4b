"""Sampling in two and three tiers through the whole loop: the emitted texts have the target's law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loop.models import FAMILIES
from loop.test_laws import ALLOWED, LENGTH, PENALISED, PLAIN, PROMPT, exact_law, p_values
from lossless.statistics import ALPHA
from specdec import ops
from specdec.acceptance import SamplingParams
from specdec.acceptance.tensors import SamplingTensors
from specdec.budget import DraftBudget
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.hierarchical import Checked, HierarchicalDrafter
from specdec.drafters.plan import Plan, Planner
from specdec.drafters.proposal import Proposal
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models import load_model
from specdec.models.layered import Layered

VOCAB = 4
SEEDS = 2_500
SLOTS = 250
TWO, THREE, SHORT = Plan(1, 3), Plan(1, 2, 2, 2), Plan(1, 1, 2, 3)
CASES = [
    # family, plan, branching, replacement, rule, parameters
    ("gated deltanet", TWO, (1,), False, "block", PLAIN),
    ("llama", TWO, (2, 1), False, "traversal", PENALISED),
    ("gated deltanet", THREE, (1,), False, "block", PLAIN),
    ("gated deltanet", SHORT, (1,), False, "speculative", PENALISED),
    ("gated deltanet", THREE, (2, 1), False, "traversal", PLAIN),
    ("gated deltanet", THREE, (2, 1), True, "k-seq", PENALISED),
    ("llama", THREE, (1,), False, "block", PENALISED),
]


class ByWhatPassed:
    """Each sequence's plan follows from its place among all, from the number of its rounds and from what its
    exits kept in them.
    """

    plans = (TWO, SHORT, Plan(1, 1), THREE)

    def __init__(self, used: Counter[Plan | None] | None = None, told: int = 0) -> None:
        self.used: Counter[Plan | None] = Counter() if used is None else used
        self._sequences = 0
        self._told = told

    def begin(self, slots: int) -> None: ...

    def for_sequence(self) -> ByWhatPassed:
        self._sequences += 1
        return ByWhatPassed(self.used, self._sequences)

    def choose(self, rows: int = 1) -> Plan | None:
        plan = (None, *self.plans)[self._told % (1 + len(self.plans))]
        self._told += 1
        self.used[plan] += 1
        return plan

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        self._told += kept + 3 * (said - kept) + (upper == 2)

    def rests(self, rows: int) -> bool:
        return False

    def observe(self, *round: Any) -> None: ...


def tiny(family: str = "gated deltanet") -> Layered:
    return FAMILIES[family](0, vocab_size=VOCAB, num_hidden_layers=3, eos_token_ids=())


def sampled(
    model: Layered,
    plan: Plan | Planner,
    rule: str,
    params: SamplingParams,
    kind: type[EarlyExitDrafter] | None = None,
    seeds: int = SEEDS,
    slots: int = SLOTS,
    **options: Any,
) -> tuple[np.ndarray, Loop]:
    """int [seeds, LENGTH] texts, one a seed."""
    kind = kind or (HierarchicalDrafter if isinstance(plan, Plan) and plan.middle else EarlyExitDrafter)
    if issubclass(kind, HierarchicalDrafter):
        options["acceptance"] = rule
    drafter = kind(model, model.new_cache(slots), plan, **options)
    budget = DraftBudget(8, adaptive=False, whole=True)
    loop = Loop(model, drafter, slots=slots, budget=budget, acceptance=rule, cache=drafter.cache)
    requests = [Request(PROMPT, LENGTH, replace(params, seed=seed), ignore_eos=True) for seed in range(seeds)]
    return np.array([r.tokens for r in loop.run(requests)]), loop


@pytest.mark.parametrize(("family", "plan", "branching", "replacement", "rule", "params"), CASES)
def test_law_of_tiers(family, plan, branching, replacement, rule, params):
    model = tiny(family)
    texts, loop = sampled(model, plan, rule, params, branching=branching, replacement=replacement)
    assert 0.05 < loop.statistics.acceptance_rate < 0.95
    assert min(p_values(texts, exact_law(model, range(VOCAB), LENGTH, params))) > ALPHA


def test_law_of_the_embedded_model_among_four_tokens():
    model = load_model("gdn-code")
    params = SamplingParams(temperature=2.0, allowed_tokens=ALLOWED)
    texts, loop = sampled(model, Plan(2, 2, 5, 2), "auto", params, seeds=2_000, slots=100, int8=True)
    assert 0.05 < loop.statistics.acceptance_rate < 0.95
    assert set(np.unique(texts)) == set(ALLOWED)
    law = exact_law(model, ALLOWED, LENGTH, params)
    assert min(p_values(np.searchsorted(ALLOWED, texts), law)) > ALPHA


@pytest.mark.parametrize(
    ("family", "branching", "replacement", "rule", "params"),
    [
        ("gated deltanet", (1,), False, "block", PLAIN),
        ("llama", (2, 1), False, "traversal", PENALISED),
        ("gated deltanet", (2, 1), True, "k-seq", PLAIN),
        ("llama", (1,), False, "speculative", PLAIN),
    ],
)
def test_law_of_tiers_that_earlier_rounds_choose(family, branching, replacement, rule, params):
    """All of them in one round of the batch, which shares its passes."""
    model, planner = tiny(family), ByWhatPassed()
    options = {"kind": HierarchicalDrafter, "branching": branching, "replacement": replacement}
    texts, _ = sampled(model, planner, rule, params, **options)
    assert min(planner.used[plan] for plan in (None, *planner.plans)) > SEEDS / 20
    assert min(p_values(texts, exact_law(model, range(VOCAB), LENGTH, params))) > ALPHA


class Dropping(EarlyExitDrafter):
    """A round's plan looks at its own drafts: after token 0 it drafts nothing."""

    def _draft(self, rows, plan):  # type: ignore[no-untyped-def]
        proposals = super()._draft(rows, plan)
        for i, proposal in enumerate(proposals):
            if len(proposal.tree) and proposal.tree.tokens[0] == 0:
                proposals[i] = Proposal.empty()
        return proposals


class Resampling(HierarchicalDrafter):
    """After a rejection the middle exit draws from its own row, not from what is left of it."""

    def _decide(self, rows, told, proposals, batch, logits):  # type: ignore[no-untyped-def]
        found = super()._decide(rows, told, proposals, batch, logits)
        probs = [
            ops.sampling_probs(logits[i, c.path[-1:]], **SamplingTensors.of([t.sampling])._asdict())
            if c.path
            else None
            for i, (c, t) in enumerate(zip(found, told, strict=True))
        ]
        again = np.random.default_rng(sum(row.request.position for row in rows))
        return [
            c if row is None else Checked(c.path, int(again.choice(VOCAB, p=_normalised(row))))
            for c, row in zip(found, probs, strict=True)
        ]


def _normalised(row: torch.Tensor) -> np.ndarray:
    chances = row[0].double().numpy()
    return chances / chances.sum()


class Deleting(HierarchicalDrafter):
    """The middle exit deletes drafts, and the target tests what is left against the draft exit's rows."""

    def _check(self, rows, told, drawn, plan, probs):  # type: ignore[no-untyped-def]
        super()._check(rows, told, drawn, plan, probs)
        probs[:] = [drawn]
        for row, t in zip(rows, told, strict=True):
            del row.before[-1:]  # its own token
            t.rows = row.tree._rows[1 : 1 + len(row.before)]
            t.open = False


@pytest.mark.parametrize(("kind", "plan"), [(Resampling, THREE), (Deleting, THREE), (Dropping, TWO)])
def test_biased_tiers_are_found_out(kind, plan):
    model = tiny()
    texts, _ = sampled(model, plan, "speculative", PLAIN, kind, seeds=4 * SEEDS)
    assert min(p_values(texts, exact_law(model, range(VOCAB), LENGTH, PLAIN))) < ALPHA
