"""Llama-family checkpoints against `transformers`: the same files, the same logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.cache import Steps
from specdec.models import load_model
from specdec.models.llama import LlamaForCausalLM
from specdec.models.rope import RopeConfig, inverse_frequencies

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 96,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied, epsilon, theta": (
        "llama",
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_theta": 300.0}},
    ),
    "one key head, wide heads": ("llama", {"num_key_value_heads": 1, "head_dim": 48}),
    "as many key heads, hidden / heads": ("llama", {"num_key_value_heads": 6, "head_dim": None}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 500.0,
            }
        },
    ),
    "yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 1000.0}}),
    "yarn, options": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "rope_theta": 1000.0,
            }
        },
    ),
    "yarn, attention factor": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
}
LENGTHS = (1, 9, 50)


def checkpoint(variant: str, directory: Path) -> tuple[Any, LlamaForCausalLM]:
    """A random model of `transformers`, and ours from its files."""
    kind, options = VARIANTS[variant]
    torch.manual_seed(sum(map(ord, variant)))
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **options})
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in peer.named_parameters():
        # Biases and norms are constant at first, and the usual deviation of 0.02 makes attention an average.
        with torch.no_grad():
            spread = 3.0 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in name))
    peer.save_pretrained(directory)
    model = load_model(directory)
    assert isinstance(model, LlamaForCausalLM)
    return peer, model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """Of prompts of several lengths in one batch, of the tokens after them one by one, and of a tree.

    What `transformers` itself is off by in float32, against its float64, is what such sums lose: ours are the
    same sums in another order, and the largest of so few errors varies by some times.
    """
    peer, model = checkpoint(variant, tmp_path)
    r = random.Random(1)
    texts = [[r.randrange(model.vocab_size) for _ in range(n + 5)] for n in LENGTHS]
    with torch.no_grad():
        rounded = [peer(torch.tensor([text])).logits[0] for text in texts]  # [T, V]
        wanted = [peer.double()(torch.tensor([text])).logits[0] for text in texts]
    tolerance = 8 * max(float((a - b).abs().max()) for a, b in zip(rounded, wanted, strict=True))
    assert tolerance < 0.01

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), want, rtol=0.0, atol=tolerance)

    cache = model.new_cache(4)
    slots = torch.tensor([3, 0, 2], dtype=torch.int32)
    prompts = [text[:n] for text, n in zip(texts, LENGTHS, strict=True)]
    got = model.prefill(prompts, cache=cache, slots=slots.tolist())
    close(got, torch.stack([want[n - 1] for want, n in zip(wanted, LENGTHS, strict=True)]))
    one = torch.ones(3, dtype=torch.int32)
    for step in range(2):
        new = torch.tensor([[text[n + step]] for text, n in zip(texts, LENGTHS, strict=True)])
        logits, round = model.forward(new, cache=cache, slots=slots)
        close(logits[:, 0], torch.stack([want[n + step] for want, n in zip(wanted, LENGTHS, strict=True)]))
        cache.defer(round, None, one)
    # The next three tokens hang below one another among others, half of them in a prefix.
    steps, at = Steps(), 2
    parents = ([[-1, -1, 1], [-1, -1, 0], [-1, 0, -1]], [[2, 1], [1, 2], [2, 1]])
    order = (((1, 2), (0, 2), (0, 1)), ((0,), (1,), (1,)))  # places of the true tokens, by row
    for tree, places in zip(parents, order, strict=True):
        tokens = torch.randint(model.vocab_size, (3, len(tree[0])))
        for row, (text, n) in enumerate(zip(texts, LENGTHS, strict=True)):
            for i, place in enumerate(places[row]):
                tokens[row, place] = text[n + at + i]
        logits, round = model.forward(
            tokens, cache=cache, slots=slots, parents=torch.tensor(tree, dtype=torch.int32), prefix=steps
        )
        steps.extend(round)
        for row, (want, n) in enumerate(zip(wanted, LENGTHS, strict=True)):
            for i, place in enumerate(places[row]):
                close(logits[row, place], want[n + at + i])
        at += len(places[0])


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "yarn" in name or name.startswith("l")])
def test_angles_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """Bit for bit: they are computed by the same operations."""
    peer, model = checkpoint(variant, tmp_path)
    positions = torch.tensor([[0, 1, 5, 63, 255, 256, 300, 4001]])
    cos, sin = peer.model.rotary_emb(torch.zeros(1), positions)
    got = model._rotation.at(positions)
    half = cos.shape[-1] // 2
    assert torch.equal(got[:, :, 0], cos)
    assert torch.equal(got[0, :, 1, half:], sin[0, :, half:])
    assert torch.equal(got[0, :, 1, :half], -sin[0, :, :half])


def test_older_spelling_of_positions(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` with `type`, as files had them before `rope_parameters`."""
    values = {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = RopeConfig.from_dict(values, 64)
    assert (config.kind, config.theta, config.factor) == ("linear", 777.0, 2.0)
    peer = transformers.LlamaConfig(**SIZES, **values)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(peer)
    assert torch.equal(inverse_frequencies(config, 32), rotary.inv_freq)


def test_untied_head_that_is_tied_again_is_left_out(tmp_path: Path) -> None:
    """A tied checkpoint may repeat its head, and older ones hold the frequencies."""
    from safetensors.torch import load_file, save_file

    _, model = checkpoint("tied, epsilon, theta", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(weights, tmp_path / "model.safetensors")
    again = load_model(tmp_path)
    caches = model.new_cache(1), again.new_cache(1)
    logits = [m.prefill([[5, 6, 7]], cache=c, slots=[0]) for m, c in zip((model, again), caches, strict=True)]
    assert torch.equal(*logits)


def test_bfloat16_checkpoints_keep_their_weights(tmp_path: Path) -> None:
    """In float32 the weights are those of the file, which are packed as they are."""
    peer, _ = checkpoint("llama", tmp_path)
    peer.bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.head.dtype == torch.bfloat16
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        want = peer.float()(torch.tensor([text])).logits[0, -1]
    got = model.prefill([text], cache=model.new_cache(1), slots=[0])[0]
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-3 * float(want.abs().max()))
    narrow = load_model(tmp_path, dtype=torch.bfloat16)
    cache = narrow.new_cache(1)
    assert cache.keys_values(0)[0].dtype == torch.bfloat16
    rounded = narrow.prefill([text], cache=cache, slots=[0])[0]
    assert rounded.dtype == torch.float32
    # Activations of three layers and six sublayers rounded to 8 bits, with the sharpness of the test above.
    assert float((rounded - want).abs().max()) < 16 * 6 * 2**-8 * float(want.abs().max())
