"""Trees that a model drafts: their shape, what they were drawn from, and the numbers that they take."""

from __future__ import annotations

import pytest
import torch
from tests.loop.models import random_model

from specdec.acceptance import SamplingParams, Stream, TokenHistory, categorical, process_logits, uniform
from specdec.acceptance.rng import DRAFT_CHILD_BITS
from specdec.drafters import DraftRequest, Proposal, ProposalKind
from specdec.drafters.draws import Parent, draw_children
from specdec.drafters.model import ModelDrafter
from specdec.drafters.shape import TreeShape
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

SAMPLED = SamplingParams(temperature=0.9)


def test_a_shape_is_checked() -> None:
    for branching in ((), "21", (0,), (2, 1.0), 3):
        with pytest.raises(ValueError, match="branching: got"):
            TreeShape(branching)  # type: ignore[arg-type]
    assert TreeShape.parse(" 2,2, 1").branching == (2, 2, 1)


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model(4)


def begun(model: GatedDeltaNetForCausalLM, prompts: list[list[int]], **options: object) -> ModelDrafter:
    drafter = ModelDrafter(model, slots=len(prompts), **options)  # type: ignore[arg-type]
    for slot, prompt in enumerate(prompts):
        drafter.begin(slot, prompt[:-1])
        drafter.observe(slot, (), prompt[-1:])
    return drafter


PROMPTS = [[5, 6, 7], [8, 9, 1, 2, 3], [4, 4], [11, 12, 13]]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("branching", [(1,), (3,), (2, 1), (2, 3, 1)])
def test_a_ragged_batch_drafts_the_trees_of_single_sequences(model, branching, replacement):
    """Same tokens, rows and bits; within every limit; siblings name one row, which is the model's own."""
    limits = [(9, 4), (5, 2), (0, 3), (14, 3)]
    requests = [
        DraftRequest(slot, nodes, depth, SAMPLED, seed=slot, position=len(PROMPTS[slot]))
        for slot, (nodes, depth) in enumerate(limits)
    ]
    together = begun(model, PROMPTS, branching=branching, replacement=replacement).propose(requests)
    for prompt, request, proposal in zip(PROMPTS, requests, together, strict=True):
        single = begun(model, [prompt], branching=branching, replacement=replacement)
        alone = single.propose(
            [DraftRequest(0, request.max_nodes, request.max_depth, SAMPLED, request.seed, request.position)]
        )[0]
        assert alone.tree == proposal.tree
        sizes = TreeShape(branching).levels(request.max_nodes)[: request.max_depth]
        ended = any(t in model.eos_token_ids for t in proposal.tree.tokens)
        assert ended or len(proposal.tree) == (sizes[-1] if sizes else 0)
        if not len(proposal.tree):
            continue
        assert proposal.kind is (ProposalKind.IID if replacement else ProposalKind.WITHOUT_REPLACEMENT)
        for node, parent in enumerate(proposal.tree.parents):
            first = proposal.tree.children(parent)[0]
            assert proposal.rows[node] == proposal.rows[first]
            row = proposal.draft_probs[proposal.rows[node]]
            assert torch.equal(row, alone.draft_probs[alone.rows[node]])
            assert row[proposal.tree.tokens[node]] > 0
            path = [] if parent < 0 else [proposal.tree.tokens[i] for i in proposal.tree.path_to(parent)]
            logits = model.prefill([[*prompt, *path]], cache=model.new_cache(1), slots=[0])[0]
            # The prefill rounds otherwise: logits of up to 10 differ by 10 x 2^-24 times the root of some
            # 1000 products (64 wide, two layers of eight sums), 2e-5; a probability by twice that.
            torch.testing.assert_close(row, process_logits(logits, SAMPLED), rtol=4e-5, atol=0)


class Scripted(ModelDrafter):
    """A model whose logits follow from the slot: even ones know four tokens, all as likely, odd ones a single
    token, or where `ends` says so one token and the end of the text.
    """

    def __init__(self, *given: object, ends: bool = False, **options: object) -> None:
        super().__init__(*given, **options)  # type: ignore[arg-type]
        self.end = ends

    def rows(self, slots: list[int]) -> torch.Tensor:
        logits = torch.full((len(slots), 61), -torch.inf)
        for row, slot in zip(logits, slots, strict=True):
            if slot % 2 == 0:
                row[1:5] = 0.0
            elif self.end:
                row[1], row[0] = 0.0, -0.1  # 0 ends the text
            else:
                row[7] = 0.0
        return logits

    def run_emitted(self, emitted):  # type: ignore[no-untyped-def]
        return self.rows(emitted.slots.tolist()), super().run_emitted(emitted)[1]

    def run_drafted(self, nodes):  # type: ignore[no-untyped-def]
        slots = [s for s, size in zip(nodes.slots.tolist(), nodes.sizes, strict=True) for _ in range(size)]
        super().run_drafted(nodes)
        return self.rows(slots)


@pytest.mark.parametrize("nodes", [1, 2, 16, 63])
@pytest.mark.parametrize("sampled", ["none", "all", "some"])
@pytest.mark.parametrize("shape", [TreeShape.pruned(4, 20.0), TreeShape((4, 4, 1)), TreeShape((2, 1))])
def test_rows_of_unequal_levels_fit_one_round(model, shape, sampled, nodes):
    """Levels are padded to the widest row: rows that are wide in other levels, with as many unread tokens as
    a round may begin with. Drawn ones are the same alone.
    """
    slots = 6
    drawn = [sampled == "all" or (sampled == "some" and slot > 2) for slot in range(slots)]

    def proposals(some: list[int]) -> list[Proposal]:
        drafter = Scripted(model, slots=slots, branching=shape, ends=shape.tau is None)
        requests = []
        for slot in some:
            drafter.begin(slot, [5, 6])
            drafter.observe(slot, (), [1 + i for i in range(32)])
            depth = nodes if slot != 4 else min(nodes, 9)
            sampling = SAMPLED if drawn[slot] else SamplingParams()
            requests.append(DraftRequest(slot, nodes, depth, sampling, slot, 34))
        return drafter.propose(requests)

    together = proposals(list(range(slots)))
    assert all(0 < len(p.tree) <= nodes for p in together)
    for slot, proposal in enumerate(together):
        if drawn[slot] or shape.tau is None:
            assert proposal.tree == proposals([slot])[0].tree
    if shape.tau is not None and nodes == 16:
        assert len(together[0].tree) == 16  # what fits is enough for the usual size


def test_greedy_requests_get_the_likeliest_tokens(model):
    requests = [
        DraftRequest(0, 7, 2, position=3),
        DraftRequest(1, 7, 2, SamplingParams(banned_tokens=range(0, 60)), position=5),
    ]
    wide, narrow = begun(model, PROMPTS[:2], branching=(2, 2)).propose(requests)
    logits = model.prefill([PROMPTS[0]], cache=model.new_cache(1), slots=[0])[0]
    assert wide.kind is ProposalKind.DETERMINISTIC
    roots = wide.tree.children(-1)
    assert [wide.tree.tokens[root] for root in roots] == logits.topk(2).indices.tolist()
    assert [len(wide.tree.children(root)) for root in roots] == [2, 2]
    assert len(wide.tree) == 6
    assert narrow.tree.tokens == (60, 60)  # one token is allowed: no second child anywhere


def test_draws_take_the_numbers_of_the_rounds_position_and_of_the_node() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 61, generator=generator)
    probs = process_logits(logits, SAMPLED)
    request = DraftRequest(0, 9, 9, SAMPLED, seed=2**64 - 5, position=17)
    parents = [Parent(request, node, (), 3) for node in range(40)]
    found = draw_children(logits.clone(), parents, replacement=True)
    assert found.rows == list(range(40))
    for node, tokens in enumerate(found.tokens):
        numbers = [
            uniform(2**64 - 5, 17, Stream.DRAFT, (node << DRAFT_CHILD_BITS) + child) for child in range(3)
        ]
        assert tokens == [categorical(probs[node].numpy(), u) for u in numbers]
    racing = draw_children(logits.clone(), parents, replacement=False)
    assert all(len(set(tokens)) == 3 for tokens in racing.tokens)
    assert racing.tokens != found.tokens
    # An only child is drawn independently either way.
    only = [Parent(request, node, (), 1) for node in range(40)]
    assert draw_children(logits.clone(), only, replacement=False).tokens == [t[:1] for t in found.tokens]


def test_rows_are_processed_with_the_nodes_own_path() -> None:
    params = SamplingParams(temperature=1.0, top_k=2, frequency_penalty=2.0, repetition_penalty=3.0)
    history = TokenHistory(5, [0], [1])
    request = DraftRequest(0, 9, 9, params, history=history)
    logits = torch.tensor([[1.0, 1.2, 0.9, 0.8, -3.0]]).repeat(3, 1)
    parents = [Parent(request, node, path, 3) for node, path in enumerate([(), (2,), (2, 3)])]
    children = draw_children(logits.clone(), parents, replacement=False)
    for row, parent in enumerate(parents):
        want = process_logits(logits[row], params, history.with_path(parent.path))
        torch.testing.assert_close(children.probs[row], want)
        # Two tokens have a chance: the third child is not there.
        assert set(children.tokens[row]) == set(want.nonzero()[:, 0].tolist())


def test_the_likeliest_children_of_each_row() -> None:
    """As many as wanted and there are; with their probabilities; of equals the smaller token first."""
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0], [0.0, 0.1, 0.2, 0.3], [0.0, -torch.inf, 1.0, -torch.inf]])
    logits = torch.cat([logits, torch.full((1, 4), -torch.inf)])
    request = DraftRequest(0, 9, 9, SamplingParams(temperature=0.5))
    parents = [Parent(request, node, (), count) for node, count in enumerate((3, 0, 4, 2))]
    found = draw_children(logits.clone(), parents, draw=False)
    assert found.tokens == [[1, 2, 0], [], [2, 0], []]
    assert (found.probs, found.rows) == (None, [-1] * 4)
    for row, (tokens, said) in enumerate(zip(found.tokens, found.probabilities, strict=True)):
        want = (2.0 * logits[row].double()).softmax(0)[tokens]
        torch.testing.assert_close(torch.tensor(said, dtype=torch.float64), want, rtol=1e-6, atol=0)
