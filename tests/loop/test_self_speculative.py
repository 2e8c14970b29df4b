"""Self-speculative decoding: a target that drafts for itself writes what it writes alone, and drafting leaves
its memory as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loop.models import FAMILIES
from specdec.acceptance import SamplingParams
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.cache import DecodingCache, Steps
from specdec.drafters import DraftRequest, Proposal
from specdec.drafters.base import Prices
from specdec.drafters.draft_exit import AdaptiveExit, DraftExit, FixedLength, StaticThreshold
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.shape import TreeShape
from specdec.generation import Request
from specdec.loop import Loop
from specdec.methods.autoregressive import autoregressive
from specdec.methods.self_speculative import self_speculative
from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet

PROMPTS = [[3, 5, 7], [8, 9, 8, 9, 8], [4], [11, 12, 13, 11, 12], [2, 2], [30, 31], [7, 6, 5, 4], [1, 9], [6]]
SOME = SkipSet.of([1], [2])  # of four layers
SAMPLED = SamplingParams(temperature=0.9, top_k=20, presence_penalty=0.2, seed=5)
ADAPTIVE = AdaptiveExit(threshold=0.3, target=0.5, step=0.2)
EXITS = {"adaptive": ADAPTIVE, "static": StaticThreshold(0.4), "fixed": FixedLength(), "priced": None}
SHAPES = {"chain": (1,), "tree": (2, 2, 1), "pruned": TreeShape.pruned(3, 4.0)}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> SkippableLM:
    return FAMILIES[request.param](num_hidden_layers=4)


def requests(sampling: SamplingParams | None = None, tokens: int = 26) -> list[Request]:
    return [
        Request(p, tokens - 2 * i, SamplingParams() if sampling is None else sampling, ignore_eos=i % 2 == 0)
        for i, p in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def plain(model: SkippableLM) -> list[list[int]]:
    return [r.tokens for r in autoregressive(model, slots=4).run(requests())]


def memory(cache: DecodingCache) -> list[Tensor]:
    """Every number that the cache holds, with what is pending, which goes on waiting."""
    cache = deepcopy(cache)
    return [
        tensor for slot in range(cache.slots) for layer in cache.snapshot(slot) for tensor in layer.values()
    ]


class Watched(LayerSkipDrafter):
    """Compares the target's memory around every draft, bit for bit."""

    drafts = 0

    def draft(self, rows: Sequence[DraftRequest]) -> tuple[list[Proposal], float]:
        before = memory(self.cache)
        found = super().draft(rows)
        after = memory(self.cache)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        self.drafts += sum(len(p.tree) for p in found[0])
        return found


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("exit", EXITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_texts_and_memory_are_plain_decodings(model, plain, shape, exit, slots):
    rule: DraftExit | None = EXITS[exit]
    drafter = Watched(model.skipping(SOME), model.new_cache(slots), exit=rule, branching=SHAPES[shape])
    loop = Loop(
        model,
        drafter,
        slots=slots,
        budget=DraftBudget(6, adaptive=False, whole=rule is not None),
        commit="eager" if shape == "tree" else "deferred",
        observer=CacheAuditor(model, slots),
        cache=drafter.cache,
    )
    assert [r.tokens for r in loop.run(requests())] == plain
    assert drafter.drafts > 50
    assert 0.05 < loop.statistics.acceptance_rate < 0.95  # both happened


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("exit", EXITS)
def test_texts_sampled_with_likeliest_drafts_are_plain_samplings(model, exit, adaptive, slots):
    """Deterministic drafts are followed: token for token, penalties, several seeds and all."""
    sampled = [
        replace(r, sampling=replace(SAMPLED, seed=i)) if i % 3 else r for i, r in enumerate(requests(SAMPLED))
    ]
    loop = self_speculative(
        model, SOME, slots=slots, exit=EXITS[exit], max_draft=5, adaptive=adaptive, draw=False
    )
    assert [r.tokens for r in loop.run(sampled)] == [r.tokens for r in autoregressive(model).run(sampled)]


@pytest.mark.parametrize("exit", EXITS)
def test_skipping_nothing_is_always_right(model, plain, exit):
    loop = self_speculative(model, SkipSet(), slots=4, exit=EXITS[exit], max_draft=5, adaptive=False)
    assert [r.tokens for r in loop.run(requests())] == plain
    assert loop.statistics.drafted > 0
    assert loop.statistics.accepted == loop.statistics.drafted


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_drafts_change_no_text(model, plain, shape, slots):
    view = model.skipping(SkipSet.of([1], []), int8=True)
    drafter = Watched(view, model.new_cache(slots), exit=ADAPTIVE, branching=SHAPES[shape])
    loop = Loop(
        model,
        drafter,
        slots=slots,
        budget=DraftBudget(6, adaptive=False, whole=True),
        observer=CacheAuditor(model, slots),
        cache=drafter.cache,
    )
    assert [r.tokens for r in loop.run(requests())] == plain
    assert 0 < loop.statistics.accepted < loop.statistics.drafted


def test_int8_copies_are_nearly_the_model_and_read_a_part_of_it(model):
    view = model.skipping(SkipSet(), int8=True)
    loop = self_speculative(model, SkipSet(), exit=FixedLength(), int8=True, max_draft=3, adaptive=False)
    loop.run(requests())
    assert loop.statistics.acceptance_rate > 0.8
    assert view.head.dtype == torch.int8
    assert model.head.dtype != torch.int8
    assert view.num_parameters == model.num_parameters // model.head.dtype.itemsize
    other = model.skipping(SOME, [3, 5, 7], int8=True)
    assert other.head.dtype == torch.int8
    assert other._layers is view._layers  # made once
    assert model.first_layers(2).skipping(SkipSet(), int8=True).num_layers == 2
    tokens, slots = torch.tensor([[5, 6, 7]]), torch.zeros(1, dtype=torch.int32)
    exact, _ = model.forward(tokens, cache=model.new_cache(1), slots=slots)
    near, _ = view.forward(tokens, cache=model.new_cache(1), slots=slots)
    assert not torch.equal(exact, near)


def test_a_view_of_a_view_keeps_the_vocabulary_and_int8(model):
    """Whether or not the model has made its int8 copy before."""
    vocabulary, tokens = [3, 5, 7, 9], torch.tensor([[5, 6, 7]])
    slots = torch.zeros(1, dtype=torch.int32)

    def logits(view: SkippableLM) -> Tensor:
        return view.forward(tokens, cache=model.new_cache(1), slots=slots)[0]

    want = model.skipping(SOME, vocabulary, int8=True)
    reduced = model.skipping(SkipSet(), vocabulary)
    small = model.skipping(SkipSet(), int8=True)
    views = {
        "int8 of a vocabulary": reduced.skipping(SOME, int8=True),
        "a vocabulary of int8": small.skipping(SOME, vocabulary),
        "both of int8": small.skipping(SOME, vocabulary, int8=True),
        "another set of both": model.skipping(SkipSet(), vocabulary, int8=True).skipping(SOME),
        "int8 of both": model.skipping(SkipSet(), vocabulary, int8=True).skipping(SOME, int8=True),
    }
    for name, view in views.items():
        assert view.vocabulary.tolist() == vocabulary, name
        assert view.head.dtype == torch.int8, name
        assert view.num_parameters == want.num_parameters, name
        # A head that is rounded again may move by what rounding its scales does.
        assert torch.allclose(logits(view), logits(want), rtol=1e-5, atol=1e-5), name
    whole = small.skipping(SOME, int8=True)
    assert whole.vocabulary is None
    assert whole.num_parameters == model.skipping(SOME, int8=True).num_parameters
    assert torch.equal(logits(whole), logits(model.skipping(SOME, int8=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_texts_are_plain_decodings(family):
    model = FAMILIES[family](num_hidden_layers=4, dtype=torch.bfloat16)
    plain = [r.tokens for r in autoregressive(model, slots=4).run(requests())]
    loop = self_speculative(model, SOME, slots=4, exit=ADAPTIVE, max_draft=5, adaptive=False)
    assert [r.tokens for r in loop.run(requests())] == plain
    assert 0 < loop.statistics.accepted < loop.statistics.drafted


def test_skipping_nothing_is_right_on_trees_as_deep_as_they_go(model, plain):
    loop = self_speculative(
        model, SkipSet(), exit=FixedLength(), branching=(2, 1), max_draft=6, adaptive=False
    )
    request = requests()[0]
    result = loop.run([request])[0]
    assert result.tokens == plain[0]
    # Pairs of chains, three deep: four tokens a round, of 25 after the first the last one alone.
    assert (result.rounds, result.accepted) == (7, 18)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1.1), SAMPLED])
def test_skipping_nothing_draws_what_is_always_kept(model, sampling):
    """p = q to the bit: drawn drafts are kept too."""
    loop = self_speculative(model, SkipSet(), slots=4, exit=FixedLength(), max_draft=4, adaptive=False)
    loop.run(requests(replace(sampling, seed=3)))
    assert loop.statistics.drafted > 0
    assert loop.statistics.accepted == loop.statistics.drafted


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_repeats_a_drawn_text_in_any_batch(model, shape):
    asked = [replace(r, sampling=replace(SAMPLED, seed=i)) for i, r in enumerate(requests())]

    def texts(slots: int) -> list[list[int]]:
        options = {"exit": ADAPTIVE, "branching": SHAPES[shape], "max_draft": 6}
        return [r.tokens for r in self_speculative(model, SOME, slots=slots, **options).run(asked)]

    assert texts(1) == texts(8)


@pytest.mark.parametrize("slots", [1, 8])
def test_a_reduced_vocabulary_drafts_its_own_tokens_alone(model, plain, slots):
    vocabulary = [*range(1, 61, 2)]
    loop = self_speculative(
        model, SOME, slots=slots, exit=ADAPTIVE, vocabulary=vocabulary, max_draft=4, adaptive=False
    )
    assert [r.tokens for r in loop.run(requests())] == plain
    assert loop.statistics.accepted > 0
    assert [r.tokens for r in loop.run(requests(SAMPLED))]
    view = model.skipping(SOME, vocabulary)
    drafter = LayerSkipDrafter(view, model.new_cache(1), branching=(3, 2))
    proposal = proposed(model, drafter, [5, 6, 7], DraftRequest(0, 9, 3))
    assert len(proposal.tree) == 9
    assert set(proposal.tree.tokens) <= set(vocabulary)
    assert view.num_parameters == model.skipping(SOME).num_parameters - 31 * model.config.hidden_size


def proposed(
    model: SkippableLM, drafter: LayerSkipDrafter, text: list[int], request: DraftRequest
) -> Proposal:
    """What is drafted after a text, of which the target has read all but the last token."""
    model.prefill([text[:-1]], cache=drafter.cache, slots=[request.slot])
    drafter.begin(request.slot, text[:-1])
    drafter.observe(request.slot, (), text[-1:])
    return drafter.propose([request])[0]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, logit_bias={7: 3.0}),
        SamplingParams(logit_bias={7: 30.0}),
    ],
)
@pytest.mark.parametrize("vocabulary", [None, [*range(0, 61, 2), 7]])
def test_a_draft_ends_with_the_token_that_the_model_was_not_sure_of(model, sampling, vocabulary):
    """By the model's own probability, whatever is done to its logits."""
    view = model.skipping(SOME, None if vocabulary is None else sorted(vocabulary))
    tokens = range(61) if vocabulary is None else sorted(vocabulary)
    ends = set()
    for seed in range(12):
        drafter = LayerSkipDrafter(view, model.new_cache(1), exit=StaticThreshold(0.1))
        text = [5 + seed, 6, 7]
        request = DraftRequest(0, 8, 8, sampling, seed, 3)
        drafted = list(proposed(model, drafter, text, request).tree.tokens)
        slots, steps, confidences = torch.zeros(1, dtype=torch.int32), Steps(), []
        for last, token in zip([7, *drafted], drafted, strict=False):
            logits, round = view.forward(
                torch.tensor([[last]]), cache=drafter.cache, slots=slots, prefix=steps if len(steps) else None
            )
            steps.extend(round)
            confidences.append(float(logits[0, -1].softmax(0)[list(tokens).index(token)]))
        assert min(confidences[:-1], default=1.0) >= 0.1
        assert len(drafted) == 8 or confidences[-1] < 0.1 or drafted[-1] in model.eos_token_ids
        ends.add(len(drafted))
    forced = sampling.greedy and sampling.edited  # on a token that the model itself does not want
    assert 1 in ends if forced else len(ends) > 1


def test_thresholds_are_each_sequences_own(model):
    told: dict[int, list[tuple[int, int]]] = {}

    class Noting(LayerSkipDrafter):
        def observe(self, slot, path, tokens, features=None):  # type: ignore[no-untyped-def]
            if slot in self._drafted:
                told.setdefault(slot, []).append((self._drafted[slot][0], len(path)))
            super().observe(slot, path, tokens, features)

        def end(self, slot):  # type: ignore[no-untyped-def]
            at_end[slot] = self.threshold(slot)
            super().end(slot)

    at_end: dict[int, float] = {}
    drafter = Noting(model.skipping(SOME), model.new_cache(4), exit=ADAPTIVE)
    loop = Loop(
        model,
        drafter,
        slots=4,
        budget=DraftBudget(5, adaptive=False, whole=True),
        cache=drafter.cache,
    )
    results = loop.run([replace(r, ignore_eos=True) for r in requests()[:4]])
    assert len(set(at_end.values())) == 4
    for slot in range(4):
        alone, remaining = ADAPTIVE.begin(), results[slot].drafted
        left = len(results[slot].tokens) - 1
        for drafted, accepted in told[slot]:
            alone.observe(drafted, accepted, min(5, left - 1))
            left -= accepted + 1
            remaining -= drafted
        assert at_end[slot] == alone.value
        assert remaining == 0  # all that was drafted was verified


def test_a_chain_widens_where_it_ends(model, plain):
    """The siblings of the token that ended it, as many as fit, and none before."""
    view = model.skipping(SOME)
    drafter = LayerSkipDrafter(view, model.new_cache(1), exit=StaticThreshold(0.5), widen=3)
    tree = proposed(model, drafter, [5, 6, 7], DraftRequest(0, 9, 9)).tree
    last = max(tree.depths)
    assert [tree.depths.count(depth) for depth in range(last + 1)] == [1] * last + [3]
    few = LayerSkipDrafter(view, model.new_cache(1), exit=StaticThreshold(1.0), widen=5)
    assert len(proposed(model, few, [5, 6, 7], DraftRequest(0, 4, 4)).tree) == 4
    loop = self_speculative(model, SOME, exit=ADAPTIVE, widen=3, slots=8, max_draft=6, adaptive=False)
    assert [r.tokens for r in loop.run(requests())] == plain
    assert list(drafter.levels(6)) == [3, 4, 5, 6, 6, 6]


def test_drafting_stops_where_it_does_not_pay(model):
    """At a price that no draft can be worth, all rounds are plain but the first and rare tries."""
    for rule in EXITS.values():
        drafter = LayerSkipDrafter(model.skipping(SOME), model.new_cache(1), exit=rule)
        request = DraftRequest(0, 4, 4, prices=Prices(0.1, 1e6))
        proposals = [proposed(model, drafter, [5, 6, 7], request)]
        for _ in range(63):
            drafter.observe(0, (), [7])
            proposals += drafter.propose([request])
        drafting = [i for i, p in enumerate(proposals) if len(p.tree)]
        assert drafting[:4] == [0, 1, 2, 3]  # the first ones, which tell what it costs
        assert 4 < len(drafting) < 8


def test_what_is_pending_is_committed_where_a_view_reads_and_waits_where_it_skips(model):
    cache, slots = model.new_cache(1), torch.zeros(1, dtype=torch.int32)
    model.prefill([[5, 6, 7]], cache=cache, slots=[0])
    old = memory(cache)
    _, round = model.forward(torch.tensor([[8, 9]]), cache=cache, slots=slots)
    other = deepcopy(cache)
    other.commit(round, None, torch.tensor([2], dtype=torch.int32))
    new = memory(other)
    cache.defer(round, None, torch.tensor([2], dtype=torch.int32))
    view = model.skipping(SOME)  # without the mixer of layer 1
    logits, _ = view.forward(torch.tensor([[3]]), cache=cache, slots=slots)
    for layer in cache.state:  # keys and values are written at once
        want = old if layer == 1 else new
        assert torch.equal(cache.state[layer][0], want[2 * layer])
        assert torch.equal(cache.conv[layer][0], want[2 * layer + 1])
    assert torch.equal(logits, view.forward(torch.tensor([[3]]), cache=other, slots=slots)[0])
    after = [
        m.forward(torch.tensor([[3]]), cache=c, slots=slots)[0] for m, c in ((model, cache), (model, other))
    ]
    assert torch.equal(*after)
    assert all(torch.equal(a, b) for a, b in zip(memory(cache), new, strict=True))


def test_what_a_view_computes(model):
    """All mixers and MLPs left out: embedding, final norm and head are left."""
    everything = model.skipping(SkipSet.of(range(4), range(4)))
    cache, slots = model.new_cache(1), torch.zeros(1, dtype=torch.int32)
    logits, round = everything.forward(torch.tensor([[8, 9]]), cache=cache, slots=slots)
    assert round.layers == (None,) * 4
    want = model.readout(model.embeddings[torch.tensor([[8, 9]])])
    assert torch.equal(logits, want)
    sizes = model.config.vocab_size * model.config.hidden_size + model.config.hidden_size
    assert everything.num_parameters == sizes
    prompt_logits = everything.prefill([[5, 6]], cache=model.new_cache(1), slots=[0])
    assert torch.equal(prompt_logits, model.prefill([[5, 6]], cache=model.new_cache(1), slots=[0]))


def test_mistakes_are_refused(model):
    with pytest.raises(ValueError, match="mlps: got layer 4, want 0 to 3"):
        model.skipping(SkipSet.of([], [4]))
    with pytest.raises(ValueError, match="vocabulary: got 61"):
        model.skipping(SOME, [5, 61])
    with pytest.raises(ValueError, match="vocabulary: this view has one"):
        model.skipping(SOME, [5]).skipping(SOME, [5])
    view = model.skipping(SOME)
    with pytest.raises(ValueError, match="widen: got 2"):
        LayerSkipDrafter(view, model.new_cache(1), widen=2)
    with pytest.raises(ValueError, match="widen: got 2"):
        LayerSkipDrafter(view, model.new_cache(1), exit=ADAPTIVE, branching=(2, 1), widen=2)
    with pytest.raises(ValueError, match="widen: got 0"):
        LayerSkipDrafter(view, model.new_cache(1), exit=ADAPTIVE, widen=0)
    drafter = LayerSkipDrafter(view, model.new_cache(1))
    for cache in (None, model.new_cache(1)):
        with pytest.raises(ValueError, match="cache: got another one than the drafter reads"):
            Loop(model, drafter, cache=cache)
    with pytest.raises(ValueError, match="cache: got one of 2 slots, want 3"):
        Loop(model, slots=3, cache=model.new_cache(2))
