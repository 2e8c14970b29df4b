"""Drafts that are grown in one call are those that are grown level by level: the same proposals in every
round of a text, the same rows that they were drawn from, and the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from loop.models import random_model
from loop.recurrent import random_drafter
from ops.cases import bits
from specdec import ops
from specdec.acceptance import SamplingParams
from specdec.budget import DraftBudget
from specdec.cache import DecodingCache
from specdec.drafters import DraftRequest, Proposal
from specdec.drafters.draft_exit import AdaptiveExit, DraftExit, StaticThreshold
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.hierarchical import HierarchicalDrafter
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.plan import Plan
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.shape import TreeShape
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.exit_adapter import ExitAdapter, ExitAdapters
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.skipping import SkipSet

PROMPTS = [[3, 5, 7], [8, 9, 8, 9, 8], [4], [11, 12, 13, 11, 12], [2, 2], [30, 31], [7, 6, 5, 4], [1, 9], [6]]
CHAIN, TREE, PRUNED = TreeShape(), TreeShape((2, 2, 1)), TreeShape.pruned(3, 4.0)
DRAWN = {
    "temperature": [SamplingParams(temperature=t) for t in (0.5, 0.9, 1.3)],
    "top_k": [SamplingParams(temperature=0.9, top_k=k) for k in (1, 4, 20)],
    "top_p": [SamplingParams(temperature=1.1, top_p=p) for p in (0.4, 0.8, 0.95)],
    "min_p": [SamplingParams(temperature=1.2, min_p=p) for p in (0.3, 0.1, 0.02)],
}
GREEDY = [SamplingParams()]
Drafter = Any
Maker = Callable[[GatedDeltaNetForCausalLM, int], Drafter]  # of a target and a number of slots


def recurrent(
    shape: TreeShape = CHAIN,
    *,
    drawn: TreeShape | None = None,
    draft_vocab: int | None = None,
    **options: Any,
) -> Maker:
    def make(model: GatedDeltaNetForCausalLM, slots: int) -> RecurrentDrafter:
        stepped = random_drafter(model, 1, draft_vocab_size=draft_vocab)
        return RecurrentDrafter(stepped, slots=slots, branching=shape, drawn=drawn, **options)

    return make


def layer_skip(
    shape: TreeShape = CHAIN,
    *,
    exit: DraftExit | None = None,
    vocabulary: Sequence[int] | None = None,
    **options: Any,
) -> Maker:
    def make(model: GatedDeltaNetForCausalLM, slots: int) -> LayerSkipDrafter:
        view = model.skipping(SkipSet.of([1], [2]), vocabulary)
        return LayerSkipDrafter(view, model.new_cache(slots), exit=exit, branching=shape, **options)

    return make


def early_exit(plan: Plan, shape: TreeShape = CHAIN, *, adapted: bool = False, **options: Any) -> Maker:
    def make(model: GatedDeltaNetForCausalLM, slots: int) -> EarlyExitDrafter:
        kind = HierarchicalDrafter if plan.middle else EarlyExitDrafter
        adapters = ExitAdapters({plan.exit: random_adapter(64)}) if adapted else None
        return kind(model, model.new_cache(slots), plan, branching=shape, adapters=adapters, **options)

    return make


def random_adapter(D: int) -> ExitAdapter:
    rng = torch.Generator().manual_seed(3)
    gate, up, down = (torch.randn(shape, generator=rng) * 0.1 for shape in ((24, D), (24, D), (D, 24)))
    return ExitAdapter(1 + 0.1 * torch.randn(D, generator=rng), gate, up, down, 1e-5)


class Told(NamedTuple):
    """What became of a batch of requests.

    Attributes:
        texts: of each request.
        proposals: in the order in which they were made.
        calls: of `draft_tree`.
        work: of the layers, where the drafter counts it.
    """

    texts: list[list[int]]
    proposals: list[Proposal]
    calls: int
    work: tuple[int, int, int] | None


def told(make: Maker, sampling: Sequence[SamplingParams], *, levels: bool, slots: int = 4) -> Told:
    """Runs all requests with a new model, so that nothing is learned from another run."""
    model = random_model(4, num_hidden_layers=4, eos_token_ids=(0, 17, 23))
    drafter = make(model, slots)
    if levels:  # as models do that have no operator for it
        drafter.run_trees = drafter._grow_at_once = lambda *_: None
    found: list[Proposal] = []
    propose = drafter.propose

    def noting(requests: Sequence[DraftRequest]) -> list[Proposal]:
        made = propose(requests)
        found.extend(made)
        return made

    drafter.propose = noting
    cache: DecodingCache | None = getattr(drafter, "cache", None)
    budget = DraftBudget(6, adaptive=False, whole=cache is not None)
    loop = Loop(model, drafter, slots=slots, budget=budget, **({} if cache is None else {"cache": cache}))
    requests = [
        Request(p, 20 - i, replace(sampling[i % len(sampling)], seed=i), ignore_eos=i % 3 == 0)
        for i, p in enumerate(PROMPTS)
    ]
    with patch.object(ops, "draft_tree", wraps=ops.draft_tree) as counted:
        texts = [r.tokens for r in loop.run(requests)]
    work = getattr(drafter, "work", None)
    return Told(texts, found, counted.call_count, work and (work.passes, work.tokens, work.checks))


def expect_same(make: Maker, sampling: Sequence[SamplingParams]) -> Told:
    """Both ways tell the same, and only one of them is one call a round."""
    one, levels = (told(make, sampling, levels=levels) for levels in (False, True))
    assert levels.calls == 0
    assert one.texts == levels.texts
    assert one.work == levels.work
    for a, b in zip(one.proposals, levels.proposals, strict=True):
        assert (a.tree, a.kind, a.rows, a.chances) == (b.tree, b.kind, b.rows, b.chances)
        if len(a.tree) and a.draft_probs is not None:
            assert b.draft_probs is not None
            assert torch.equal(bits(a.draft_probs), bits(b.draft_probs))
    assert sum(len(p.tree) for p in one.proposals) > 50
    return one


LIKELIEST: dict[str, Maker] = {
    "recurrent chain": recurrent(),
    "recurrent pruned": recurrent(PRUNED, draft_vocab=40),
    "layer-skip chain": layer_skip(),
    "layer-skip tree": layer_skip(TREE, vocabulary=range(0, 61, 2)),
    "layer-skip pruned": layer_skip(PRUNED),
    "layer-skip static": layer_skip(exit=StaticThreshold(0.2)),
    "layer-skip static tree": layer_skip(TREE, exit=StaticThreshold(0.1)),
    "layer-skip adaptive": layer_skip(
        PRUNED, exit=AdaptiveExit(threshold=0.2, target=0.5, step=0.2), vocabulary=range(1, 61, 2)
    ),
    "early exit": early_exit(Plan(2, 3)),
    "early exit tree": early_exit(Plan(2, 3), TREE, adapted=True, int8=True),
    "early exit one layer": early_exit(Plan(1, 4), adapted=True),
    "three tiers": early_exit(Plan(1, 2, 3, 4), adapted=True),
    "three tiers tree": early_exit(Plan(1, 2, 3, 4), TREE),
}


@pytest.mark.parametrize("kind", LIKELIEST)
def test_likeliest_drafts(kind: str) -> None:
    assert expect_same(LIKELIEST[kind], GREEDY).calls > 10


@pytest.mark.parametrize("kind", ["recurrent pruned", "layer-skip adaptive", "early exit tree"])
def test_likeliest_drafts_of_sampled_requests(kind: str) -> None:
    def make(model: GatedDeltaNetForCausalLM, slots: int) -> Drafter:
        drafter = LIKELIEST[kind](model, slots)
        drafter.draws = False
        return drafter

    assert expect_same(make, DRAWN["temperature"]).calls > 10


CHAINS: dict[str, Maker] = {
    "recurrent": recurrent(PRUNED, drawn=CHAIN),
    "recurrent with a vocabulary": recurrent(TREE, drawn=CHAIN, draft_vocab=40),
    "layer-skip": layer_skip(),
    "layer-skip with a vocabulary": layer_skip(vocabulary=range(0, 61, 2), replacement=True),
    "layer-skip static": layer_skip(exit=StaticThreshold(0.1)),
    "early exit": early_exit(Plan(2, 3)),
    "early exit with an adapter": early_exit(Plan(1, 4), adapted=True, int8=True),
    "three tiers": early_exit(Plan(1, 2, 3, 4), adapted=True),
}


@pytest.mark.parametrize("filter", DRAWN)
@pytest.mark.parametrize("kind", CHAINS)
def test_drawn_chains(kind: str, filter: str) -> None:
    one = expect_same(CHAINS[kind], DRAWN[filter])
    assert one.calls > 10
    assert any(p.draft_probs is not None and len(p.tree) > 1 for p in one.proposals)


@pytest.mark.parametrize("kind", ["recurrent", "layer-skip", "early exit"])
def test_batches_of_both_kinds_are_grown_level_by_level(kind: str) -> None:
    """Greedy and drawn requests side by side; texts are those of the requests one by one, which are grown at
    once.
    """
    sampling = [SamplingParams(temperature=0.9), *GREEDY]
    together = expect_same(CHAINS[kind], sampling)
    alone = told(CHAINS[kind], sampling, levels=False, slots=1)
    assert alone.calls > together.calls  # a batch is of one kind in its last rounds at most
    assert together.texts == alone.texts


@pytest.mark.parametrize("kind", ["recurrent", "layer-skip", "early exit"])
def test_penalties_are_read_level_by_level(kind: str) -> None:
    sampling = [SamplingParams(temperature=0.9, presence_penalty=0.2)]
    assert expect_same(CHAINS[kind], sampling).calls == 0


def test_trees_are_drawn_level_by_level() -> None:
    for make in (recurrent(PRUNED), layer_skip(TREE), early_exit(Plan(2, 3), TREE)):
        assert expect_same(make, DRAWN["temperature"]).calls == 0


@pytest.mark.parametrize("kind", ["recurrent", "layer-skip", "early exit"])
def test_another_draw_is_seen(kind: str) -> None:
    """The control: one number of one row's draws is another, and the proposals are not the same."""
    raw = ops.drafting._draft_tree

    def other(*arguments: Any) -> Any:
        mine = list(arguments)
        assert mine[9].dtype == mine[10].dtype == torch.int64  # seeds and positions
        mine[10] = mine[10] + 1
        return raw(*mine)

    levels = told(CHAINS[kind], DRAWN["temperature"], levels=True)
    with patch.object(ops.drafting, "_draft_tree", other):
        one = told(CHAINS[kind], DRAWN["temperature"], levels=False)
    assert [p.tree for p in one.proposals] != [p.tree for p in levels.proposals]


def test_another_threshold_is_seen() -> None:
    make = LIKELIEST["layer-skip static"]
    with patch.object(LayerSkipDrafter, "_at_once", lambda _, tree, root: tree.at_once(root)):
        one, levels = (told(make, GREEDY, levels=levels) for levels in (False, True))
    assert one.texts == levels.texts  # whatever is drafted
    assert [p.tree for p in one.proposals] != [p.tree for p in levels.proposals]
