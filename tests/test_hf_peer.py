"""Tiny random Hugging Face models, converted, must give the logits that `transformers` computes.

No downloads: the models are built from configurations. Needs the extra `peers`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.models.checkpoint import load_config, load_weights
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.huggingface import convert, convert_config, convert_weights
from specdec.models.reference import ReferenceGatedDeltaNet

pytest.importorskip("transformers", reason="needs transformers: pip install 'specdec[peers]'")
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "layer_types": ["linear_attention"] * 3, "eos_token_id": [1, 2],
}  # fmt: skip


def build(kind: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A random model with norms, gates and decays away from their initial values, in evaluation mode."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **changes}
    if kind == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
    else:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(num_experts=0, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            # Small initial weights would hide errors: every part must matter to the logits.
            parameter.add_(torch.randn_like(parameter), alpha=0.3 if parameter.dim() == 1 else 0.15)
    return model.eval()


def tolerance(tokens: torch.Tensor, config: GatedDeltaNetConfig, weights: dict[str, torch.Tensor]) -> float:
    """Bound for another float32 evaluation of the same model, from the model's own float32 error.

    The distance of our float32 logits from our float64 logits is what float32 rounding does at this depth and
    conditioning. The peer rounds as often, but its chunked rule solves blocks of 64 tokens, where about
    sqrt(64) times the error of a single step can add up; hence a factor of 8.
    """
    exact = ReferenceGatedDeltaNet(config, weights, torch.float64).forward(tokens)
    error = (ReferenceGatedDeltaNet(config, weights).forward(tokens) - exact).abs().max()
    # The bound must stay a statement: far below the logits themselves.
    assert error < 1e-4 * exact.abs().max()
    return 8 * float(error)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("tied", [False, True])
def test_converted_logits_agree(tmp_path: Path, kind: str, tied: bool) -> None:
    model = build(kind, tie_word_embeddings=tied)
    config = convert(model, tmp_path)
    assert load_config(tmp_path) == config
    assert (config.num_heads, config.num_v_heads, config.head_v_dim) == (2, 6, 24)
    assert config.eos_token_ids == (1, 2)
    # 70 tokens cross a chunk of 64 in the peer's chunked rule.
    tokens = torch.randint(0, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
    weights = load_weights(tmp_path, config)
    bound = tolerance(tokens, config, weights)
    got = ReferenceGatedDeltaNet(config, weights).forward(tokens)
    assert float(expected.std()) > 0.1
    assert (got - expected).abs().max() < bound

    # Every folded detail matters: without it the difference is far above the bound.
    norm = "model.layers.1.attn_norm.weight"
    broken = ReferenceGatedDeltaNet(config, {**weights, norm: weights[norm] - 1})
    assert (broken.forward(tokens) - expected).abs().max() > 20 * bound
    swapped = dict(weights)
    for name in ("a", "b"):
        key = f"model.layers.2.attn.{name}_proj.weight"
        swapped[key] = weights[key].roll(1, 0)
    broken = ReferenceGatedDeltaNet(config, swapped)
    assert (broken.forward(tokens) - expected).abs().max() > 20 * bound


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_directory_gives_the_same_as_the_model(tmp_path: Path, kind: str) -> None:
    model = build(kind, seed=3).bfloat16()
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    convert(model, tmp_path / "a")
    convert(tmp_path / "hf", tmp_path / "b")
    config = load_config(tmp_path / "a")
    assert load_config(tmp_path / "b") == config
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    one, two = (load_weights(tmp_path / name, config) for name in "ab")
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name])


def test_multimodal_checkpoints_give_their_text_model() -> None:
    model = build("qwen3_5")
    config = convert_config(model.config.to_dict())
    plain = convert_weights(config, model.state_dict())
    nested = {k.replace("model.", "model.language_model.", 1): v for k, v in model.state_dict().items()}
    nested["model.visual.patch_embed.weight"] = torch.ones(2)
    nested["mtp.fc.weight"] = torch.ones(2)
    for name, tensor in convert_weights(config, nested).items():
        assert torch.equal(tensor, plain[name])
    outer = {"model_type": "qwen3_5", "text_config": model.config.to_dict()}
    assert convert_config(outer) == config


def values(**changes: Any) -> dict[str, Any]:
    return {**Qwen3_5TextConfig(**SIZES).to_dict(), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type: got 'llama'"),
        (
            {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            "layer_types: got full_attention, want linear_attention only",
        ),
        ({"layer_types": ["linear_attention"]}, "want a list with one entry for each layer"),
        ({"layer_types": None}, "layer_types: got None"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"model_type": "qwen3_next", "num_experts": 8}, "mixture-of-experts"),
        ({"linear_key_head_dim": 0}, "a size is missing or not a number"),
        ({"linear_num_value_heads": 5}, "num_v_heads: got 5, want a multiple"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unrepresentable_configs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_config(values(**changes))
    (tmp_path / "config.json").write_text(json.dumps(values(**changes)))
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_misfitting_weights(tmp_path: Path) -> None:
    model = build("qwen3_5")
    config = convert_config(model.config.to_dict())
    state = dict(model.state_dict())
    with pytest.raises(ValueError, match=r"1 tensors have no place .*self_attn\.q_proj"):
        convert_weights(config, {**state, "model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)})
    name = "model.layers.1.linear_attn.in_proj_qkv.weight"
    with pytest.raises(ValueError, match=r"in_proj_qkv\.weight has shape \[3, 3\], want \[208, 48\]"):
        convert_weights(config, {**state, name: torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"in_proj_qkv\.weight has dtype torch\.int8"):
        convert_weights(config, {**state, name: state[name].to(torch.int8)})
    del state[name]
    with pytest.raises(ValueError, match=r"in_proj_qkv\.weight is missing"):
        convert_weights(config, state)
