"""Early exits in two and three tiers: a target that drafts with its own first layers writes what it writes
alone, its memory is that of plain decoding after every round, and no layer runs a token twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from loop.models import FAMILIES
from loop.test_tiers_laws import ByWhatPassed
from specdec.acceptance import SamplingParams
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters.adaptive import AdaptivePlanner, likely_plans
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.hierarchical import HierarchicalDrafter
from specdec.drafters.plan import Plan
from specdec.drafters.stage import Work
from specdec.generation import Request, Result
from specdec.loop import Loop
from specdec.methods.autoregressive import autoregressive
from specdec.methods.hispec import hispec
from specdec.models import load_model, load_tokenizer
from specdec.models.base import CausalLM
from specdec.models.layered import Layered

PROMPTS = [[3, 5, 7], [8, 9, 8, 9, 8], [4], [11, 12, 13, 11, 12], [2, 2], [30, 31], [7, 6, 5, 4], [1, 9], [6]]
SAMPLED = SamplingParams(temperature=0.9, top_k=20, presence_penalty=0.2, seed=5)
TWO, THREE = Plan(2, 3), Plan(1, 2, 3, 4)
PLANS = likely_plans((2, 4))
SHAPES = {"chain": (1,), "tree": (2, 2, 1)}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Layered:
    return FAMILIES[request.param](num_hidden_layers=5)


@pytest.fixture(scope="module")
def plain(model: CausalLM) -> list[list[int]]:
    return [r.tokens for r in autoregressive(model, slots=4).run(requests())]


def requests(sampling: SamplingParams | None = None, tokens: int = 26) -> list[Request]:
    return [
        Request(p, tokens - 2 * i, SamplingParams() if sampling is None else sampling, ignore_eos=i % 2 == 0)
        for i, p in enumerate(PROMPTS)
    ]


def tiered(model: Layered, plan: Plan, slots: int = 1, *, max_draft: int = 12, **options: Any) -> Loop:
    """A loop that always drafts, its memory compared with plain decoding's after every round."""
    kind = HierarchicalDrafter if plan.middle else EarlyExitDrafter
    commit = options.pop("commit", "deferred")
    drafter = kind(model, model.new_cache(slots), plan, **options)
    return Loop(
        model,
        drafter,
        slots=slots,
        budget=DraftBudget(max_draft, adaptive=False, whole=True),
        commit=commit,
        observer=CacheAuditor(model, slots),
        cache=drafter.cache,
    )


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", [TWO, THREE], ids=str)
def test_greedy_texts_and_memory_are_plain_decodings(model, plain, plan, shape, slots):
    commit = "eager" if shape == "tree" else "deferred"
    loop = tiered(model, plan, slots, branching=SHAPES[shape], commit=commit, int8=shape == "tree")
    assert [r.tokens for r in loop.run(requests())] == plain
    assert loop.statistics.drafted > 50
    assert 0.03 < loop.statistics.acceptance_rate < 0.95  # both happened


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("plan", [TWO, THREE], ids=str)
def test_texts_sampled_with_likeliest_drafts_are_plain_samplings(model, plan, slots):
    """Deterministic drafts are followed: token for token, penalties, several seeds and all."""
    sampled = [
        replace(r, sampling=replace(SAMPLED, seed=i)) if i % 3 else r for i, r in enumerate(requests(SAMPLED))
    ]
    loop = tiered(model, plan, slots, draw=False)
    assert [r.tokens for r in loop.run(sampled)] == [r.tokens for r in autoregressive(model).run(sampled)]
    assert loop.statistics.accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", [TWO, THREE], ids=str)
def test_a_seed_repeats_a_drawn_text_in_any_batch(model, plan, shape):
    asked = [
        replace(r, sampling=replace(SAMPLED, seed=i, temperature=0.0 if i == 4 else 0.9))
        for i, r in enumerate(requests())
    ]

    def texts(slots: int) -> list[list[int]]:
        loop = tiered(model, plan, slots, branching=SHAPES[shape], max_draft=9)
        found = [r.tokens for r in loop.run(asked)]
        assert 0 < loop.statistics.accepted < loop.statistics.drafted
        return found

    assert texts(1) == texts(8)


@pytest.mark.parametrize("branching", [(1,), (2, 1)], ids=str)
@pytest.mark.parametrize("planner", ["by what passed", "adaptive"])
def test_a_sequence_plans_for_itself_whatever_runs_beside_it(model, plain, planner, branching):
    """Plans of two and three tiers and none in one round, beside a greedy sequence; its memory, too."""
    greedy = 4
    asked = [
        replace(r, sampling=SamplingParams() if i == greedy else replace(SAMPLED, seed=i))
        for i, r in enumerate(requests())
    ]
    used: Counter[Plan | None] = Counter()

    def texts(slots: int) -> list[list[int]]:
        mine: Any = ByWhatPassed(used) if planner == "by what passed" else AdaptivePlanner(model, PLANS)
        drafter = HierarchicalDrafter(model, model.new_cache(slots), mine, branching=branching)
        loop = Loop(
            model,
            drafter,
            slots=slots,
            budget=DraftBudget(9, whole=True),
            observer=CacheAuditor(model, slots),
            cache=drafter.cache,
        )
        found = [r.tokens for r in loop.run(asked)]
        assert 0 < loop.statistics.accepted < loop.statistics.drafted
        return found

    alone = texts(1)
    assert texts(8) == texts(3) == alone
    assert alone[greedy] == plain[greedy]
    assert planner == "adaptive" or len(used) == 1 + len(ByWhatPassed.plans)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("plan", [None, Plan(2, 2, 5, 4)], ids=str)
def test_the_embedded_model_writes_what_it_writes_alone(plan, slots):
    """Real text, with the tiers that `hispec` chooses by the clock and with those that are given."""
    model = load_model("gdn-code")
    text = load_tokenizer("gdn-code").encode("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n")
    asked = [Request(text[:n], 40, ignore_eos=True) for n in range(3, 12)]
    loop = hispec(model, plan, slots=slots, adaptive=plan is None)
    assert [r.tokens for r in loop.run(asked)] == [r.tokens for r in autoregressive(model).run(asked)]
    assert plan is None or loop.statistics.accepted > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", [TWO, THREE], ids=str)
def test_bfloat16_texts_are_plain_decodings(family, plan):
    model = FAMILIES[family](num_hidden_layers=5, dtype=torch.bfloat16)
    plain = [r.tokens for r in autoregressive(model, slots=4).run(requests())]
    assert [r.tokens for r in tiered(model, plan, 4).run(requests())] == plain


@pytest.mark.parametrize("plan", [Plan(4, 3), Plan(3, 2, 4, 4)], ids=str)
def test_exits_that_agree_with_the_target_are_always_right(model, plan):
    """The layers after the draft exit do nothing: what is drawn is always kept."""
    with without_last_layers(model, plan.exit):
        loop = tiered(model, plan, 4)
        loop.run([replace(r, sampling=replace(SAMPLED, presence_penalty=0.0)) for r in requests()])
        assert loop.statistics.accepted == loop.statistics.drafted > 0


# --- what the layers do ---


@contextmanager
def counted(model: Layered) -> Iterator[list[list[int]]]:
    """Of each layer the nodes of each of its calls, of all rows."""
    calls: list[list[int]] = [[] for _ in range(model.num_layers)]
    run = type(model)._block

    def block(self: Layered, layer: int, x: torch.Tensor, call: Any, *, mixer: bool, mlp: bool) -> Any:
        calls[layer].append(x.shape[0] * x.shape[1] if call.lengths is None else int(call.lengths.sum()))
        return run(self, layer, x, call, mixer=mixer, mlp=mlp)

    with patch.object(type(model), "_block", block):
        yield calls


@pytest.mark.parametrize("plan", [TWO, THREE], ids=str)
def test_a_round_that_was_cut_short_leaves_nothing_to_one_without_drafts(model, plain, plan, monkeypatch):
    """Ctrl-C came between draft and verification, and in the next run the drafter rests at first."""
    loop = tiered(model, plan, 2)
    assert loop.drafter is not None
    with monkeypatch.context() as patched:
        patched.setattr(loop.drafter, "verify", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loop.run(requests()[::-1])  # other texts
    rounds = iter([True, True, False] * 1000)
    monkeypatch.setattr(loop.budget, "rests", lambda rows: next(rounds))
    assert [r.tokens for r in loop.run(requests())] == plain


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("plan", [Plan(4, 3), Plan(2, 2, 4, 4), Plan(1, 1, 2, 3)], ids=str)
def test_no_layer_runs_a_token_twice(model, plan, slots):
    """Where all drafts are right every node is committed, and every layer has run each of them once."""
    asked = [Request(p, 25, ignore_eos=True) for p in PROMPTS[:slots]]
    with without_last_layers(model, plan.exit):
        loop = tiered(model, plan, slots)
        loop._observer = None  # it runs layers too
        with counted(model) as calls:
            results = loop.run(asked)
    assert all(r.drafted == r.accepted for r in results)
    # Every emitted token but the last is committed: the first comes from the prefill.
    committed = sum(len(r.tokens) - 1 for r in results)
    assert [sum(layer) for layer in calls] == [committed] * model.num_layers
    assert work(loop).tokens == committed * model.num_layers


def work(loop: Loop) -> Work:
    assert isinstance(loop.drafter, EarlyExitDrafter)
    return loop.drafter.work


@pytest.mark.parametrize("plan", [TWO, Plan(3, 2), THREE, Plan(2, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_passes_as_many_layers_as_the_formula_says(family, plan):
    """m (N_d E + M) + L of m inner rounds, N_d E + L in two tiers, whatever is accepted."""
    model = FAMILIES[family](num_hidden_layers=5, eos_token_ids=())  # below an end token nothing is drafted
    loop = tiered(model, plan, max_draft=30)
    loop._observer = None
    inner = 0
    check = HierarchicalDrafter._check

    def counting(self: HierarchicalDrafter, *given: Any) -> None:
        nonlocal inner
        inner += 1
        check(self, *given)

    results: list[Result] = []
    with patch.object(HierarchicalDrafter, "_check", counting), counted(model) as calls:
        events = loop.stream([Request(PROMPTS[0], 400)], results)
        while len(results[0].tokens) < 100:  # far from the limit, which cuts drafts
            next(events)
        events.close()
    rounds, layers = results[0].rounds, model.num_layers
    drafts = plan.length * plan.exit
    below = inner * (drafts + plan.middle) if plan.middle else rounds * drafts
    assert work(loop).passes == below + rounds * layers == sum(map(len, calls))


@contextmanager
def without_last_layers(model: Layered, first: int) -> Iterator[None]:
    """Layers from `first` on add nothing to the residual stream."""
    run = type(model)._block

    def block(self: Layered, layer: int, x: torch.Tensor, call: Any, *, mixer: bool, mlp: bool) -> Any:
        y, read, made = run(self, layer, x, call, mixer=mixer, mlp=mlp)
        return (x if layer >= first else y), read, made

    with patch.object(type(model), "_block", block):
        yield
