"""Proofs that what is emitted has the target's law: enumeration, chi-square, controls that must fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lossless.biased import argmax_draft, drops_unlikely_draft, resample_from_target, siblings_without_removal
from lossless.enumeration import emitted_law, outcomes
from lossless.statistics import ALPHA, chi_square, sampled_texts
from lossless.toys import VOCAB, Toy, chain_round, tree_round
from specdec.acceptance import SamplingParams, SeededDecisions, Stream, categorical, uniform
from specdec.acceptance.follow import walk_follow as walk_deterministic
from specdec.acceptance.recursive import walk_recursive

EXACT = 1e-12
PROMPT = (2, 0)
SOFT = SamplingParams(temperature=1.0)
PARAMS = {
    "plain": SOFT,
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.2, top_k=2),
    "top-p": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.2),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "all": SamplingParams(temperature=1.3, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=0.6),
    "greedy": SamplingParams(repetition_penalty=1.5),
}
TREES = {
    "empty": [],
    "one": [-1],
    "chain": [-1, 0, 1],
    "star": [-1, -1, -1],
    "binary": [-1, -1, 0, 0, 1, 1],
    "ragged": [-1, 0, -1, 1, 0, 2, 5],
    "forest in another order": [-1, -1, 1, 0, 2, 1],
}


def walk_chain(p_target: Any, p_draft: Any, drafts: Any, decide: Any) -> Any:
    return walk_recursive(p_target, lambda i: p_draft[i - 1], [-1, *drafts], range(-1, len(drafts)), decide)


def error(rounds: Any, toy: Toy, length: int = 3) -> float:
    return float(np.abs(emitted_law(rounds, PROMPT, VOCAB, length) - toy.law(PROMPT, length)).max())


def tree_tokens(parents: list[int], seed: int, repeats: bool) -> Any:
    """Tokens of a tree, some function of the last token; siblings may repeat tokens or not."""
    g = np.random.default_rng(seed)
    table = []
    for _ in range(VOCAB):
        tokens = g.integers(VOCAB, size=len(parents))
        for parent in set(parents):
            below = [j for j, p in enumerate(parents) if p == parent]
            if not repeats:
                tokens[below] = g.permutation(VOCAB)[: len(below)]
        table.append(tokens.tolist())
    return lambda history: table[history[-1]]


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", PARAMS)
def test_chain_law(name: str, length: int) -> None:
    toy = Toy.random(10 + length, PARAMS[name])
    assert error(chain_round(toy, length), toy) <= EXACT


@pytest.mark.parametrize("repeats", [False, True], ids=["distinct", "repeats"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", PARAMS)
def test_deterministic_tree_law(name: str, tree: str, repeats: bool) -> None:
    toy = Toy.random(20, PARAMS[name])
    parents = TREES[tree]
    assert error(tree_round(toy, parents, tree_tokens(parents, 3, repeats)), toy) <= EXACT


def test_the_tree_rule_has_the_law_of_testing_siblings_one_by_one() -> None:
    toy = Toy.random(30, SOFT)
    parents = TREES["ragged"]
    tokens = tree_tokens(parents, 4, False)

    def textbook(p_target: Any, nodes: Any, above: Any, decide: Any) -> Any:
        path, p = [0], p_target(0).copy()
        for j in range(1, len(nodes)):
            if above[j] != path[-1]:
                continue
            if p[nodes[j]] > 0 and decide.accept(0, p[nodes[j]], p.sum()):
                path.append(j)
                p = p_target(j).copy()
            else:
                p[nodes[j]] = 0.0
        return path, decide.sample(0, p)

    def one_round(rule: Any) -> dict[tuple[int, ...], float]:
        law: dict[tuple[int, ...], float] = {}
        for chance, emitted in outcomes(lambda d: rule((0,), d)):
            law[tuple(emitted)] = law.get(tuple(emitted), 0.0) + chance
        return law

    ours = one_round(tree_round(toy, parents, tokens))
    theirs = one_round(tree_round(toy, parents, tokens, walk=textbook))
    assert ours.keys() == theirs.keys()
    assert max(len(text) for text in ours) == 4  # deepest node and the token after it
    for text, chance in ours.items():
        assert chance == pytest.approx(theirs[text], abs=EXACT)


def test_equal_models_accept_everything() -> None:
    toy = Toy.random(40, PARAMS["all"])
    toy.draft = toy.target
    assert {len(emitted) for _, emitted in outcomes(lambda d: chain_round(toy, 3)(PROMPT, d))} == {4}
    assert error(chain_round(toy, 3), toy) <= EXACT


def test_disjoint_supports_reject_everything() -> None:
    toy = Toy.random(41, SOFT)
    toy.target[:, 2:] = -torch.inf
    toy.draft[:, :2] = -torch.inf
    assert {len(emitted) for _, emitted in outcomes(lambda d: chain_round(toy, 3)(PROMPT, d))} == {1}
    assert error(chain_round(toy, 3), toy) <= EXACT


def test_zeros_in_either_row() -> None:
    toy = Toy.random(42, SOFT)
    toy.target[0, 1] = toy.target[1, [0, 3]] = toy.draft[0, 2] = toy.draft[1, [0, 1]] = -torch.inf
    assert error(chain_round(toy, 3), toy) <= EXACT
    tokens = tree_tokens(TREES["ragged"], 5, False)
    assert error(tree_round(toy, TREES["ragged"], tokens), toy) <= EXACT


def test_one_hot_drafter_given_as_rows() -> None:
    toy = Toy.random(43, SOFT)
    toy.draft = torch.where(toy.draft == toy.draft.amax(-1, keepdim=True), 0.0, -torch.inf).double()
    assert error(chain_round(toy, 3), toy) <= EXACT


# The biased rules run on rows made beforehand, as the real ones do for the samples below.
RULES = {
    "chain": lambda toy: chain_round(toy, 3, walk=walk_chain),
    "tree": lambda toy: tree_round(
        toy, TREES["binary"], tree_tokens(TREES["binary"], 6, True), walk_deterministic
    ),
}
BIASED = {
    "naive residual": lambda toy: chain_round(toy, 3, walk=resample_from_target),
    "argmax draft, soft q": lambda toy: chain_round(toy, 3, pick=argmax_draft, walk=walk_chain),
    "drops the unlikely draft": lambda toy: drops_unlikely_draft(toy, 3, 0.25, walk=walk_chain),
    "siblings stay in p": lambda toy: tree_round(
        toy, TREES["star"], tree_tokens(TREES["star"], 3, False), siblings_without_removal
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_enumeration_passes_the_rules_on_rows(name: str) -> None:
    toy = Toy.random(50, SOFT)
    assert error(RULES[name](toy), toy) <= EXACT


@pytest.mark.parametrize("name", BIASED)
def test_enumeration_detects(name: str) -> None:
    toy = Toy.random(50, SOFT)
    law = emitted_law(BIASED[name](toy), PROMPT, VOCAB, 3)
    assert law.sum() == pytest.approx(1.0, abs=EXACT)  # a law, but another one
    assert np.abs(law - toy.law(PROMPT, 3)).max() > 0.005


def test_keeping_the_unlikely_draft_is_exact() -> None:
    toy = Toy.random(50, SOFT)

    def rounds(history: tuple[int, ...], decisions: Any) -> list[int]:
        stopped = []

        def pick(depth: int, q: np.ndarray, d: Any) -> int | None:
            if stopped:
                return None
            x = int(d.draft(depth, q))
            if q[x] < 0.25:
                stopped.append(depth)  # draft no further, but keep the token
            return x

        return chain_round(toy, 3, pick=pick)(history, decisions)

    assert error(rounds, toy) <= EXACT


@pytest.mark.parametrize("name", RULES)
def test_sampled_pairs_have_the_law(name: str) -> None:
    toy = Toy.random(50, SOFT)
    texts = sampled_texts(RULES[name](toy), PROMPT, 2, np.arange(100_000))
    assert chi_square(texts, toy.law(PROMPT, 2)) > ALPHA


@pytest.mark.parametrize("name", BIASED)
def test_samples_detect(name: str) -> None:
    toy = Toy.random(50, SOFT)
    texts = sampled_texts(BIASED[name](toy), PROMPT, 2, np.arange(30_000))
    assert chi_square(texts, toy.law(PROMPT, 2)) < 1e-9


def test_the_samples_are_those_of_the_seeded_sampler() -> None:
    toy = Toy.random(50, SOFT)
    seeds = np.arange(40)
    for name, rounds in [("chain", chain_round(toy, 3)), ("tree", RULES["tree"](toy))]:
        table = sampled_texts(RULES[name](toy), PROMPT, 12, seeds)
        for seed in seeds.tolist():
            text: list[int] = []
            while len(text) < 12:
                text += rounds((*PROMPT, *text), Seeded(seed, len(PROMPT) + len(text)))
            assert text[:12] == table[seed].tolist()


class Seeded(SeededDecisions):
    """The sampler's decisions and, with the same seed, a drafter's."""

    def __init__(self, seed: int, position: int) -> None:
        super().__init__(seed, position)
        self.seed, self.position = seed, position

    def draft(self, depth: int, weights: np.ndarray) -> int:
        return categorical(weights, uniform(self.seed, self.position + depth, Stream.DRAFT))
