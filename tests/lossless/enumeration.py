"""Exact laws: run a rule over every outcome of its random decisions and add up the probabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Text = tuple[int, ...]
Past = tuple[Hashable, ...]


class Branch:
    """One path through the tree of outcomes: follows a script, then takes the first possible outcome."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.probability = 1.0
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self._script = script

    def accept(self, depth: int, p: float, q: float, rank: int = 0) -> bool:
        """An acceptance test that passes with probability min(1, p / q)."""
        return self.keep(0, min(1.0, p / q))

    def keep(self, node: int, chance: float) -> bool:
        """Whether a walk ends at a node."""
        return bool(self._choose((1.0 - chance, chance)))

    def sample(self, depth: int, weights: np.ndarray) -> int:
        """A draw from the target's side."""
        return self._choose((weights / weights.sum()).tolist())

    def draft(self, parent: int, rank: int, q: np.ndarray, elder: Collection[int] | None) -> int:
        """A drafter's draw of a node's child from q, without the tokens of its elder siblings if given."""
        weights = np.array(q)
        weights[list(elder or ())] = 0.0
        return self._choose((weights / weights.sum()).tolist())

    def _choose(self, chances: Sequence[float]) -> int:
        possible = [i for i, chance in enumerate(chances) if chance > 0.0]
        step = len(self.taken)
        choice = self._script[step] if step < len(self._script) else possible[0]
        self.taken.append(choice)
        self.possible.append(possible)
        self.probability *= chances[choice]
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


def round_law(run: Callable[[Branch], Sequence[int]]) -> dict[Text, float]:
    """The probability of each text that one round may emit."""
    law: dict[Text, float] = {}
    for probability, emitted in outcomes(run):
        text = tuple(emitted)
        law[text] = law.get(text, 0.0) + probability
    return law


def emitted_law(
    rounds: Callable[[Text, Branch], Sequence[int]],
    prompt: Text,
    vocab: int,
    length: int,
    context: Callable[[Text], Hashable],
) -> np.ndarray:
    """Joint law [V] * length of the first `length` tokens that the loop emits after the prompt.

    Args:
        rounds: a round, given the text so far and its decisions.
        prompt: the text before.
        vocab: V.
        length: how many tokens.
        context: what of a text a round depends on: rounds of equal contexts are enumerated once.
    """

    def forgetful(text: Text, past: Past, decide: Branch) -> tuple[Sequence[int], Past]:
        return rounds(text, decide), past

    return planned_law(forgetful, prompt, vocab, length, context)


def planned_law(
    rounds: Callable[[Text, Any, Branch], tuple[Sequence[int], Past]],
    prompt: Text,
    vocab: int,
    length: int,
    context: Callable[[Text], Hashable],
) -> np.ndarray:
    """As `emitted_law`, of rounds that depend on what became of those before: each is given the past, which
    is () at first, and hands on what it becomes.
    """
    laws: dict[Hashable, dict[tuple[Text, Past], float]] = {}
    law = np.zeros((vocab,) * length)
    open_texts: dict[tuple[Text, Past], float] = {((), ()): 1.0}
    while open_texts:
        text, past = min(open_texts, key=lambda at: len(at[0]))  # every way to it has been added up
        reached = open_texts.pop((text, past))
        before = (*prompt, *text)
        key = context(before), past
        if key not in laws:
            told = laws[key] = {}
            run = partial(rounds, before, past)
            for probability, (emitted, after) in outcomes(run):
                end = tuple(emitted), after
                told[end] = told.get(end, 0.0) + probability
        for (emitted, after), probability in laws[key].items():
            longer = (*text, *emitted)[:length]
            if len(longer) == length:
                law[longer] += reached * probability
            else:
                open_texts[longer, after] = open_texts.get((longer, after), 0.0) + reached * probability
    return law
