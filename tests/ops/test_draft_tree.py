"""draft_tree: what levels one by one with the operators that it stands for give, bit for bit, and what it
hands back of the nodes that it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ops.cases import bits, int32
from ops.drafting import VOCAB, Made, composed, drafting_of, random_drafting
from ops.stacks import MIXER, MLP, WHOLE
from specdec import ops
from specdec.acceptance import SamplingParams
from specdec.drafters import DraftRequest
from specdec.drafters.draws import draw_children
from specdec.drafters.shape import TreeShape
from specdec.drafters.tree import GrowingTree, as_said, drawing_of
from specdec.ops import DraftSampling, GrownTrees, StackPrefix, TreeRequest, TreeRules
from specdec.ops.drafting import _NOT_DRAWN, _operands

NP, COLUMNS = 3, VOCAB - 3  # nodes of the prefix; V'
ENDS = (3, 11, 12)
CHAIN, TREE, PRUNED = TreeShape(), TreeShape((3, 2, 1)), TreeShape.pruned(3, 3.0)
STACKS = [(WHOLE,), (WHOLE, MLP, MIXER), (MLP,)]


# Chains without prices, ends or a vocabulary.
CHAIN_RULES = TreeRules(
    branching=(1,),
    tau=None,
    ratios=torch.ones(1, 3, 1, dtype=torch.float64),
    edges=torch.empty(0, dtype=torch.float64),
    most_chance=1.0,
    child_chance=1.0,
    level_price=0.0,
    most_run=0,
    most_nodes=64,
    ends=torch.empty(0, dtype=torch.int64),
)


class Draft(NamedTuple):
    """Arguments of a call.

    Attributes:
        made: what drafts and where.
        logits: [B, V'].
        requests: a row's each.
        shape: of all trees.
        drawn: whether tokens are drawn.
        thresholds: a row's each.
        vocabulary: tokens of the columns.
    """

    made: Made
    logits: Tensor
    requests: list[DraftRequest]
    shape: TreeShape = CHAIN
    drawn: bool = False
    thresholds: tuple[float, ...] = (0.0, 0.0, 0.0)
    vocabulary: Tensor | None = None

    def trees(self) -> list[GrowingTree]:
        return [GrowingTree(r, self.shape, frozenset(ENDS), self.drawn) for r in self.requests]


def random_draft(seed: int, parts: Sequence[str] = (WHOLE, MLP, MIXER), **options: Any) -> Draft:
    """Three rows of different limits; `options` of `random_drafting` and of `Draft`."""
    fields = {name: options.pop(name) for name in list(options) if name in Draft._fields}
    sampling = options.pop("sampling", [SamplingParams()] * 3)
    limits = options.pop("limits", [(24, 6), (6, 3), (4, 9)])
    settings = {"own": seed % 2 == 0, "adapter": seed % 3 != 0, "DK": 32, "DV": 32, "HK": 1, "HV": 2}
    made = random_drafting(
        seed, parts, **{"B": 3, "N": 1, "NP": NP, "ragged": False, "tree": True, **settings, **options}
    )
    rng = torch.Generator().manual_seed(seed)
    call = made[0]
    # Sharper than random weights have them, and small enough that no row is one token alone.
    call["norm"] *= 3.0
    logits = 2.0 * torch.randn(3, COLUMNS, generator=rng)
    requests = [
        DraftRequest(row, nodes, depth, chosen, seed=100 * seed + row, position=40 + row)
        for row, ((nodes, depth), chosen) in enumerate(zip(limits, sampling, strict=True))
    ]
    return Draft(made, logits, requests, **fields)


ROOTS = (2, 0, 1)  # columns of the rows' last emitted tokens


def at_once(draft: Draft) -> tuple[list[GrowingTree], GrownTrees]:
    """The trees of one call, and all that it gave back."""
    trees = draft.trees()
    asked = [
        tree.at_once(root)._replace(threshold=threshold)
        for tree, root, threshold in zip(trees, ROOTS, draft.thresholds, strict=True)
    ]
    rules = CHAIN_RULES._replace(
        branching=draft.shape.branching,
        tau=draft.shape.tau,
        ratios=torch.ones(2, 3, 1, dtype=torch.float64),
        most_run=48,
        ends=torch.tensor(ENDS),
        vocabulary=draft.vocabulary,
    )
    found = ops.draft_tree(
        draft.logits, asked, rules, **drafting_of(draft.made[0]), sampling=drawing_of(trees)
    )
    for tree, grown in zip(trees, found.trees, strict=True):
        tree.take(grown)
    return trees, found


class Levels(NamedTuple):
    """What `level_by_level` gives back: as `GrownTrees` has it."""

    trees: list[GrowingTree]
    columns: list[dict[int, int]]
    levels: int
    probs: Tensor | None
    call: dict[str, Any]


def level_by_level(draft: Draft) -> Levels:
    """The operators that draft_tree stands for, and the choices of `specdec.drafters.tree`."""
    call, *rest = draft.made
    call, trees, logits = dict(call), draft.trees(), draft.logits
    columns = [{0: root} for root in ROOTS]
    known = None if draft.vocabulary is None else draft.vocabulary.numpy()
    probs: list[Tensor] = []
    while any(wanted := [tree.expandable() for tree in trees]):
        if trees[0].depth > 0:
            logits = run(call, rest, trees, wanted, columns)
        asked = [tree.asked(nodes) for tree, nodes in zip(trees, wanted, strict=True)]
        flat = [parent for of_row in asked for parent in of_row]
        raw = logits.softmax(-1)
        children = draw_children(logits.clone(), flat, draw=draft.drawn, vocabulary=known, vocab_size=VOCAB)
        found = zip(children.tokens, children.probabilities, children.rows, raw, strict=True)
        count = sum(map(len, probs))
        for tree, of_row, threshold in zip(trees, asked, draft.thresholds, strict=True):
            tree.next_level()
            for parent in of_row:
                first = len(tree.tokens)
                tokens, chances, row, said = next(found)
                tree.grow(parent.node, tokens, chances, as_said, row if row < 0 else row + count)
                at = tokens if known is None else np.searchsorted(known, tokens).tolist()
                tree.close(first + i for i, column in enumerate(at) if float(said[column]) < threshold)
        if children.probs is not None:
            probs.append(children.probs)
    return Levels(trees, columns, trees[0].depth, torch.cat(probs) if probs else None, call)


def run(
    call: dict[str, Any],
    rest: list[Any],
    trees: list[GrowingTree],
    wanted: list[list[int]],
    columns: list[dict[int, int]],
) -> Tensor:
    """Runs a level's nodes; the call goes on below them. Logits of these, [R, V']."""
    width, first = max(map(len, wanted)), call["outputs"].shape[1]
    tokens, parents = torch.zeros(3, width, dtype=torch.int64), torch.full((3, width), -1)
    for row, (tree, nodes) in enumerate(zip(trees, wanted, strict=True)):
        tree.run += len(nodes)
        for i, node in enumerate(nodes):
            tokens[row, i], parents[row, i] = tree.tokens[node], columns[row][tree.parents[node]]
            columns[row][node] = first + i
    call.update(tokens=tokens, parents=parents.int(), lengths=int32([len(nodes) for nodes in wanted]))
    step = composed((call, *rest))
    above = torch.cat([call["prefix"].parents, call["parents"]], dim=1)
    call.update(outputs=step.outputs, prefix=StackPrefix(step.entries, above))
    return step.logits


def expect_levels(draft: Draft) -> Levels:
    (trees, got), want = at_once(draft), level_by_level(draft)
    for tree, grown, other, columns in zip(trees, got.trees, want.trees, want.columns, strict=True):
        assert tree.tokens == other.tokens
        assert tree.parents == other.parents
        assert tree.chances == other.chances
        assert tree.said == other.said
        assert tree._rows == other._rows
        assert grown.columns == [columns.get(node, -1) for node in range(1, len(tree.tokens))]
    assert got.levels == want.levels
    assert (got.probs is None) == (not draft.drawn)
    if got.probs is not None and want.probs is not None:
        known = want.probs.shape[1]  # without a vocabulary the last tokens have no column
        assert torch.equal(bits(got.probs[:, :known].contiguous()), bits(want.probs))
        assert not got.probs[:, known:].any()
    assert torch.equal(bits(got.outputs), bits(want.call["outputs"]))
    entries, parents = want.call["prefix"]
    assert got.parents is not None
    assert torch.equal(got.parents, parents)
    for one, other_entries in zip(got.entries, entries, strict=True):
        assert torch.equal(bits(one.mixed.contiguous()), bits(other_entries.mixed.contiguous()))
        for a, b in zip(one.factors, other_entries.factors, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(bits(a), bits(b))
    return want


def most_drafts(found: Levels) -> int:
    return max(tree.drafts for tree in found.trees)


@pytest.mark.parametrize("shape", [CHAIN, TREE, PRUNED], ids=str)
@pytest.mark.parametrize("parts", STACKS, ids=str)
def test_one_call_is_the_levels_one_by_one(parts: tuple[str, ...], shape: TreeShape) -> None:
    deepest = 0
    for seed in range(6):
        draft = random_draft(
            seed,
            parts,
            shape=shape,
            dtype=torch.bfloat16 if seed % 2 else torch.float32,
            stored=(torch.float32, torch.int8)[: 1 + seed % 2],
        )
        found = expect_levels(draft)
        deepest = max(deepest, found.levels)
    assert deepest > 3


def test_likeliest_drafts_of_sampled_requests() -> None:
    sampling = [SamplingParams(temperature=t) for t in (0.5, 1.0, 1.7)]
    for seed in range(3):
        expect_levels(random_draft(seed, shape=PRUNED, sampling=sampling))


def test_a_vocabulary_is_mapped() -> None:
    columns = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:COLUMNS].sort().values
    for shape, drawn in ((TREE, False), (CHAIN, True)):
        draft = random_draft(4, shape=shape, vocabulary=columns, drawn=drawn, sampling=[SAMPLED] * 3)
        found = expect_levels(draft)
        assert max(token for tree in found.trees for token in tree.tokens) >= COLUMNS
        if drawn:
            assert found.probs is not None
            assert found.probs.shape[1] == VOCAB


# --- thresholds ---


@pytest.mark.parametrize("shape", [CHAIN, TREE, PRUNED], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_is_drafted_below_what_is_not_sure(shape: TreeShape, temperature: float) -> None:
    """Rows with thresholds of their own, and the last without one."""
    sampling, fewer = [SamplingParams(temperature=temperature)] * 3, 0
    for seed in range(6):
        options: dict[str, Any] = {"shape": shape, "sampling": sampling}
        with_them = expect_levels(random_draft(seed, thresholds=(0.4, 0.25, 0.0), **options))
        without = expect_levels(random_draft(seed, **options))
        assert with_them.trees[2].tokens == without.trees[2].tokens
        for tree, other in zip(with_them.trees, without.trees, strict=True):
            fewer += tree.tokens != other.tokens
        for tree, threshold in zip(with_them.trees, (0.4, 0.25), strict=False):
            above = {tree.parents[node] for node in range(1, len(tree.tokens))} - {0}
            if temperature == 0.0:  # then what is said is what the drafter itself gives
                assert all(tree.said[node][0] >= threshold for node in above)
    assert fewer > 3


# --- drawn chains ---

SAMPLED = SamplingParams(temperature=0.9)
KINDS = {
    "temperature": [SamplingParams(temperature=t) for t in (0.6, 1.0, 1.5)],
    "top_k": [SamplingParams(temperature=0.9, top_k=k) for k in (1, 5, 0)],
    "top_p": [SamplingParams(temperature=1.1, top_p=p) for p in (0.5, 0.9, 1.0)],
    "min_p": [SamplingParams(temperature=1.2, min_p=p) for p in (0.3, 0.05, 0.0)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thresholds", [(0.0, 0.0, 0.0), (0.2, 0.0, 0.05)], ids=str)
def test_drawn_chains_are_those_of_levels(kind: str, thresholds: tuple[float, ...]) -> None:
    deepest = 0
    for seed in range(5):
        draft = random_draft(seed, drawn=True, sampling=KINDS[kind], thresholds=thresholds)
        deepest = max(deepest, most_drafts(expect_levels(draft)))
    assert deepest > 3


def test_draws_depend_on_seed_and_position() -> None:
    """Controls: what two ways of drafting have in common comes from what was asked."""
    draft = random_draft(3, drawn=True, sampling=[SAMPLED] * 3)
    tokens = [tree.tokens for tree in at_once(draft)[0]]
    assert tokens == [tree.tokens for tree in at_once(draft)[0]]
    for name in ("seed", "position"):
        others = [replace(request, **{name: 7}) for request in draft.requests]
        assert tokens != [tree.tokens for tree in at_once(draft._replace(requests=others))[0]]


def test_ends_end_drawn_chains() -> None:
    """Rows whose only likely token ends a text, or is none of those that do."""
    draft = random_draft(2, drawn=True, sampling=[SAMPLED] * 3)
    logits = torch.full((3, COLUMNS), -50.0)
    logits[0, 11] = logits[1, 12] = logits[2, 20] = 50.0
    found = expect_levels(draft._replace(logits=logits))
    first, second, third = (tree.tokens[1:] for tree in found.trees)
    assert (first, second) == ([11], [12])
    assert third[0] == 20
    assert len(third) > 1


def test_rows_that_are_no_distribution_have_no_drafts() -> None:
    for bad in (torch.nan, torch.inf):
        for drawn in (False, True):
            draft = random_draft(2, drawn=drawn, sampling=[SAMPLED] * 3, thresholds=(0.0, 0.1, 0.0))
            draft.logits[1, 4] = bad
            trees, _ = at_once(draft)
            assert [bool(tree.drafts) for tree in trees] == [True, False, True]


def test_without_a_vocabulary_rows_are_over_all_tokens() -> None:
    """The last tokens have no column."""
    _, found = at_once(random_draft(2, drawn=True, sampling=[SAMPLED] * 3))
    assert found.probs is not None
    assert found.probs.shape[1] == VOCAB
    assert not found.probs[:, COLUMNS:].any()
    assert (found.probs[:, :COLUMNS] > 0).any(-1).all()


# --- what it hands back ---


@pytest.mark.parametrize("shape", [CHAIN, TREE, PRUNED], ids=str)
def test_what_is_handed_back_is_one_verification(shape: TreeShape) -> None:
    """The nodes that were run, all at once below the prefix."""
    for seed in (1, 3, 5):  # tokens alone enter
        draft = random_draft(seed, shape=shape)
        call = draft.made[0]
        trees, found = at_once(draft)
        assert call["own"] is None
        assert found.parents is not None
        nodes = found.outputs.shape[1] - NP
        x = torch.zeros(3, nodes, call["table"].shape[1])
        ran = torch.zeros(3, nodes, dtype=torch.bool)
        for row, (tree, grown) in enumerate(zip(trees, found.trees, strict=True)):
            for node, column in enumerate(grown.columns, 1):
                if column >= 0:
                    x[row, column - NP], ran[row, column - NP] = call["table"][tree.tokens[node]], True
        assert ran.any(0).all()
        where = {name: call[name] for name in ("conv_states", "states", "slots", "scale", "prefix")}
        parents = torch.where(ran, found.parents[:, NP:], -1)
        made = ops.verify_stack(x, call["weights"], parents=parents, **where)
        assert torch.equal(found.outputs[:, :NP], call["outputs"])
        assert torch.equal(found.outputs[:, NP:][ran], made.hidden[-1][ran])
        for got, old, new in zip(found.entries, call["prefix"].entries, made.entries, strict=True):
            for a, b, c in zip(
                (*got.factors, got.mixed), (*old.factors, old.mixed), (*new.factors, new.mixed), strict=True
            ):
                assert a is not None
                assert b is not None
                assert c is not None
                assert torch.equal(a[:, :NP], b)
                assert torch.equal(a[:, NP:][ran], c[ran])


def test_chains_below_the_last_node_have_no_parents() -> None:
    """Every row goes on where the prefix, a chain, ended."""
    draft = random_draft(3, limits=[(5, 5)] * 3)
    call = draft.made[0]
    call["prefix"] = call["prefix"]._replace(parents=None)
    asked = [TreeRequest(5, 5, NP - 1)] * 3
    found = ops.draft_tree(draft.logits, asked, CHAIN_RULES, **drafting_of(call))
    assert found.parents is None
    assert [tree.columns for tree in found.trees] == [[3, 4, 5, 6, -1]] * 3
    call["prefix"] = call["prefix"]._replace(parents=int32([[-1, 0, 1]] * 3))
    named = ops.draft_tree(draft.logits, asked, CHAIN_RULES, **drafting_of(call))
    assert named.parents is None or named.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5]] * 3
    assert named.trees == found.trees
    assert torch.equal(named.outputs, found.outputs)


@pytest.mark.parametrize("limit", [(0, 3), (3, 0), (3, 1)], ids=str)
def test_what_was_not_run_is_the_prefix(limit: tuple[int, int]) -> None:
    """No level but the first, which reads what is there: given back as it came, and not the same memory."""
    draft = random_draft(2, limits=[limit] * 3)
    call = draft.made[0]
    trees, found = at_once(draft)
    assert all(tree.drafts == min(limit) for tree in trees)
    assert found.levels == min(limit)
    assert found.parents is not None
    assert torch.equal(found.parents, call["prefix"].parents)
    pairs = [(found.outputs, call["outputs"])]
    for got, old in zip(found.entries, call["prefix"].entries, strict=True):
        pairs += [(got.mixed, old.mixed), (got.factors.k, old.factors.k), (got.factors.u, old.factors.u)]
    for got_tensor, given in pairs:
        assert torch.equal(got_tensor, given)
        assert got_tensor.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_rows_do_not_see_each_other() -> None:
    """A row alone, whose levels are no wider than itself, has the same tree."""
    draft = random_draft(6, shape=TREE)
    together = at_once(draft)[1].trees
    for row in range(3):
        only = [r if i == row else DraftRequest(i, 0, 0) for i, r in enumerate(draft.requests)]
        alone = at_once(draft._replace(requests=only))[1].trees
        assert alone[row]._replace(columns=[]) == together[row]._replace(columns=[])
        assert all(not tree.tokens for i, tree in enumerate(alone) if i != row)


# --- as torch sees it, and errors ---


def operands(draft: Draft, sampling: DraftSampling | None) -> tuple[Any, ...]:
    """As the operator takes them: three levels of a chain."""
    ends = torch.tensor([], dtype=torch.int64)
    return (
        draft.logits, torch.tensor([[3, 3, 2, 0]] * 3), torch.full((3,), -1.0).double(),
        torch.full((3,), 0.01).double(), None, *(_NOT_DRAWN if sampling is None else sampling),
        torch.ones(1, 3, 1).double(), torch.empty(0).double(), 1.0, 1.0, 0.0, [1], None, 0, 64, ends, None,
        *_operands(**drafting_of(draft.made[0])), 0,
    )  # fmt: skip


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_opcheck(drawn: bool, depth: int) -> None:
    draft = random_draft(3, drawn=drawn, sampling=[SAMPLED] * 3)
    arguments = list(operands(draft, drawing_of(draft.trees())))
    arguments[1] = torch.tensor([[3, depth, 2, 0]] * 3)
    # How far trees grow is in the data: dynamic shapes cannot be traced ahead of time.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.specdec.draft_tree.default, tuple(arguments), test_utils=checks)


def sampling_with(**changes: Any) -> DraftSampling:
    drawn = random_draft(3, drawn=True, sampling=[SAMPLED] * 3)
    sampling = drawing_of(drawn.trees())
    assert sampling is not None
    return sampling._replace(**changes)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (sampling_with(temperature=torch.ones(2)), r"sampling\.temperature: got shape \[2\], want \[B\]"),
        (sampling_with(top_p=torch.ones(3).double()), r"sampling\.top_p: got dtype Double, want Float"),
        (sampling_with(top_k=torch.ones(3).long()), r"sampling\.top_k: got dtype Long, want Int"),
        (sampling_with(min_p=None), r"sampling: got temperatures without the rest, want all or none"),
        (sampling_with(seeds=torch.zeros(3).int()), r"sampling\.seeds: got dtype Int, want Long"),
        (sampling_with(positions=torch.zeros(2).long()), r"sampling\.positions: got shape \[2\]"),
    ],
)
def test_wrong_sampling(sampling: DraftSampling, message: str) -> None:
    draft = random_draft(3)
    call = {"rules": CHAIN_RULES, **drafting_of(draft.made[0])}
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.draft_tree(draft.logits, [TreeRequest(3, 3, 2)] * 3, sampling=sampling, **call)


@pytest.mark.parametrize("rules", [{"branching": (2, 1)}, {"tau": 1.0}], ids=str)
def test_siblings_are_not_drawn(rules: dict[str, Any]) -> None:
    draft = random_draft(3)
    with pytest.raises(ValueError, match=r"^sampling: got a shape with siblings, want a chain"):
        ops.draft_tree(
            draft.logits,
            [TreeRequest(3, 3, 2)] * 3,
            CHAIN_RULES._replace(most_run=9, **rules),
            sampling=sampling_with(),
            **drafting_of(draft.made[0]),
        )


def test_gradients_are_refused() -> None:
    draft = random_draft(3)
    draft.logits.requires_grad_()
    with pytest.raises(ValueError, match=r"^logits: got a tensor that requires grad"):
        at_once(draft)
    with torch.no_grad():
        assert at_once(draft)[1].levels > 1
