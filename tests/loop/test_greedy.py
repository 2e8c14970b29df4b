"""Greedy decoding: whatever is drafted, the tokens are those of plain decoding and the cache is what they
alone give.
"""

from __future__ import annotations

import random

import pytest
import torch

from loop.drafters import Continuations, RandomTreeDrafter, WrongDrafter
from loop.models import FAMILIES, random_llama, random_model
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models.base import CausalLM
from specdec.models.rope import RopeConfig

TOKENS = 40


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> CausalLM:
    return FAMILIES[request.param]()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    r = random.Random(1)
    prompts = [[r.randrange(1, 61) for _ in range(n)] for n in (1, 2, 3, 5, 17, 64, 65, 90, 4, 4, 33)]
    return [Request(p, max_new_tokens=TOKENS - i, ignore_eos=i % 2 == 0) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def plain(model: CausalLM, requests: list[Request]) -> Continuations:
    return {tuple(r.prompt): Loop(model).run([r])[0].tokens for r in requests}


def make(kind: str, model: CausalLM, plain: Continuations, slots: int):
    vocab = model.vocab_size
    match kind:
        case "tree":
            return RandomTreeDrafter(plain, vocab, seed=3)
        case "chain":
            return RandomTreeDrafter(plain, vocab, seed=4, chains_only=True)
        case "wrong":
            return WrongDrafter(plain, vocab)
        case "oracle":
            return OracleDrafter(plain.items(), vocab_size=vocab, p=0.7)
        case "ngram":
            return NGramDrafter(min_match=1)
        case "ngram-tree":
            return NGramDrafter(min_match=1, branches=3)
        case "self":
            return ModelDrafter(model, slots=slots)
        case "other" | "other llama":
            return ModelDrafter(random_llama(9) if kind == "other llama" else random_model(9), slots=slots)
    raise ValueError(kind)


KINDS = ["tree", "chain", "wrong", "oracle", "ngram", "ngram-tree", "self", "other", "other llama"]


@pytest.mark.parametrize("commit", ["deferred", "eager"])
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_cache_equal_plain_decoding(kind, slots, commit, model, requests, plain):
    """Batches mix just-prefilled, finished and replaced sequences; the auditor compares the cache bit for
    bit.
    """
    auditor = CacheAuditor(model, slots)
    loop = Loop(
        model,
        make(kind, model, plain, slots),
        slots=slots,
        commit=commit,
        budget=DraftBudget(8, adaptive=False),
        observer=auditor,
    )
    for request, result in zip(requests, loop.run(requests), strict=True):
        assert result.tokens == plain[tuple(request.prompt)]
        assert len(result.tokens) <= request.max_new_tokens
    assert auditor.rounds > 0
    if kind == "wrong":
        assert loop.statistics.drafted > 0
        assert loop.statistics.accepted == 0
    if kind == "self":
        assert loop.statistics.acceptance_rate == 1.0


def test_adaptive_budget_changes_no_token(model, requests, plain):
    loop = Loop(model, NGramDrafter(min_match=1), slots=3)
    for request, result in zip(requests, loop.run(requests), strict=True):
        assert result.tokens == plain[tuple(request.prompt)]


@pytest.mark.parametrize("kind", ["wrong", "self"])
def test_thousand_tokens(kind, model):
    """Acceptance is exactly 0 for a drafter that is always wrong and exactly 1 for the target itself, with
    one text.
    """
    request = Request([5, 6, 7], max_new_tokens=1000, ignore_eos=True)
    plain = {(5, 6, 7): Loop(model).run([request])[0].tokens}
    loop = Loop(model, make(kind, model, plain, 1), budget=DraftBudget(6, adaptive=False))
    assert loop.run([request])[0].tokens == plain[5, 6, 7]
    assert len(plain[5, 6, 7]) == 1000
    assert loop.statistics.acceptance_rate == (0.0 if kind == "wrong" else 1.0)
    assert loop.statistics.drafted > 800


@pytest.mark.parametrize(
    "extra", [{}, {"use_short_conv": False}, {"use_gate": False, "conv_bias": True, "conv_size": 2}]
)
def test_model_variants(extra):
    variant = random_model(
        2, num_v_heads=2, expand_v=2.0, allow_neg_eigval=True, tie_word_embeddings=False, **extra
    )
    check_variant(variant)


def check_variant(variant):
    request = Request([3, 1, 4, 1, 5], max_new_tokens=30, ignore_eos=True)
    plain = {tuple(request.prompt): Loop(variant).run([request])[0].tokens}
    auditor = CacheAuditor(variant, 1)
    drafter = RandomTreeDrafter(plain, variant.vocab_size, seed=1)
    loop = Loop(variant, drafter, budget=DraftBudget(8, adaptive=False), observer=auditor)
    assert loop.run([request])[0].tokens == plain[tuple(request.prompt)]


@pytest.mark.parametrize(
    "extra",
    [
        {"num_key_value_heads": 6, "attention": True},
        {"head_dim": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "mlp_bias": True},
    ],
)
def test_llama_variants(extra):
    bias = extra.pop("attention", False)
    rope = RopeConfig("yarn", 500.0, factor=2.0, original_context=24, attention_factor=1.1)
    variant = random_llama(2, tie_word_embeddings=False, qkv_bias=bias, output_bias=bias, rope=rope, **extra)
    check_variant(variant)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_exact_too(requests, family):
    """Row-invariant ops make verification bit-equal to decoding in bfloat16 as well: no near-tie can flip."""
    model = FAMILIES[family](5, dtype=torch.bfloat16)
    plain = {tuple(r.prompt): Loop(model).run([r])[0].tokens for r in requests}
    loop = Loop(
        model, RandomTreeDrafter(plain, model.vocab_size, 2), slots=3, budget=DraftBudget(8, adaptive=False)
    )
    for request, result in zip(requests, loop.run(requests), strict=True):
        assert result.tokens == plain[tuple(request.prompt)]


def test_batch_does_not_change_a_sequence(model, requests, plain):
    """Alone or among others, in any order: the same tokens."""
    shuffled = requests[::-1]
    for request, result in zip(shuffled, Loop(model, slots=5).run(shuffled), strict=True):
        assert result.tokens == plain[tuple(request.prompt)]
