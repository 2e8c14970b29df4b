"""Chi-square of texts from the seeded numbers, and controls that must fail it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from lossless import biased
from lossless.statistics import ALPHA, Numbers, chi_square, sampled_texts
from lossless.toys import PROMPT, Toy, drawn_round, fixed_round
from specdec.acceptance import SamplingParams, SeededDecisions
from specdec.acceptance.follow import walk_follow
from specdec.acceptance.k_seq import walk_k_seq
from specdec.acceptance.recursive import walk_recursive
from specdec.acceptance.traversal import walk_traversal

SOFT = SamplingParams(temperature=1.0)
CHAIN, TREE = [-1, 0, 1], [-1, -1, 0, 1]
PAIRS = 25_000  # the operators' tests have 100,000
PAIRS_OF_CONTROLS = 8_000  # enough: the largest of their p-values is 6e-30


def toy_of() -> Toy:
    return Toy.random(50, SOFT, scale=1.0)


def tokens(root: int) -> list[int]:
    """Deterministic drafts with repeated siblings."""
    return [(root + 1) % 4, (root + 1) % 4, 0, 2]


RULES = {
    "follow": lambda toy: fixed_round(toy, TREE, tokens, walk_follow),
    "speculative": lambda toy: drawn_round(toy, CHAIN, True, walk_recursive),
    "block": lambda toy: drawn_round(toy, CHAIN, True, walk_traversal),
    "recursive": lambda toy: drawn_round(toy, TREE, True, walk_recursive),
    "recursive without replacement": lambda toy: drawn_round(
        toy, TREE, False, partial(walk_recursive, replacement=False)
    ),
    "k-seq": lambda toy: drawn_round(toy, TREE, True, walk_k_seq),
    "traversal": lambda toy: drawn_round(toy, TREE, True, walk_traversal),
    "traversal without replacement": lambda toy: drawn_round(
        toy, TREE, False, partial(walk_traversal, replacement=False)
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_sampled_pairs_have_the_law(name: str) -> None:
    toy = toy_of()
    texts = sampled_texts(RULES[name](toy), PROMPT, 2, np.arange(PAIRS))
    assert chi_square(texts, toy.law(2)) > ALPHA


@pytest.mark.parametrize("name", biased.BIASED)
def test_samples_detect(name: str) -> None:
    toy = toy_of()
    texts = sampled_texts(biased.BIASED[name](toy), PROMPT, 2, np.arange(PAIRS_OF_CONTROLS))
    assert chi_square(texts, toy.law(2)) < 1e-9


LONG = 5  # tokens: several rounds
SEEDS_OF_LONG = np.arange(20_000)


def long_toy() -> Toy:
    return Toy.constant([0.5, 0.5], [0.9, 0.1])


@pytest.mark.parametrize("decisions", [biased.KeyedByPosition, biased.DraftsKeyedByPosition])
def test_block_verification_needs_numbers_of_its_own_each_round(decisions: type[Numbers]) -> None:
    """It looks past rejections: a number that served there may not serve the next round."""
    toy = long_toy()
    texts = sampled_texts(RULES["block"](toy), PROMPT, LONG, SEEDS_OF_LONG, decisions=decisions)
    assert chi_square(texts, toy.law(LONG)) < 1e-9


@pytest.mark.parametrize("name", ["speculative", "block"])
def test_sampled_texts_of_several_rounds_have_the_law(name: str) -> None:
    toy = long_toy()
    texts = sampled_texts(RULES[name](toy), PROMPT, LONG, SEEDS_OF_LONG)
    assert chi_square(texts, toy.law(LONG)) > ALPHA


@pytest.mark.parametrize("name", RULES)
def test_the_samples_are_those_of_the_seeded_sampler(name: str) -> None:
    rounds = RULES[name](toy_of())
    seeds = np.arange(2**64 - 15, 2**64, dtype=np.uint64)
    collected: list[tuple[int, int]] = []

    class Both(Numbers):
        """Decisions of both, compared one by one."""

        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self.seeded = SeededDecisions(int(seeds[self._row]), self.position)

        def _same(self, name: str, *arguments: object) -> object:
            got = getattr(super(), name)(*arguments)
            assert got == getattr(self.seeded, name)(*arguments)
            collected.append((self._row, self.position))
            return got

        def accept(self, *arguments: object) -> bool:  # type: ignore[override]
            return bool(self._same("accept", *arguments))

        def keep(self, *arguments: object) -> bool:  # type: ignore[override]
            return bool(self._same("keep", *arguments))

        def sample(self, *arguments: object) -> int:  # type: ignore[override]
            return int(self._same("sample", *arguments))  # type: ignore[call-overload]

    sampled_texts(rounds, PROMPT, 12, seeds, decisions=Both)
    assert len(collected) > 100
