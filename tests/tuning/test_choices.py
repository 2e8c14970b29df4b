"""What a search chooses from: vocabularies and views."""

from __future__ import annotations

import pytest
import torch

from loop.models import FAMILIES
from specdec.models.skipping import SkipSet
from specdec.tuning.choices import Choice, DraftViews

SOME = SkipSet.of([1], [0])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_views_are_the_models(family: str, int8: bool) -> None:
    model = FAMILIES[family](eos_token_ids=(7, 50))
    ranked = [*range(60, -1, -1)]
    views = DraftViews(model, ranked, int8=int8)
    assert views.sizes == (None, 30, 15, 7, 3)
    assert [views.part(size) for size in views.sizes[:2]] == [1.0, 30 / 61]
    assert views.tokens(None) is None
    assert views.tokens(3) == (7, 50, 60)  # the end tokens, whether frequent or not
    assert views.tokens(7) == (7, 50, 56, 57, 58, 59, 60)
    tokens, slots = torch.tensor([[5, 6, 7]]), torch.zeros(1, dtype=torch.int32)
    for size in (None, 7):
        for skips in (SOME, SkipSet()):
            view = views.view(Choice(skips, size))
            same = model.skipping(skips, views.tokens(size), int8=int8)
            logits, want = (v.forward(tokens, cache=model.new_cache(1), slots=slots)[0] for v in (view, same))
            assert torch.equal(logits, want)
            assert view.num_parameters == same.num_parameters
            assert (view.vocabulary is None) == (size is None)
        assert views.view(Choice(SOME, size)).head is views.view(Choice(SkipSet(), size)).head  # made once


def test_sizes_have_room_for_the_end_tokens() -> None:
    model = FAMILIES["llama"](eos_token_ids=tuple(range(12)))
    assert DraftViews(model, range(61)).sizes == (None, 30, 15, 13)
    model = FAMILIES["llama"](eos_token_ids=tuple(range(60)))
    assert DraftViews(model, range(61)).sizes == (None,)


def test_a_choice_says_what_it_is() -> None:
    assert str(Choice(SOME)) == "mixers 1; mlps 0"
    assert str(Choice(SOME, 7)) == "mixers 1; mlps 0; 7 tokens"
