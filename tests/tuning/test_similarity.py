"""The programme over hidden states: against every set there is, and against real runs of views."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loop.models import FAMILIES
from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet
from specdec.tuning.similarity import most_similar, skip_set, whole_layers

Function = Callable[[Tensor], Tensor]


def run(functions: list[Function], x: Tensor, skipped: tuple[int, ...]) -> Tensor:
    for i, f in enumerate(functions):
        x = x if i in skipped else f(x)
    return x


def similarity(functions: list[Function], x: Tensor, skipped: tuple[int, ...]) -> float:
    whole, part = run(functions, x, ()), run(functions, x, skipped)
    return float(torch.cosine_similarity(whole, part, dim=-1).mean())


@pytest.mark.parametrize("seed", range(5))
def test_steps_in_directions_of_their_own_are_left_out_from_the_smallest(seed: int) -> None:
    """There the best set can be had step by step, so that the programme has to find the best of all."""
    generator = torch.Generator().manual_seed(seed)
    count, tokens = 7, 3
    sizes = torch.rand(count, generator=generator) + 0.1

    def step(i: int) -> Function:
        return lambda x: x + sizes[i] * torch.nn.functional.one_hot(torch.tensor(i), count + 1)

    functions = [step(i) for i in range(count)]
    x = torch.zeros(tokens, count + 1)
    x[:, count] = 1.0
    found = most_similar(functions, x)
    assert [len(s.skipped) for s in found] == list(range(count + 1))
    for j, s in enumerate(found):
        every = {c: similarity(functions, x, c) for c in itertools.combinations(range(count), j)}
        assert s.skipped == max(every, key=lambda c: every[c])
        assert s.similarity == pytest.approx(every[s.skipped], rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_two_choices_are_compared_at_every_step(seed: int) -> None:
    """The recurrence written down as it is in the paper, by recursion, on functions that are anything."""
    generator = torch.Generator().manual_seed(seed)
    matrices = 0.4 * torch.randn(6, 5, 5, generator=generator)
    x = torch.randn(4, 5, generator=generator)
    functions: list[Function] = [lambda x, m=m: x + torch.tanh(x @ m) for m in matrices]  # type: ignore[misc]

    def best(i: int, j: int) -> tuple[int, ...]:
        if j == 0 or i == 0:
            return tuple(range(j))  # never more than there are
        choices = [(*best(i - 1, j - 1), i - 1)]
        if j < i:
            choices.append(best(i - 1, j))
        return max(choices, key=lambda c: similarity(functions[:i], x, c))

    for j, s in enumerate(most_similar(functions, x)):
        assert s.skipped == best(6, j)
        assert s.similarity == pytest.approx(similarity(functions, x, s.skipped), abs=1e-6)


def test_sizes_and_numbers() -> None:
    functions: list[Function] = [lambda x: x + 1.0] * 4
    x = torch.eye(3)
    assert [len(s.skipped) for s in most_similar(functions, x, 2)] == [0, 1, 2]
    assert [len(s.skipped) for s in whole_layers(functions, x, 3)] == [0, 2]
    assert skip_set([0, 3, 4]) == SkipSet.of([0, 2], [1])
    for most in (-1, 5):
        with pytest.raises(ValueError, match=f"most: got {most}"):
            most_similar(functions, x, most)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_says_is_what_the_model_does_without_them(family: str) -> None:
    """Sub-layers of a real model, over a memory: what a view of the set computes is as close as said, and the
    set is among the best tenth of its size.
    """
    model: SkippableLM = FAMILIES[family](num_hidden_layers=3)
    cache = model.new_cache(1)
    model.prefill([[3, 5, 7, 9, 11]], cache=cache, slots=[0])
    slots = torch.zeros(1, dtype=torch.int32)
    tokens = torch.tensor([[7, 30, 2, 18, 40, 5]])
    parents = torch.full_like(tokens, -1, dtype=torch.int32)
    functions = model.sub_layers(6, cache=cache, slots=slots, parents=parents)
    x = model.embeddings[tokens]
    whole, _ = model.forward(tokens, cache=cache, slots=slots, parents=parents)

    for s in most_similar(functions, x):
        every = [similarity(functions, x, c) for c in itertools.combinations(range(6), len(s.skipped))]
        assert sum(other > s.similarity + 1e-6 for other in every) <= len(every) // 10
        assert s.similarity == pytest.approx(similarity(functions, x, s.skipped), abs=1e-6)
        # The functions are the model's: a view gives the logits of the stream that they leave.
        view, _ = model.skipping(s.skips).forward(tokens, cache=cache, slots=slots, parents=parents)
        stream = run(functions, x, s.skipped)
        assert torch.equal(view, model.readout(stream))  # type: ignore[attr-defined]
    assert torch.equal(whole, model.readout(run(functions, x, ())))  # type: ignore[attr-defined]
