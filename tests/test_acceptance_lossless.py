"""Proofs by enumeration that what is emitted has the target's law, and controls that must fail them.

Float64 rows, the joint law of three tokens, every rule on every kind of proposal that it takes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lossless import biased
from lossless.enumeration import emitted_law, outcomes, round_law
from lossless.toys import PROMPT, Drafts, Round, Toy, drawn_round, fixed_round, nodes_of, proposal_round
from specdec.acceptance import ProposalKind, SamplingParams, Verdict
from specdec.acceptance.follow import walk_follow
from specdec.acceptance.k_seq import residual, smallest_rho, walk_k_seq
from specdec.acceptance.recursive import walk_recursive
from specdec.acceptance.round import walk
from specdec.acceptance.rules import AcceptRule
from specdec.acceptance.traversal import walk_traversal

EXACT = 1e-12
SOFT = SamplingParams(temperature=1.0)
PARAMS = {
    "plain": SOFT,
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.2, top_k=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=-0.4
    ),
    "masks": SamplingParams(temperature=1.0, logit_bias={0: 1.0, 2: -0.5}, banned_tokens=[1]),
    "all": SamplingParams(
        temperature=1.3, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=0.6, logit_bias={0: 0.7}
    ),
    "greedy": SamplingParams(repetition_penalty=1.5),
}
TREES = {
    "empty": [],
    "one": [-1],
    "chain": [-1, 0, 1],
    "star": [-1, -1, -1],
    "binary": [-1, -1, 0, 0, 1, 1],
    "ragged": [-1, 0, -1, 1, 2],
    "another order": [-1, -1, 1, 0, 1],
}
# Rules on drawn trees, and whether their siblings are independent.
DRAWN = {
    "recursive": (AcceptRule.RECURSIVE, True),
    "recursive without replacement": (AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT, False),
    "k-seq": (AcceptRule.K_SEQ, True),
    "traversal": (AcceptRule.TRAVERSAL, True),
    "traversal without replacement": (AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT, False),
}


def law(rounds: Round, toy: Toy, length: int = 3) -> np.ndarray:
    return emitted_law(rounds, PROMPT, toy.vocab, length, toy.context)


def error(rounds: Round, toy: Toy, length: int = 3) -> float:
    return float(np.abs(law(rounds, toy, length) - toy.law(length)).max())


def drawn(toy: Toy, rule: str, tree: str) -> Round:
    code, independent = DRAWN[rule]
    return drawn_round(toy, TREES[tree], independent, partial(walk, code))


def fixed_tokens(tree: str, seed: int, repeats: bool, vocab: int = 4) -> Any:
    """Tokens of a deterministic tree, some function of the root token; siblings may repeat tokens or not."""
    g, drafts = np.random.default_rng(seed), TREES[tree]
    table = []
    for _ in range(vocab):
        tokens = g.integers(vocab, size=len(drafts))
        for parent in set(drafts):
            below = [j for j, p in enumerate(drafts) if p == parent]
            if not repeats:
                tokens[below] = g.permutation(vocab)[: len(below)]
        table.append(tokens.tolist())
    return table.__getitem__


# --- every rule x tree x processing ---


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("name", PARAMS)
def test_law_of_drawn_trees(name: str, rule: str, tree: str) -> None:
    toy = Toy.random(20, PARAMS[name], vocab=3 if PARAMS[name].contextual else 4)
    assert error(drawn(toy, rule, tree), toy) <= EXACT


@pytest.mark.parametrize("repeats", [False, True], ids=["distinct", "repeats"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", PARAMS)
def test_law_of_deterministic_trees(name: str, tree: str, repeats: bool) -> None:
    toy = Toy.random(20, PARAMS[name])
    assert error(fixed_round(toy, TREES[tree], fixed_tokens(tree, 3, repeats), walk_follow), toy) <= EXACT


PROPOSALS = [
    (rule, kind, tree)
    for rule in ("auto", "speculative", "k-seq", "block", "traversal")
    for kind in ProposalKind
    for tree in ([], [-1, 0], [-1, -1], [-1, -1, 0])
    if kind is ProposalKind.DETERMINISTIC
    or tree in ([], [-1, 0])
    or (rule != "block" and (rule != "k-seq" or kind is ProposalKind.IID))
]


@pytest.mark.parametrize(("rule", "kind", "tree"), PROPOSALS)
@pytest.mark.parametrize("name", PARAMS)
def test_law_of_proposals(name: str, rule: str, kind: ProposalKind, tree: list[int]) -> None:
    """From logits and a `Proposal`, through the choice of the rule."""
    toy = Toy.random(21, PARAMS[name], vocab=3)
    tokens = (
        (lambda root: [root, (root + 1) % 3, 2][: len(tree)]) if kind is ProposalKind.DETERMINISTIC else None
    )
    assert error(proposal_round(toy, tree, kind, rule, tokens), toy) <= EXACT


# --- supports ---


def equal(toy: Toy) -> None:
    toy.draft = toy.target


def disjoint(toy: Toy) -> None:
    toy.target[:, 2:] = -torch.inf
    toy.draft[:, :2] = -torch.inf


def zeros(toy: Toy) -> None:
    toy.target[0, 1] = toy.target[1, [0, 3]] = toy.draft[0, 2] = toy.draft[1, [0, 1]] = -torch.inf


def narrow_target(toy: Toy) -> None:
    toy.target[torch.arange(4), torch.arange(4)] = -torch.inf
    toy.target[2, [0, 1]] = -torch.inf


def narrow_draft(toy: Toy) -> None:
    toy.draft[torch.arange(4), torch.arange(4)] = -torch.inf
    toy.draft[3, [0, 1]] = -torch.inf


def one_hot_draft(toy: Toy) -> None:
    toy.draft = torch.where(toy.draft == toy.draft.amax(-1, keepdim=True), 0.0, -torch.inf).double()


def one_hot_target(toy: Toy) -> None:
    toy.target = torch.where(toy.target == toy.target.amax(-1, keepdim=True), 0.0, -torch.inf).double()


SUPPORTS = [equal, disjoint, zeros, narrow_target, narrow_draft, one_hot_draft, one_hot_target]


@pytest.mark.parametrize("tree", ["chain", "star", "ragged", "another order"])
@pytest.mark.parametrize("rule", DRAWN)
@pytest.mark.parametrize("support", SUPPORTS)
def test_supports(support: Any, rule: str, tree: str) -> None:
    """Also siblings beyond the draft's support, which have probability zero, and repeated siblings."""
    toy = Toy.random(41, SOFT)
    support(toy)
    assert error(drawn(toy, rule, tree), toy) <= EXACT


@pytest.mark.parametrize("support", SUPPORTS)
def test_supports_of_deterministic_trees(support: Any) -> None:
    toy = Toy.random(41, SOFT)
    support(toy)
    tokens = fixed_tokens("ragged", 5, False)
    assert error(fixed_round(toy, TREES["ragged"], tokens, walk_follow), toy) <= EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_equal_models_accept_a_chain_and_disjoint_ones_nothing(rule: str) -> None:
    toy = Toy.random(40, PARAMS["all"])
    equal(toy)
    assert {len(text) for text in round_law(lambda d: drawn(toy, rule, "chain")(PROMPT, d))} == {4}
    toy = Toy.random(40, SOFT)
    disjoint(toy)
    for tree in ("chain", "binary"):
        assert {len(text) for text in round_law(lambda d, t=tree: drawn(toy, rule, t)(PROMPT, d))} == {1}


@pytest.mark.parametrize("code", set(AcceptRule) - {AcceptRule.FOLLOW})
def test_draft_rows_of_zeros_emit_from_the_target(code: AcceptRule) -> None:
    p, q = np.array([0.2, 0.3, 0.5]), np.zeros(3)
    texts = round_law(lambda d: [walk(code, lambda i: p, lambda i: q, [0, 2, 1], [-1, 0, 0], d).next_token])
    assert texts == pytest.approx({(0,): 0.2, (1,): 0.3, (2,): 0.5}, abs=EXACT)


# --- the rules and other statements of them ---


def same_rounds(one: Round, other: Round) -> None:
    ours, theirs = (round_law(lambda d, r=rounds: r(PROMPT, d)) for rounds in (one, other))
    assert max(len(text) for text in ours) > 1
    for text in ours.keys() | theirs.keys():
        assert ours.get(text, 0.0) == pytest.approx(theirs.get(text, 0.0), abs=EXACT)


def test_following_has_the_law_of_testing_siblings_one_by_one() -> None:
    toy = Toy.random(30, SOFT)
    tokens = fixed_tokens("ragged", 4, False)

    def textbook(p_target: Any, nodes: Any, above: Any, decide: Any) -> Verdict:
        path, p = [0], p_target(0).copy()
        for j in range(1, len(nodes)):
            if above[j] != path[-1]:
                continue
            if p[nodes[j]] > 0 and decide.accept(0, p[nodes[j]], p.sum()):
                path.append(j)
                p = p_target(j).copy()
            else:
                p[nodes[j]] = 0.0
        return Verdict(path, decide.sample(0, p))

    rules = (walk_follow, textbook)
    same_rounds(*(fixed_round(toy, TREES["ragged"], tokens, rule) for rule in rules))


def test_traversal_of_a_chain_is_block_verification() -> None:
    """The rule as arXiv 2403.10444 states it: every prefix is tested, the longest that passes is kept."""

    def block(p_target: Any, p_draft: Any, tokens: Any, parents: Any, decide: Any) -> Verdict:
        n, joint = len(tokens) - 1, [1.0]
        for i in range(1, n + 1):
            x = tokens[i]
            joint.append(min(1.0, joint[-1] * p_target(i - 1)[x] / p_draft(i)[x]))
        tau = 0
        for i in range(1, n + 1):
            chance = joint[i]
            if i < n:
                left = np.maximum(joint[i] * p_target(i) - p_draft(i + 1), 0.0).sum()
                chance = left / (left + 1.0 - joint[i]) if left > 0.0 else 0.0
            if decide.keep(i, chance):
                tau = i
        weights = p_target(tau)
        if tau < n:
            weights = np.maximum(joint[tau] * p_target(tau) - p_draft(tau + 1), 0.0)
        return Verdict(list(range(tau + 1)), decide.sample(tau, weights))

    for seed in range(3):
        toy = Toy.random(60 + seed, SOFT)
        same_rounds(*(drawn_round(toy, TREES["chain"], True, rule) for rule in (walk_traversal, block)))


def test_rules_of_siblings_agree_with_speculative_sampling_on_a_chain() -> None:
    toy = Toy.random(31, SOFT)
    rules = (walk_recursive, walk_k_seq, partial(walk_recursive, replacement=False))
    rounds = [drawn_round(toy, TREES["chain"], True, rule) for rule in rules]
    same_rounds(rounds[0], rounds[1])
    same_rounds(rounds[0], rounds[2])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_rho_is_exact_and_nearly_the_least(k: int) -> None:
    g = np.random.default_rng(k)
    for _ in range(50):
        p, q = (w / w.sum() for w in g.random((2, 6)) ** 4)
        rho = smallest_rho(p, q, k)
        assert 1.0 <= rho <= max(1, k)

        def smallest_left(r: float, p: Any = p, q: Any = q) -> float:
            beta = np.minimum(q, p / r).sum()
            return float((p - np.minimum(q, p / r) * (1 - (1 - beta) ** k) / beta).min())

        assert smallest_left(rho) >= -EXACT  # and then clipping at zero does nothing
        assert residual(p, q, rho, k).min() >= 0.0
        if rho - 2 * (k - 1) / 1024 > 1.0:
            assert smallest_left(rho - 2 * (k - 1) / 1024) < 0.0


# --- drafts whose shape depends on what was drawn ---


@pytest.mark.parametrize("rule", [walk_recursive, walk_traversal])
def test_keeping_the_unlikely_draft_is_exact(rule: Any) -> None:
    toy = Toy.random(50, SOFT)
    assert error(biased.cut_chain(toy, 3, biased.unlikely, rule, keep=True), toy) <= EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_growing_below_the_likelier_sibling_is_exact(rule: str) -> None:
    """Which node gets children, and how many, may depend on the tokens of all nodes drawn before them."""
    toy = Toy.random(51, SOFT)
    code, independent = DRAWN[rule]

    def rounds(text: tuple[int, ...], decide: Any) -> list[int]:
        parents = nodes_of([-1, -1])
        nodes = Drafts(toy, text, parents, decide, independent)
        q = toy.q(text)
        likelier = 1 if q[nodes[1]] >= q[nodes[2]] else 2
        for _ in range(likelier):
            nodes.grow(likelier)
        path, x = walk(code, nodes.p_target, nodes.p_draft, nodes, parents, decide)
        return [*nodes.text(path[-1])[len(text) :], x]

    assert error(rounds, toy) <= EXACT


@pytest.mark.parametrize("rule", [rule for rule in DRAWN if rule != "k-seq"])
def test_a_second_child_by_the_first_is_exact(rule: str) -> None:
    """How many children a node has may depend on the elder ones, but not under k-SEQ (see the controls)."""
    code, independent = DRAWN[rule]
    for toy in (Toy.random(1, SOFT, vocab=3), Toy.random(50, SOFT)):
        assert error(biased.second_by_the_first(toy, independent, partial(walk, code)), toy) <= EXACT


@pytest.mark.parametrize("rule", DRAWN)
def test_a_pruned_tree_is_exact(rule: str) -> None:
    """The growth of the drafters itself: how many children which node gets follows from the rows and from
    what was drawn in the levels above.
    """
    code, independent = DRAWN[rule]
    for toy in (Toy.random(51, SOFT, vocab=3), Toy.random(52, SOFT, vocab=3)):
        rounds = biased.pruned_tree(toy, independent, partial(walk, code))
        assert error(rounds, toy, length=2) <= EXACT


# --- controls ---


@pytest.mark.parametrize("name", biased.BIASED)
def test_enumeration_detects(name: str) -> None:
    toy = Toy.random(50, SOFT)
    got = law(biased.BIASED[name](toy), toy)
    assert got.sum() == pytest.approx(1.0, abs=EXACT)  # a law, but another one
    assert np.abs(got - toy.law(3)).max() > 0.01  # measured: 0.013 or more; rules that are exact have 1e-12


# --- accepted length ---


def expected_length(rounds: Round) -> float:
    """Drafts that the round after PROMPT accepts on average."""
    return sum(chance * (len(emitted) - 1) for chance, emitted in outcomes(lambda d: rounds(PROMPT, d)))


def test_expected_lengths_of_the_worked_example() -> None:
    toy = Toy.constant([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    for rule, want in [(walk_recursive, 10 / 9), (walk_traversal, 11 / 9)]:
        assert expected_length(drawn_round(toy, [-1, 0], True, rule)) == pytest.approx(want, abs=EXACT)


@pytest.mark.parametrize("tree", ["chain", "star", "binary", "ragged", "another order"])
@pytest.mark.parametrize("independent", [True, False])
def test_traversal_accepts_no_less_than_recursive_rejection(tree: str, independent: bool) -> None:
    gains = []
    for seed in range(10):
        toy = Toy.random(seed, SamplingParams(temperature=0.5 + 0.1 * seed), vocab=3)
        rounds = [
            drawn_round(toy, TREES[tree], independent, partial(rule, replacement=independent))
            for rule in (walk_recursive, walk_traversal)
        ]
        gains.append(expected_length(rounds[1]) - expected_length(rounds[0]))
    assert min(gains) >= -EXACT
    assert tree == "star" or max(gains) > 0.01  # on one level the two are one rule
