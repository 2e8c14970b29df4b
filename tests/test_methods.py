"""Methods and drafters by name: what is built, and what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.loop.models import random_model

from specdec.acceptance import SamplingParams
from specdec.drafters.ngram import NGramDrafter
from specdec.generation import Request
from specdec.methods import METHODS, DrafterSpec, MethodOptions, build_drafter, get_method
from specdec.methods.autoregressive import autoregressive
from specdec.methods.specla import specla
from specdec.models.base import CausalLM

PROMPTS = [[0, 5, 9, 5, 9, 5], [0, 7, 7, 3], [0, 11]]


def _requests(count: int) -> list[Request]:
    return [Request(p, count, SamplingParams(), ignore_eos=True) for p in PROMPTS]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return random_model(3)


@pytest.fixture(scope="module")
def greedy(model: CausalLM) -> list[list[int]]:
    return [r.tokens for r in autoregressive(model, slots=2).run(_requests(24))]


@pytest.mark.parametrize("text", ["ngram", "oracle"])
@pytest.mark.parametrize("commit", ["deferred", "eager"])
def test_specla_writes_the_autoregressive_tokens(
    model: CausalLM, greedy: list[list[int]], text: str, commit: str
) -> None:
    drafter = build_drafter(
        DrafterSpec.parse(text, p=0.7),
        vocab_size=model.vocab_size,
        slots=2,
        dtype=torch.float32,
        continuations=list(zip(PROMPTS, greedy, strict=True)),
    )
    options = MethodOptions(slots=2, commit=commit, max_draft=5, adaptive=False)  # type: ignore[arg-type]
    loop = get_method("specla").build(model, drafter, options)
    assert [r.tokens for r in loop.run(_requests(24))] == greedy
    assert loop.statistics.drafted > 0


def test_fixed_drafts_are_as_long_as_asked(model: CausalLM, greedy: list[list[int]]) -> None:
    drafter = build_drafter(
        DrafterSpec.parse("oracle"),
        vocab_size=model.vocab_size,
        slots=1,
        dtype=torch.float32,
        continuations=list(zip(PROMPTS, greedy, strict=True)),
    )
    loop = specla(model, drafter, max_draft=3, adaptive=False)
    result = loop.run(_requests(24)[:1])[0]
    # 23 tokens after the first: five rounds of 3 drafts and a bonus token, then 2 drafts and the bonus token.
    assert (result.rounds, result.drafted, result.accepted) == (6, 17, 17)


def test_model_drafter_of_the_target_itself_is_always_right(model: CausalLM, greedy: list[list[int]]) -> None:
    spec = DrafterSpec("model", "itself")
    drafter = build_drafter(spec, vocab_size=model.vocab_size, slots=2, dtype=torch.float32, model=model)
    loop = specla(model, drafter, slots=2, max_draft=4, adaptive=False)
    assert [r.tokens for r in loop.run(_requests(24))] == greedy
    assert loop.statistics.acceptance_rate == 1.0


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=rf"'magic', want one of {', '.join(METHODS)}"):
        get_method("magic")
    for text in ("magic", "model", "model:", "ngram:3", "oracle:1", ""):
        with pytest.raises(ValueError, match=r"want one of ngram, model:DIR, oracle"):
            DrafterSpec.parse(text)
    with pytest.raises(ValueError, match=r"oracle_p: got 1\.5"):
        DrafterSpec.parse("oracle", p=1.5)


def test_an_oracle_is_named_with_its_p() -> None:
    assert DrafterSpec.parse("oracle", p=0.8).label == "oracle p=0.8"
    assert DrafterSpec.parse("ngram", p=0.8).label == "ngram"
    assert DrafterSpec.parse("model:some/dir").label == "model:some/dir"


def test_a_drafter_of_another_vocabulary_is_refused(model: CausalLM) -> None:
    with pytest.raises(ValueError, match=f"has a vocabulary of 61, want the target's {model.vocab_size + 1}"):
        build_drafter(
            DrafterSpec("model", "other"),
            vocab_size=model.vocab_size + 1,
            slots=1,
            dtype=torch.float32,
            model=model,
        )


def test_specla_needs_a_drafter_and_ngram_needs_nothing(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="drafter"):
        get_method("specla").build(model, None, MethodOptions())
    spec = DrafterSpec.parse("ngram")
    assert isinstance(
        build_drafter(spec, vocab_size=model.vocab_size, slots=1, dtype=torch.float32), NGramDrafter
    )
