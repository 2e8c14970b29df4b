"""Chi-square of texts from the seeded numbers, and controls that must fail it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from lossless import biased
from lossless.statistics import ALPHA, Numbers, chi_square, sampled_texts
from lossless.toys import PROMPT, Toy, drawn_round, fixed_round
from specdec.acceptance import SamplingParams, SeededDecisions, Typical
from specdec.acceptance.follow import walk_follow
from specdec.acceptance.k_seq import walk_k_seq
from specdec.acceptance.recursive import walk_recursive
from specdec.acceptance.traversal import walk_traversal
from specdec.acceptance.typical import walk_typical

SOFT = SamplingParams(temperature=1.0)
CHAIN, STAR, TREE = [-1, 0, 1], [-1, -1, -1], [-1, -1, 0, 1]
PAIRS, PAIRS_OF_CONTROLS = 25_000, 20_000  # the operators' tests have 100,000


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


BIASED = {
    "naive residual": lambda toy: drawn_round(toy, CHAIN, True, biased.resample_from_target),
    "argmax draft, soft q": lambda toy: biased.argmax_draft(drawn_round(toy, CHAIN, True, walk_recursive)),
    "drops the unlikely draft": lambda toy: biased.cut_chain(toy, 3, biased.unlikely, walk_recursive),
    "drops the unlikely draft, block": lambda toy: biased.cut_chain(toy, 3, biased.unlikely, walk_traversal),
    "middle tier": lambda toy: biased.cut_chain(toy, 3, biased.middle_tier(toy), walk_recursive),
    "siblings stay in p": lambda toy: fixed_round(toy, TREE, tokens, biased.siblings_without_removal),
    "iid rule, drawn without replacement": lambda toy: drawn_round(toy, STAR, False, walk_recursive),
    "rule without replacement, drawn iid": lambda toy: drawn_round(
        toy, STAR, True, partial(walk_recursive, replacement=False)
    ),
    "traversal without replacement, drawn iid": lambda toy: drawn_round(
        toy, STAR, True, partial(walk_traversal, replacement=False)
    ),
    "k-seq, drawn without replacement": lambda toy: drawn_round(toy, STAR, False, walk_k_seq),
    "k-seq, rho too small": lambda toy: drawn_round(toy, STAR, True, biased.k_seq_below(0.8)),
    "block, chance of the parent stays": lambda toy: drawn_round(
        toy, CHAIN, True, biased.traversal_with_the_parents_chance
    ),
    "traversal, chance of the parent stays": lambda toy: drawn_round(
        toy, TREE, True, biased.traversal_with_the_parents_chance
    ),
    "typical": lambda toy: drawn_round(
        toy, CHAIN, True, lambda p, q, *nodes: walk_typical(p, *nodes, Typical())
    ),
}


@pytest.mark.parametrize("name", BIASED)
def test_samples_detect(name: str) -> None:
    toy = toy_of()
    texts = sampled_texts(BIASED[name](toy), PROMPT, 2, np.arange(PAIRS_OF_CONTROLS))
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
