"""Features of the target: what a tap collects, and what the loop hands to a drafter that wants them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from torch import Tensor

from loop.drafters import RandomTreeDrafter
from loop.models import random_model
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.features import Feature, FeatureTap, NodeFeatures
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

FEATURES = (Feature("hidden", 0), Feature("readout", 1), Feature("hidden", 1))


class Watching(RandomTreeDrafter):
    """Keeps every feature that it is shown, beside the token that came after it."""

    features = FEATURES

    def __init__(self, continuations: dict[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        super().__init__(continuations, vocab_size)
        self.seen: dict[int, list[Tensor]] = {}

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        super().begin(slot, prompt, features)
        assert features is not None
        assert len(features) == len(prompt)
        self.seen[slot] = list(features[:-1])
        self.fresh = True

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        super().observe(slot, path, tokens, features)
        assert features is not None
        rows = features.rows()
        assert len(rows) == len(tokens)
        # One that is kept must not keep alive what all prompts of a prefill showed.
        if self.fresh:
            assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()
        self.fresh = False
        self.seen[slot] += list(rows)

    def end(self, slot: int) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return random_model()


def test_parse() -> None:
    assert Feature.parse("readout:12") == Feature("readout", 12)
    for wrong in ("", "hidden", "hidden:", "hidden:-1", "state:1", "hidden:1:2", "hidden:1234567"):
        with pytest.raises(ValueError, match="want hidden:N or readout:N"):
            Feature.parse(wrong)


def test_sizes(model: GatedDeltaNetForCausalLM) -> None:
    assert model.feature_size(Feature("hidden", 0)) == model.config.hidden_size
    assert model.feature_size(Feature("readout", 1)) == model.config.value_dim
    with pytest.raises(ValueError, match="want a layer from 0 to"):
        model.feature_size(Feature("hidden", model.config.num_hidden_layers))


def test_a_tap_without_its_layer_says_so(model: GatedDeltaNetForCausalLM) -> None:
    tap = FeatureTap([Feature("hidden", 0), Feature("hidden", 99)])
    model.prefill([[1, 2]], cache=model.new_cache(1), slots=[0], tap=tap)
    with pytest.raises(ValueError, match="hidden:99"):
        tap.rows()


def test_the_last_hidden_state_gives_the_logits(model: GatedDeltaNetForCausalLM) -> None:
    tap = FeatureTap([Feature("hidden", model.config.num_hidden_layers - 1)])
    logits = model.prefill([[1, 2, 3], [4]], cache=model.new_cache(2), slots=[0, 1], tap=tap)
    last = tap.rows()[torch.arange(2), torch.tensor([2, 0])]
    assert torch.equal(model.readout(last), logits)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("rests", [(False,), (True, True, False, True, False, False), (False, True)])
def test_a_drafter_sees_the_features_of_every_token(
    model: GatedDeltaNetForCausalLM, slots: int, rests: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was drafted, and whenever it rested: they are bit for bit those of decoding the text token by
    token.
    """
    turns = cycle(rests)
    monkeypatch.setattr("specdec.budget.DraftBudget.rests", lambda budget, rows: next(turns))
    prompts = [(5, 6, 7), (9,), (3, 1, 4, 1, 5)]
    plain = Loop(model, slots=1).run([Request(p, 20, ignore_eos=True) for p in prompts])
    known = {p: r.tokens for p, r in zip(prompts, plain, strict=True)}
    drafter = Watching(known, model.vocab_size)
    loop = Loop(model, drafter, slots=slots)
    for prompt, result in zip(
        prompts, loop.run([Request(p, 20, ignore_eos=True) for p in prompts]), strict=True
    ):
        assert result.tokens == known[prompt]
    if slots == 1:
        return  # one slot has held them all
    for slot, prompt in enumerate(prompts):
        seen = torch.stack(drafter.seen[slot])
        text = [*prompt, *known[prompt]][:-1]
        cache = model.new_cache(1)
        tap = FeatureTap(FEATURES)
        model.prefill([prompt], cache=cache, slots=[0], tap=tap)
        want = list(tap.rows()[0])
        for token in text[len(prompt) :]:
            tap = FeatureTap(FEATURES)
            row = torch.zeros(1, dtype=torch.int32)
            _, round = model.forward(torch.tensor([[token]]), cache=cache, slots=row, tap=tap)
            cache.commit(round, None, torch.ones(1, dtype=torch.int32))
            want.append(tap.rows()[0, 0])
        # A drafter that rests is not told what nobody drafts after.
        assert torch.equal(seen, torch.stack(want[: len(seen)]))
        assert len(seen) >= len(want) - 1
