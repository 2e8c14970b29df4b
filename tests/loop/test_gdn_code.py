"""The embedded model: its golden logits, and greedy exactness on every bundled prompt."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch

from loop.drafters import Continuations, RandomTreeDrafter
from specdec.audit import CacheAuditor
from specdec.budget import DraftBudget
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NGramDrafter
from specdec.drafters.oracle import OracleDrafter
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import load_config, load_weights, resolve_model
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.reference import ReferenceGatedDeltaNet

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "gdn_code_golden.json").read_text())
TOKENS = 200


@pytest.fixture(scope="module")
def model() -> GatedDeltaNetForCausalLM:
    return load_model("gdn-code")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    tokenizer = load_tokenizer("gdn-code")
    prompts = json.loads((resources.files("specdec") / "assets" / "prompts.json").read_text())
    assert len(prompts) >= 24
    assert {p["kind"] for p in prompts} == {"complete", "edit", "repeat", "free"}
    return [Request(tokenizer.encode(p["prompt"]), max_new_tokens=TOKENS, ignore_eos=True) for p in prompts]


@pytest.fixture(scope="module")
def plain(model: GatedDeltaNetForCausalLM, requests: list[Request]) -> Continuations:
    results = Loop(model).run(requests)
    return {tuple(r.prompt): result.tokens for r, result in zip(requests, results, strict=True)}


@pytest.mark.parametrize("entry", GOLDEN["entries"], ids=range(len(GOLDEN["entries"])))
def test_golden_logits(model, entry):
    """Every row of the prompt, verified as chains, against a float64 implementation that shares no code.

    Tolerance: logits of magnitude up to 20 through ten layers, each a few sums of up to 512 float32 products;
    the error grows like a random walk over about 60 such sums of relative error sqrt(512) * 2^-24, on a
    residual stream that the final norm rescales: 20 * sqrt(60) * sqrt(512) * 2^-24 = 2.1e-4, doubled.
    """
    tolerance = 4.2e-4
    cache = model.new_cache(1)
    slot = torch.zeros(1, dtype=torch.int32)
    tokens, rows = entry["prompt_tokens"], []
    for at in range(0, len(tokens), 16):
        part = torch.tensor([tokens[at : at + 16]])
        logits, round_ = model.forward(part, cache=cache, slots=slot)
        cache.commit(round_, None, torch.tensor([part.shape[1]], dtype=torch.int32))
        rows.append(logits[0])
    stepped = torch.cat(rows)  # [T, V]
    assert (stepped.logsumexp(-1).double() - torch.tensor(entry["logsumexp_rows"])).abs().max() < tolerance
    assert stepped.argmax(-1).tolist() == entry["argmax_rows"]
    prefilled = model.prefill([tokens], cache=model.new_cache(1), slots=[0])[0]
    for last in (stepped[-1], prefilled):
        for token, logit in entry["logits_last_row_top"]:
            assert abs(float(last[token]) - logit) < tolerance
    request = Request(tokens, max_new_tokens=len(entry["greedy_tokens"]), ignore_eos=True)
    assert Loop(model).run([request])[0].tokens == entry["greedy_tokens"]


def test_trainable_weights(model: GatedDeltaNetForCausalLM) -> None:
    """Weights that require grad, as a training loop holds them, give the same model."""
    config = load_config(resolve_model("gdn-code"))
    weights = load_weights(resolve_model("gdn-code"), config)
    trainable = GatedDeltaNetForCausalLM(config, {n: torch.nn.Parameter(w) for n, w in weights.items()})
    prompt = GOLDEN["entries"][0]["prompt_tokens"]
    caches = [model.new_cache(1), trainable.new_cache(1)]
    prefilled = [
        m.prefill([prompt], cache=c, slots=[0]) for m, c in zip((model, trainable), caches, strict=True)
    ]
    assert torch.equal(*prefilled)
    step, slot = torch.tensor([[5, 6]]), torch.zeros(1, dtype=torch.int32)
    (want, _), (logits, round_) = (
        m.forward(step, cache=c, slots=slot) for m, c in zip((model, trainable), caches, strict=True)
    )
    assert torch.equal(logits, want)
    assert not logits.requires_grad
    caches[1].commit(round_, None, torch.tensor([2], dtype=torch.int32))


CASES = [
    # drafter, slots, commit, draft tokens a round
    ("ngram", 1, "deferred", 8),
    ("ngram", 8, "eager", 8),
    ("ngram-tree", 1, "eager", 12),
    ("ngram-tree", 8, "deferred", 12),
    ("oracle", 1, "deferred", 8),
    ("oracle", 8, "deferred", 5),
    ("random-tree", 1, "deferred", 12),
    ("random-tree", 8, "eager", 12),
    ("self", 1, "eager", 4),
    ("self", 8, "deferred", 3),
]


@pytest.mark.parametrize(("kind", "slots", "commit", "drafts"), CASES)
def test_greedy_tokens_equal_autoregressive(kind, slots, commit, drafts, model, requests, plain):
    """All bundled prompts, 200 tokens each; prompts, drafts and acceptance differ, so batches are ragged."""
    drafter = {
        "ngram": lambda: NGramDrafter(),
        "ngram-tree": lambda: NGramDrafter(min_match=1, branches=4),
        "oracle": lambda: OracleDrafter(plain.items(), vocab_size=model.vocab_size, p=0.8),
        "random-tree": lambda: RandomTreeDrafter(plain, model.vocab_size, seed=slots),
        "self": lambda: ModelDrafter(model, slots=slots),
    }[kind]()
    loop = Loop(model, drafter, slots=slots, commit=commit, budget=DraftBudget(drafts, adaptive=False))
    results = loop.run(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.tokens == plain[tuple(request.prompt)]
    if kind == "self":
        assert loop.statistics.acceptance_rate == 1.0


def test_default_method_audited(model, requests, plain):
    """The loop as users run it, adaptive budget included; its cache is compared after every round."""
    auditor = CacheAuditor(model, 4)
    some = requests[::3]
    results = Loop(model, NGramDrafter(), slots=4, observer=auditor).run(some)
    for request, result in zip(some, results, strict=True):
        assert result.tokens == plain[tuple(request.prompt)]


def test_bfloat16_diverges_only_at_near_ties(requests):
    """In bfloat16 speculation still changes nothing. Against float64 the tokens part only at near-ties: where
    the two best logits are closer than the rounding of bfloat16 can move them.
    """
    model = load_model("gdn-code", dtype=torch.bfloat16)
    oracle = ReferenceGatedDeltaNet.from_directory("gdn-code", torch.float64)
    # A logit is a sum over a residual stream of 20 branches, each rounded to 2^-9 of its magnitude.
    bound = 2 * 20 * 20**0.5 * 2**-9
    for request in requests[::4]:
        short = Request(request.prompt, max_new_tokens=60, ignore_eos=True)
        tokens = Loop(model).run([short])[0].tokens
        assert Loop(model, NGramDrafter()).run([short])[0].tokens == tokens
        logits = oracle.forward(torch.tensor([[*request.prompt, *tokens[:-1]]]))[0, len(request.prompt) - 1 :]
        gaps = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert float(gaps.max()) < bound
