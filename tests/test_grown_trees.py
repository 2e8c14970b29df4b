"""Trees grown in one call of `draft_tree` are those that the drafter grows level by level in Python."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from loop.models import random_model
from loop.recurrent import random_drafter
from specdec import ops
from specdec.acceptance import SamplingParams
from specdec.cache import Steps
from specdec.drafters import DraftRequest, Proposal
from specdec.drafters.base import FREE, Prices
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.shape import TreeShape
from specdec.models.features import NodeFeatures

SHAPES = [TreeShape(), TreeShape((2, 2, 1)), TreeShape((4, 1)), TreeShape.pruned(), TreeShape.pruned(3, 1.0)]


class LevelByLevel(RecurrentDrafter):
    """As drafters do that cannot grow a tree in one call."""

    def run_trees(self, logits, requests, rules, sampling):  # type: ignore[no-untyped-def]
        return None


class Constant:
    """A level's time that is not measured."""

    cold = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds

    def observe(self, seconds: float) -> None:
        del seconds


def proposals(
    kind: type[RecurrentDrafter],
    shape: TreeShape,
    *,
    rows: int,
    prices: Prices,
    level_seconds: float,
    draft_vocab: int | None = None,
    seed: int = 0,
) -> list[Proposal]:
    """What a new drafter proposes in a few rounds of random texts, of which it learns."""
    target = random_model(seed)
    drafter = kind(
        random_drafter(target, seed, draft_vocab_size=draft_vocab), slots=rows, branching=shape, draw=False
    )
    drafter._learned.level_seconds = lambda _: Constant(level_seconds)  # type: ignore[method-assign,assignment,return-value]
    drafter._learned.best_child = 0.2
    # One call cannot see its own children before the end.
    drafter._learned.see_child = lambda chance: None  # type: ignore[method-assign]
    drafter._ends = frozenset({3, 11})
    drafter._end_tensor = torch.tensor([3, 11])
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    size = drafter.model.config.feature_size

    def text(count: int) -> list[int]:
        return [rng.randrange(target.vocab_size) for _ in range(count)]

    for slot in range(rows):
        prompt = text(5 + slot)
        drafter.begin(slot, prompt, torch.randn(len(prompt), size, generator=generator))
        drafter.observe(slot, (), text(1), NodeFeatures.of(torch.randn(1, size, generator=generator)))
    found = []
    for _ in range(3):
        requests = [
            DraftRequest(
                slot,
                rng.randrange(1, 13),
                rng.randrange(1, 7),
                SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0])),
                prices=prices,
            )
            for slot in range(rows)
        ]
        drafted, _ = drafter.draft(requests)
        found += drafted
        for request, proposal in zip(requests, drafted, strict=True):
            kept = rng.randrange(len(proposal.tree) + 1)
            tokens = [*proposal.tree.tokens[:kept], *text(1)] if proposal.tree.is_chain else text(2)
            path = tuple(range(len(tokens) - 1)) if proposal.tree.is_chain else ()
            features = NodeFeatures.of(torch.randn(len(tokens), size, generator=generator))
            drafter.observe(request.slot, path, tokens, features)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prices", [FREE, Prices(0.01, 50.0), Prices(0.05, 400.0)], ids=str)
def test_one_call_grows_what_levels_grow(shape: TreeShape, rows: int, prices: Prices) -> None:
    drafted = 0
    for seed in range(3):
        options = {"rows": rows, "prices": prices, "level_seconds": 2e-4, "seed": seed}
        one = proposals(RecurrentDrafter, shape, **options)  # type: ignore[arg-type]
        levels = proposals(LevelByLevel, shape, **options)  # type: ignore[arg-type]
        for a, b in zip(one, levels, strict=True):
            assert (a.tree, a.chances) == (b.tree, b.chances)
        drafted += sum(len(p.tree) for p in one)
    assert drafted > 0


def test_a_draft_vocabulary_is_mapped() -> None:
    options = {"rows": 2, "prices": FREE, "level_seconds": 0.0, "draft_vocab": 20}
    one = proposals(RecurrentDrafter, TreeShape.pruned(), **options)  # type: ignore[arg-type]
    levels = proposals(LevelByLevel, TreeShape.pruned(), **options)  # type: ignore[arg-type]
    assert [(p.tree, p.chances) for p in one] == [(p.tree, p.chances) for p in levels]
    assert max(t for p in one for t in p.tree.tokens) >= 20


def test_a_price_that_nothing_meets_stops_after_the_first_level() -> None:
    for kind in (RecurrentDrafter, LevelByLevel):
        for proposal in proposals(kind, TreeShape(), rows=2, prices=Prices(0.0, 1e9), level_seconds=1.0):
            assert len(proposal.tree) == 1


def arguments() -> dict[str, Any]:
    """A call of `draft_tree` over one emitted token a row."""
    target = random_model(0)
    model = random_drafter(target, 0)
    cache = model.new_cache(2)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    with torch.inference_mode():
        h, round = model.forward(
            torch.tensor([[4], [5]]),
            features=torch.zeros(2, 1, model.config.feature_size),
            cache=cache,
            slots=slots,
        )
        logits = model.logits(h[:, 0])
    steps = Steps()
    steps.extend(round)
    no_ends = torch.tensor([], dtype=torch.int64)
    rules = RecurrentDrafter(model)._learned.rules(TreeShape((2,)), 0.0, no_ends, None)
    requests = [ops.TreeRequest(4, 3, 0), ops.TreeRequest(2, 1, 0)]
    return {
        "logits": logits,
        "requests": requests,
        "rules": rules,
        "drafting": model._drafting,
        "place": model._place(h, cache, slots, steps),
    }


def grown(**changed: Any) -> ops.GrownTrees:
    with torch.inference_mode():
        return ops.draft_tree(**(arguments() | changed))


def test_limits_of_rows_hold() -> None:
    found = grown()
    first, second = found.trees
    assert len(first.tokens) == 4
    assert len(second.tokens) == 2
    assert found.levels == 2
    assert first.parents == [0, 0, 1, 2]
    assert first.ranks == [0, 1, 0, 0]
    for chance, parent in zip(first.chances, first.parents, strict=True):
        assert 0.0 < chance <= (first.chances[parent - 1] if parent else 1.0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("requests", [ops.TreeRequest(4, 3, 0)], r"requests: got shape \[1, 4\], want .* \[2, 4\]"),
        (
            "requests",
            [ops.TreeRequest(4, 3, 1), ops.TreeRequest(4, 3, 0)],
            "requests: got column 1, want 0 to 0",
        ),
        (
            "requests",
            [ops.TreeRequest(4, 3, 0, table=2), ops.TreeRequest(4, 3, 0)],
            "requests: got table 2, want 0 to 1",
        ),
        (
            "requests",
            [ops.TreeRequest(4, 3, 0), ops.TreeRequest(-1, 3, 0)],
            "requests: got max_nodes -1, want at least 0",
        ),
        (
            "requests",
            [ops.TreeRequest(4, -1, 0), ops.TreeRequest(4, 3, 0)],
            "requests: got max_depth -1, want at least 0",
        ),
        (
            "requests",
            [ops.TreeRequest(4, 3, 0, node_price=math.nan), ops.TreeRequest(4, 3, 0)],
            "requests: got node_price nan, want at least 0, or None",
        ),
        (
            "requests",
            [ops.TreeRequest(4, 3, 0, node_price=-1.0), ops.TreeRequest(4, 3, 0)],
            r"requests: got node_price -1\.0, want at least 0, or None",
        ),
        ("logits", torch.zeros(2, 3), "logits: got shape"),
    ],
)
def test_wrong_arguments(name: str, change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grown(**{name: change})


def test_branching_without_children() -> None:
    with pytest.raises(ValueError, match="branching: want numbers of children"):
        grown(rules=arguments()["rules"]._replace(branching=(0,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most_run": -1}, "most_run: got -1, want at least 0"),
        ({"most_nodes": -1}, "most_nodes: got -1, want at least 0"),
        ({"ratios": torch.ones(2, 3, 0, dtype=torch.float64)}, "ratios: got no bins, want at least 1"),
        ({"ends": torch.tensor(3)}, r"ends: got shape \[\], want \[E\]"),
        ({"vocabulary": torch.full((61,), 61)}, "vocabulary: got token 61, want 0 to 60"),
        ({"vocabulary": torch.full((61,), -2)}, "vocabulary: got token -2, want 0 to 60"),
    ],
    ids=str,
)
def test_wrong_rules(change: dict[str, object], message: str) -> None:
    rules = arguments()["rules"]._replace(tau=2.0, **change)
    with pytest.raises(ValueError, match=f"^{message}"):
        grown(rules=rules)


def test_no_rows_and_no_limit() -> None:
    """A negative size of a pruned tree ended in memory that is not its own, twice a great one in none."""
    call = arguments()
    rules = call["rules"]._replace(branching=(4,), tau=2.0)
    limits = [grown(rules=rules, requests=[ops.TreeRequest(most, 3, 0)] * 2) for most in (1000, 2**63 - 1)]
    assert limits[0].trees == limits[1].trees
    assert all(tree.tokens for tree in limits[0].trees)
    place = call["place"]
    ((factors, mixed),) = place.prefix.entries
    entries = [ops.BlockEntries(ops.Factors(*(factor[:0] for factor in factors)), mixed[:0])]
    place = place._replace(outputs=place.outputs[:0], slots=place.slots[:0], prefix=ops.StackPrefix(entries))
    none = grown(logits=call["logits"][:0], requests=[], place=place)
    assert (none.trees, none.levels, none.probs, none.parents) == ([], 0, None, None)


def test_outputs_and_factors_are_of_the_same_nodes() -> None:
    """In a chain no parent would tell."""
    call = arguments()
    place = call["place"]
    place = place._replace(
        outputs=torch.cat([place.outputs] * 3, dim=1), prefix=place.prefix._replace(parents=None)
    )
    rules = call["rules"]._replace(branching=(1,))
    with pytest.raises(ValueError, match=r"^prefix\.factors\.k: got shape"):
        grown(place=place, rules=rules, requests=[ops.TreeRequest(4, 3, 2)] * 2)


def test_what_is_no_distribution_has_no_drafts() -> None:
    logits = arguments()["logits"]
    assert isinstance(logits, torch.Tensor)
    logits = logits.clone()
    logits[0, 1] = math.nan
    first, second = grown(logits=logits).trees
    assert first.tokens == []
    assert len(second.tokens) == 2
