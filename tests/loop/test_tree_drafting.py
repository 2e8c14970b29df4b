"""Grown trees and combined drafters in the loop: whatever they propose, the text is plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from loop.models import random_model
from loop.recurrent import random_drafter
from specdec.acceptance import SamplingParams
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters import DraftRequest, NGramDrafter, Proposal
from specdec.drafters.base import Prices
from specdec.drafters.combined import CombinedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.drafters.recurrent import RecurrentDrafter
from specdec.drafters.shape import TreeShape
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

PROMPTS = [[3, 5, 7], [8, 9, 8, 9, 8], [4], [11, 12, 13, 11, 12], [2, 2], [30, 31], [7, 6, 5, 4], [1, 9]]
PRUNED = TreeShape.pruned(3, 6.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, presence_penalty=0.2, seed=5)


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


def requests(sampling: SamplingParams | None, tokens: int = 30) -> list[Request]:
    return [
        Request(
            prompt,
            tokens - 2 * i,
            SamplingParams() if sampling is None else sampling,
            ignore_eos=i % 2 == 0,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def combined(model: GatedDeltaNetForCausalLM, slots: int, shape: TreeShape) -> CombinedDrafter:
    other = ModelDrafter(model, slots=slots, branching=shape, draw=False)
    return CombinedDrafter(NGramDrafter(min_match=1, branches=2), other)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("kind", ["pruned", "fixed", "combined", "combined chain"])
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_plain_decodings(model, kind, slots, adaptive, sampling):
    """Greedy, and sampled with deterministic trees: token for token. The drafter is now good, now bad, and a
    budget of 5 cuts its trees.
    """
    plain = Loop(model, slots=4).run(requests(sampling))
    for other in (model, random_model(9, num_hidden_layers=1)):
        if kind == "pruned":
            drafter = ModelDrafter(other, slots=slots, branching=PRUNED, draw=False)
        elif kind == "fixed":
            drafter = ModelDrafter(other, slots=slots, branching=(2, 2, 1), draw=False)
        else:
            drafter = combined(other, slots, PRUNED if kind == "combined" else TreeShape((1,)))
        budget = DraftBudget(5, adaptive=adaptive)
        loop = Loop(model, drafter, slots=slots, budget=budget, observer=CacheAuditor(model, slots))
        results = loop.run(requests(sampling))
        assert [r.tokens for r in results] == [r.tokens for r in plain]
        assert loop.statistics.accepted > 0 or other is not model or adaptive


class Counting(ModelDrafter):
    """Counts the passes that it makes."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)  # type: ignore[arg-type]
        self.passes = 0

    def run_emitted(self, emitted):  # type: ignore[no-untyped-def]
        self.passes += 1
        return super().run_emitted(emitted)

    def run_drafted(self, nodes):  # type: ignore[no-untyped-def]
        self.passes += 1
        return super().run_drafted(nodes)


def begun(drafter: ModelDrafter, slots: int) -> None:
    for slot in range(slots):
        drafter.begin(slot, PROMPTS[slot])
        drafter.observe(slot, (), [5])


def ask(slots: int, prices: Prices, nodes: int = 12) -> list[DraftRequest]:
    return [DraftRequest(slot, nodes, 8, prices=prices) for slot in range(slots)]


def test_prices_end_the_growth(model):
    """What a node costs leaves out unlikely nodes, what a second costs stops at the first level."""
    free, dear, slow = (Counting(model, branching=PRUNED) for _ in range(3))
    for drafter in (free, dear, slow):
        begun(drafter, 1)
    (every,) = free.propose(ask(1, Prices()))
    assert every.chances is not None
    second = every.chances[1]
    (few,) = dear.propose(ask(1, Prices(node=0.5 * second, second=1e-9)))
    (first,) = slow.propose(ask(1, Prices(node=0.0, second=1e9)))
    assert slow.passes == 1 < dear.passes <= free.passes
    assert set(first.tree.depths) == {0}
    # Nodes with a better chance than the second's are all there: the price of a node is half of that.
    assert few.chances is not None
    worth = [c for c in every.chances if c >= second]
    assert list(few.chances[: len(worth)]) == worth
    assert sum(c < 0.5 * second for c in few.chances) < sum(c < 0.5 * second for c in every.chances)


def test_the_costly_drafter_is_left_alone_where_the_text_repeats_itself(model):
    """Once the copy has proved right, the other one is asked only to see whether it would bring more."""
    other = Counting(model, slots=1, branching=PRUNED, draw=False)
    drafter = CombinedDrafter(NGramDrafter(), other)
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 20
    drafter.begin(0, text[:40])
    drafter.observe(0, (), text[40:41])
    at, passes = 41, []
    while at < 140:
        before = other.passes
        (proposal,) = drafter.propose([DraftRequest(0, 8, 8, prices=Prices(0.05, 1e6))])
        passes.append(other.passes - before)
        path = [node for node, depth in enumerate(proposal.tree.depths) if good(proposal, node, text[at:])]
        drafter.observe(0, path, text[at : at + len(path) + 1])
        at += len(path) + 1
    assert sum(count > 0 for count in passes[6:]) <= 1


def good(proposal: Proposal, node: int, truth: Sequence[int]) -> bool:
    tree = proposal.tree
    tokens = [tree.tokens[i] for i in tree.path_to(node)]
    return tokens == list(truth[: len(tokens)])


def test_both_trees_become_one_and_each_learns_of_its_own_nodes(model):
    """A node that both propose is there once; the best ones come first; every path is one of theirs."""
    other = ModelDrafter(model, slots=1, branching=(2, 1), draw=False)
    truth = Loop(model).run([Request([3, 5, 7], 30, ignore_eos=True)])[0].tokens
    free = NGramDrafter(min_match=1, branches=2)
    drafter = CombinedDrafter(free, other)
    prompt = [3, 5, 7]
    drafter.begin(0, prompt)
    drafter.observe(0, (), truth[:1])
    alone = ModelDrafter(model, slots=1, branching=(2, 1), draw=False)
    alone.begin(0, prompt)
    alone.observe(0, (), truth[:1])
    at, shared = 1, 0
    while at < 24:
        (both,) = drafter.propose([DraftRequest(0, 12, 3)])
        (model_tree,) = alone.propose([DraftRequest(0, 12, 3)])
        tree = both.tree
        paths = {tuple(tree.tokens[i] for i in tree.path_to(node)) for node in range(len(tree))}
        assert len(paths) == len(tree)
        mine = {
            tuple(model_tree.tree.tokens[i] for i in model_tree.tree.path_to(node))
            for node in range(len(model_tree.tree))
        }
        assert mine <= paths
        assert both.chances is not None
        assert list(both.chances) == sorted(both.chances, reverse=True)
        shared += len(mine) < len(paths)
        path = [node for node in range(len(tree)) if good(both, node, truth[at:])]
        emitted = truth[at : at + len(path) + 1]
        drafter.observe(0, path, emitted)
        own = [n for n in range(len(model_tree.tree)) if good(model_tree, n, truth[at:])]
        alone.observe(0, own, emitted)
        at += len(emitted)
    assert shared > 0  # the n-grams added something at least once


def drawing(model: GatedDeltaNetForCausalLM, slots: int, together: bool) -> CombinedDrafter | ModelDrafter:
    other = ModelDrafter(
        random_model(9, num_hidden_layers=1), slots=slots, branching=PRUNED, drawn=TreeShape()
    )
    return CombinedDrafter(NGramDrafter(min_match=1, branches=2), other) if together else other


@pytest.mark.parametrize("slots", [1, 8])
def test_what_is_drawn_is_the_model_alone(model, slots):
    """Of a seed the text is that of the drafter without n-grams, in any batch."""
    asked = [replace(r, sampling=replace(SAMPLED, seed=i)) for i, r in enumerate(requests(None))]
    results = {}
    for together in (True, False):
        loop = Loop(model, drawing(model, slots, together), slots=slots, observer=CacheAuditor(model, slots))
        results[together] = [(r.tokens, r.drafted, r.accepted) for r in loop.run(asked)]
    assert results[True] == results[False]
    assert sum(accepted for _, _, accepted in results[True]) > 0
    plain = [r.tokens for r in Loop(model, slots=4).run(asked)]
    assert [tokens for tokens, _, _ in results[True]] != plain  # it is drawn, not followed


def test_greedy_texts_beside_drawn_ones_are_plain_decodings(model):
    mixed = [
        replace(r, sampling=replace(SAMPLED, seed=i) if i % 2 else r.sampling)
        for i, r in enumerate(requests(None))
    ]
    plain = [r.tokens for r in Loop(model, slots=4).run(mixed)]
    budget = DraftBudget(5, adaptive=False)
    loop = Loop(model, drawing(model, 4, True), slots=4, budget=budget, observer=CacheAuditor(model, 4))
    found = loop.run(mixed)
    assert [r.tokens for r in found[::2]] == plain[::2]
    assert sum(r.accepted for r in found[::2]) > 0
    alone = Loop(model, drawing(model, 1, True), budget=budget).run(mixed)
    assert [r.tokens for r in found] == [r.tokens for r in alone]


def test_a_free_drafter_that_draws_is_not_combined(model):
    with pytest.raises(ValueError, match="free: got model, which draws at random"):
        CombinedDrafter(ModelDrafter(model), ModelDrafter(model))


def test_parts_that_do_not_fit_are_not_combined(model):
    reader = RecurrentDrafter(random_drafter(model, 1), draw=False)
    with pytest.raises(ValueError, match="free: got adapted, which reads features"):
        CombinedDrafter(reader, RecurrentDrafter(random_drafter(model, 1), draw=False))
    with pytest.raises(TypeError, match=r"other: got .*NGramDrafter.*, want a SteppingDrafter"):
        CombinedDrafter(NGramDrafter(), NGramDrafter())
    with pytest.raises(TypeError, match="free: got None, want a Drafter"):
        CombinedDrafter(None, reader)
    drafter = CombinedDrafter(OracleDrafter([(PROMPTS[0], [4, 4, 4])], vocab_size=model.vocab_size), reader)
    with pytest.raises(ValueError, match="free: oracle states no chances"):
        Loop(model, drafter).run([Request(PROMPTS[0], 3)])


def test_a_slot_that_ends_in_the_middle_leaves_nothing_behind(model):
    """What comes into the slot is drafted for as by a new drafter, and a second end does nothing."""
    drafter = combined(model, 2, PRUNED)
    others = [[9, 9, 1, 2], [6, 5, 6, 5, 6]]
    first = begun_and_proposed(drafter, PROMPTS)
    for prompts in (others, PROMPTS):
        drafter.end(0)
        drafter.end(1)
        drafter.end(1)
        got = begun_and_proposed(drafter, prompts)
        assert got == begun_and_proposed(combined(model, 2, PRUNED), prompts)
    assert got == first
    # One that goes on is not touched by the other's end.
    drafter.observe(0, (), [7, 8])
    drafter.observe(1, (), [2])
    drafter.end(1)
    (mine,) = drafter.propose(ask(1, Prices()))
    alone = combined(model, 2, PRUNED)
    alone.begin(0, PROMPTS[0])
    alone.observe(0, (), [5])
    alone.observe(0, (), [7, 8])
    (same,) = alone.propose(ask(1, Prices()))
    assert paths_of(mine) == paths_of(same)  # by other chances, as the drafter has learned from both


def paths_of(proposal: Proposal) -> set[tuple[int, ...]]:
    tree = proposal.tree
    return {tuple(tree.tokens[i] for i in tree.path_to(node)) for node in range(len(tree))}


def begun_and_proposed(drafter: CombinedDrafter, prompts: Sequence[Sequence[int]]) -> list[Proposal]:
    for slot in range(2):
        drafter.begin(slot, prompts[slot])
        drafter.observe(slot, (), [5])
    proposals = drafter.propose(ask(2, Prices()))
    assert all(len(p.tree) for p in proposals)
    return proposals
