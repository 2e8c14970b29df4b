"""Layers run a span at a time: whatever the spans, passes and order of the nodes, the bits of one pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from loop.models import FAMILIES
from specdec.cache import DecodingCache, Round, Steps
from specdec.models.base import LayeredLM

SLOTS = torch.tensor([2, 0], dtype=torch.int32)
PARENTS = [[-1, 0, 0, 1, 3], [-1, 0, 1, 1, 2]]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> LayeredLM:
    return FAMILIES[request.param](num_hidden_layers=4)


def read(model: LayeredLM, pending: bool = True) -> DecodingCache:
    """Two texts in three slots, the ends of which are pending."""
    cache = model.new_cache(3)
    model.prefill([[5, 6, 7], [9]], cache=cache, slots=SLOTS.tolist())
    if pending:
        _, round = model.forward(torch.tensor([[8, 9, 3], [4, 4, 4]]), cache=cache, slots=SLOTS)
        cache.defer(round, None, torch.tensor([3, 1], dtype=torch.int32))
    return cache


def entries(round: Round) -> list[Tensor]:
    """All tensors of a round, flat."""
    found: list[Tensor] = []
    for layer in round.layers:
        assert layer is not None
        for part in layer:
            found += [t for t in (part if isinstance(part, tuple) else (part,)) if t is not None]
    return found


def same(a: Round, b: Round) -> bool:
    return all(torch.equal(x, y) for x, y in zip(entries(a), entries(b), strict=True))


@pytest.mark.parametrize("cuts", [(0, 4), (0, 1, 4), (0, 2, 3, 4)])
def test_spans_are_one_pass(model, cuts):
    """Every span folds in its own part of what is pending."""
    tokens, parents = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]), torch.tensor(PARENTS).int()
    whole, apart = read(model), read(model)
    logits, wanted = model.forward(tokens, cache=whole, slots=SLOTS, parents=parents)
    pending = apart.take_pending(SLOTS)
    x, round = model.embeddings[tokens], None
    for first, last in pairwise(cuts):
        x, part = model.run_layers(
            x, range(first, last), cache=apart, slots=SLOTS, parents=parents, pending=pending
        )
        round = part if round is None else round.joined(part)
    assert round is not None
    assert torch.equal(model.readout(x), logits)
    assert same(round, wanted)
    for slot in range(3):
        for a, b in zip(apart.snapshot(slot), whole.snapshot(slot), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)


def test_nodes_may_come_in_any_order_and_be_dropped(model):
    """A tree is grown below others that are thrown away, then put in order."""
    tokens, parents = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]), torch.tensor(PARENTS).int()
    cache = read(model)
    cache.flush()
    _, wanted = model.forward(tokens, cache=cache, slots=SLOTS, parents=parents)
    steps = Steps()
    # (tokens, columns of parents) of a pass; 50 and more are thrown away.
    passes = [
        ([[1], [9]], [[-1], [-1]]),
        ([[50, 3, 2], [8, 51, 52]], [[0, 0, 0], [0, 0, 0]]),
        ([[53, 4], [6, 7]], [[2, 3], [1, 1]]),
        ([[5, 54], [55, 5]], [[5, 5], [4, 5]]),
    ]
    for new, above in passes:
        x = model.embeddings[torch.tensor(new)]
        _, round = model.run_layers(
            x,
            range(4),
            cache=cache,
            slots=SLOTS,
            parents=torch.tensor(above).int(),
            prefix=steps if len(steps) else None,
        )
        steps.extend(round)
    steps.arrange([[0, 3, 2, 5, 6], [0, 1, 5, 4, 7]])
    assert steps.round is not None
    assert steps.round.parents.tolist() == PARENTS
    assert same(steps.round, wanted)


def test_arranged_chains_stay_chains(model):
    cache = read(model, pending=False)
    steps = Steps()
    _, round = model.forward(torch.tensor([[1, 2, 3], [4, 5, 6]]), cache=cache, slots=SLOTS)
    steps.extend(round)
    steps.arrange([[0, 1], [0, 1]])
    assert steps.parents is None
    assert len(steps) == 2
    steps.arrange([[0, 1], [0]])
    assert steps.parents.tolist() == [[-1, 0], [-1, -1]]
