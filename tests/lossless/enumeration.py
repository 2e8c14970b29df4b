"""Exact laws: run a rule over every outcome of its random decisions and add up the probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Branch:
    """One path through the tree of outcomes: follows a script, then takes the first possible outcome."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.probability = 1.0
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self._script = script

    def accept(self, depth: int, p: float, q: float, rank: int = 0) -> bool:
        """An acceptance test that passes with probability min(1, p / q)."""
        chance = min(1.0, p / q)
        return bool(self._choose(np.array([1.0 - chance, chance])))

    def keep(self, node: int, chance: float) -> bool:
        """A walk from the leaves up that ends at the node with the chance."""
        return bool(self._choose(np.array([1.0 - chance, chance])))

    def sample(self, depth: int, weights: np.ndarray) -> int:
        """A draw from the target's side."""
        return self._choose(weights / weights.sum())

    def draft(self, depth: int, weights: np.ndarray) -> int:
        """A draw of the drafter."""
        return self._choose(weights / weights.sum())

    def _choose(self, chances: np.ndarray) -> int:
        possible = np.flatnonzero(chances > 0).tolist()
        step = len(self.taken)
        choice = self._script[step] if step < len(self._script) else possible[0]
        self.taken.append(choice)
        self.possible.append(possible)
        self.probability *= float(chances[choice])
        return choice


def outcomes(run: Callable[[Branch], T]) -> Iterator[tuple[float, T]]:
    """Every (probability, result) of a function whose randomness comes from the `Branch` it is given."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        script = scripts.pop()
        branch = Branch(script)
        result = run(branch)
        yield branch.probability, result
        for step in range(len(script), len(branch.taken)):
            here = tuple(branch.taken[:step])
            scripts += [(*here, other) for other in branch.possible[step][1:]]


def emitted_law(
    rounds: Callable[[tuple[int, ...], Branch], list[int]], prompt: tuple[int, ...], vocab: int, length: int
) -> np.ndarray:
    """Joint law [V] * length of the first `length` tokens that the loop emits after the prompt."""
    law = np.zeros((vocab,) * length)
    open_texts = {(): 1.0}
    while open_texts:
        text = min(open_texts, key=len)  # shortest first: every way to reach it has been added up
        reached = open_texts.pop(text)
        for probability, emitted in outcomes(lambda branch, text=text: rounds((*prompt, *text), branch)):
            longer = (*text, *emitted)[:length]
            if len(longer) == length:
                law[longer] += reached * probability
            else:
                open_texts[longer] = open_texts.get(longer, 0.0) + reached * probability
    return law
