"""A Llama-family model by itself: prompts of a batch, positions, features, slots."""

from __future__ import annotations

import random

import pytest
import torch

from loop.models import random_llama
from specdec.cache import Round, Steps
from specdec.models.features import Feature, FeatureTap
from specdec.models.llama import LlamaForCausalLM
from specdec.models.positions import node_positions


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama()


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_prompt_does_not_depend_on_its_batch(model: LlamaForCausalLM) -> None:
    """Bit for bit, in logits and memory, in any slot, also one that held something else."""
    r = random.Random(0)
    prompts = [[r.randrange(61) for _ in range(n)] for n in (1, 300, 7, 64, 191)]
    cache = model.new_cache(7)
    model.prefill([p[::-1] for p in prompts], cache=cache, slots=[1, 2, 3, 4, 5])
    slots = [5, 0, 3, 6, 1]
    logits = model.prefill(prompts, cache=cache, slots=slots)
    for row, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        alone = model.new_cache(1)
        assert torch.equal(model.prefill([prompt], cache=alone, slots=[0])[0], logits[row])
        for got, want in zip(cache.snapshot(slot), alone.snapshot(0), strict=True):
            assert got["keys"].shape[1] == len(prompt)
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_padding_rows_and_nodes_beyond_a_length_touch_nothing(model: LlamaForCausalLM) -> None:
    cache = model.new_cache(3)
    model.prefill([[5, 6, 7], [8]], cache=cache, slots=[2, 0])
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    logits, round = model.forward(
        tokens,
        cache=cache,
        slots=int32([2, -1, 0]),
        lengths=int32([2, 3, 1]),
        parents=int32([[-1, 0, 1]] * 3),
    )
    cache.commit(round, int32([[0, 1], [0, 1], [0, 0]]), int32([2, 2, 1]))
    assert cache.lengths.tolist() == [2, 0, 5]
    alone = model.new_cache(1)
    model.prefill([[5, 6, 7]], cache=alone, slots=[0])
    want, _ = model.forward(tokens[:1, :2], cache=alone, slots=int32([0]))
    assert torch.equal(logits[0, :2], want[0])


def test_positions_of_nodes(model: LlamaForCausalLM) -> None:
    cache = model.new_cache(3)
    cache.lengths[:] = int32([10, 0, 30])
    slots = int32([2, -1, 0])

    def at(nodes: int, parents: object = None, prefix: Steps | None = None) -> list[list[int]]:
        given = None if parents is None else int32(parents)
        return node_positions(cache, slots, nodes, parents=given, prefix=prefix).tolist()

    assert at(3) == [[30, 31, 32], [10, 11, 12], [10, 11, 12]]
    assert at(3, [[-1, 0, 0], [-1, -1, -1], [-1, 0, 1]]) == [[30, 31, 31], [10, 10, 10], [10, 11, 12]]
    chain = Steps()
    chain.extend(Round((None, None), slots, None, 2))
    assert at(2, prefix=chain) == [[32, 33], [12, 13], [12, 13]]
    assert at(2, [[-1, 0], [1, 2], [0, 0]], chain) == [[30, 31], [12, 13], [11, 11]]
    tree = Steps()
    tree.extend(Round((None, None), slots, int32([[-1, 0], [-1, -1], [-1, 0]]), 2))
    assert at(2, prefix=tree) == [[32, 33], [11, 12], [12, 13]]
    assert at(1, [[0], [1], [-1]], tree) == [[31], [11], [10]]


def test_hidden_features(model: LlamaForCausalLM) -> None:
    """The last layer's gives the logits; an earlier one's those of the early exit."""
    features = [Feature("hidden", 1), Feature("hidden", 0)]
    D = model.config.hidden_size
    assert [model.feature_size(f) for f in features] == [D, D]
    for wrong in (Feature("hidden", 2), Feature("readout", 0)):
        with pytest.raises(ValueError, match="feature: got"):
            model.feature_size(wrong)
    cache, prompt, tap = model.new_cache(1), [5, 6, 7, 8], FeatureTap(features)
    logits = model.prefill([prompt], cache=cache, slots=[0], tap=tap)
    last, first = tap.rows().split(D, dim=-1)  # [1, T, D] each
    assert torch.equal(model.readout(last[:, -1]), logits)
    early = model.first_layers(1)
    assert torch.equal(
        early.readout(first[:, -1]), early.prefill([prompt], cache=early.new_cache(1), slots=[0])
    )
    tap = FeatureTap(features)
    logits, _ = model.forward(torch.tensor([[9, 3]]), cache=cache, slots=int32([0]), tap=tap)
    assert torch.equal(model.readout(tap.rows()[..., :D]), logits)


def test_a_text_outgrows_the_first_room(model: LlamaForCausalLM) -> None:
    """Slots of one batch, one of which needs more than the cache was made with."""
    r = random.Random(0)
    long, short = [r.randrange(61) for _ in range(250)], [4, 5]
    new = [r.randrange(61) for _ in range(20)]
    cache, slots = model.new_cache(2), int32([0, 1])
    model.prefill([long, short], cache=cache, slots=[0, 1])
    for start in range(0, 20, 4):
        part = torch.tensor([new[start : start + 4]] * 2)
        _, round = model.forward(part, cache=cache, slots=slots)
        cache.defer(round, None, int32([4, 4]))
    logits, _ = model.forward(torch.tensor([[1], [1]]), cache=cache, slots=slots)
    assert cache.lengths.tolist() == [270, 22]
    for row, prompt in enumerate((long, short)):
        alone = model.new_cache(1)
        model.prefill([prompt], cache=alone, slots=[0])
        for token in new:
            _, round = model.forward(torch.tensor([[token]]), cache=alone, slots=int32([0]))
            alone.commit(round, None, int32([1]))
        want, _ = model.forward(torch.tensor([[1]]), cache=alone, slots=int32([0]))
        assert torch.equal(logits[row], want[0])
