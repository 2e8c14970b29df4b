"""Configurations from untrusted files: what is refused, in one line, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.models import llama_config, llama_weights
from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import write_tensors
from specdec.models.llama import LlamaForCausalLM
from specdec.models.llama_checkpoint import llama_tensors
from specdec.models.llama_config import LlamaConfig

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 60,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": [0, 3],
    "tie_word_embeddings": True,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope(**values: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **values}}


HOSTILE = [
    ({"model_type": "gpt2"}, "model_type: got 'gpt2'"),
    ({"model_type": ["llama"]}, r"model_type: got \['llama'\]"),
    ({"vocab_size": None}, "vocab_size: got None"),
    ({"vocab_size": 10**12}, "vocab_size: got 1000000000000"),
    ({"hidden_size": True}, "hidden_size: got True"),
    ({"hidden_size": 60.0}, "hidden_size: got 60.0"),
    ({"num_hidden_layers": -1}, "num_hidden_layers: got -1"),
    ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
    ({"num_attention_heads": 7}, "num_attention_heads: got 7, want a multiple of num_key_value_heads"),
    ({"head_dim": 20}, "head_dim: got 20, want a multiple of 16"),
    ({"head_dim": 512}, "head_dim: got 512"),
    ({"head_dim": None, "hidden_size": 6 * 10}, "head_dim: got 10"),
    ({"intermediate_size": "77"}, "intermediate_size: got '77'"),
    ({"max_position_embeddings": None}, "max_position_embeddings: got None"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps: got 0.0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: got 1"),
    ({"attention_bias": "yes"}, "qkv_bias: got 'yes'"),
    ({"bos_token_id": 61}, "bos_token_id: got 61"),
    ({"eos_token_id": [0, -1]}, "eos_token_id: got -1"),
    ({"eos_token_id": {"a": 1}}, "eos_token_id: got {'a': 1}"),
    ({"eos_token_id": [1] * 65}, "eos_token_id: got 65 entries"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config: got"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window: got 4096"),
    ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding_window: got 4096"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: got"),
    (
        {"hidden_size": 1 << 17, "intermediate_size": 1 << 17, "num_hidden_layers": 1024},
        "parameters, want at most",
    ),
    (rope(rope_type="dynamic", factor=2.0), "rope_type: got 'dynamic', whose angles depend on the length"),
    (rope(rope_type="longrope"), "rope_type: got 'longrope', whose angles"),
    (rope(rope_type="spiral"), "rope_type: got 'spiral', want"),
    (rope(rope_type=["yarn"]), r"rope_type: got \['yarn'\], want a name"),
    ({"rope_parameters": [1]}, r"rope_parameters: got \[1\], want an object"),
    ({"rope_scaling": "linear"}, "rope_scaling: got 'linear', want an object"),
    (rope(rope_type="linear"), "rope_parameters: got no factor, which linear needs"),
    (rope(rope_type="linear", factor=0.5), "rope factor: got 0.5"),
    (rope(rope_type="linear", factor="8"), "rope factor: got '8'"),
    (rope(**{**LLAMA3, "low_freq_factor": None}), "got no low_freq_factor, which llama3 needs"),
    (
        rope(**{**LLAMA3, "high_freq_factor": 1.0}),
        "high_freq_factor: got 1.0, want more than low_freq_factor",
    ),
    (rope(rope_type="yarn", original_max_position_embeddings=0), "original_max_position_embeddings: got 0"),
    (rope(rope_type="yarn", factor=float("inf")), "rope factor: got inf"),
    (rope(rope_type="yarn", factor=2.0, attention_factor=-1.0), "attention_factor: got -1.0"),
    (rope(rope_type="yarn", factor=2.0, mscale="x", mscale_all_dim=1.0), "mscale: got 'x'"),
    (rope(rope_type="yarn", factor=2.0, beta_fast=0.5), "beta_fast: got 0.5"),
    (rope(rope_type="yarn", factor=2.0, truncate=0), "truncate: got 0"),
    ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta: got 1.0"),
    ({"rope_theta": "big"}, "rope_theta: got 'big'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, want 1"),
]


@pytest.mark.parametrize(("changes", "message"), HOSTILE)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    LlamaConfig.from_dict(SMALL)
    with pytest.raises(ValueError, match=rf"^config: .*{message}") as error:
        LlamaConfig.from_dict({**SMALL, **changes})
    assert "\n" not in str(error.value)


def test_what_is_read() -> None:
    config = LlamaConfig.from_dict({**SMALL, "num_key_value_heads": None, "rope_theta": 500.0})
    assert config.num_key_value_heads == 6
    assert config.rope.theta == 500.0
    assert config.eos_token_ids == (0, 3)
    assert LlamaConfig.from_dict({**SMALL, "eos_token_id": None}).eos_token_ids == ()
    assert LlamaConfig.from_dict({k: v for k, v in SMALL.items() if k != "eos_token_id"}).eos_token_ids == (
        2,
    )
    qwen = LlamaConfig.from_dict(
        {**SMALL, "model_type": "qwen2", "sliding_window": 99, "use_sliding_window": False}
    )
    assert qwen.qkv_bias
    assert not qwen.output_bias


@pytest.mark.parametrize("extra", [{}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted(tied: bool, extra: dict[str, Any]) -> None:
    config = llama_config(tie_word_embeddings=tied, **extra)
    counted = sum(torch.Size(shape).numel() for shape in llama_tensors(config).values())
    assert config.num_parameters == counted


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    weights = llama_weights(llama_config())
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(96)
    weights["model.norm.weight"] = torch.ones(59)
    write_tensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(ValueError, match="do not fit the config") as error:
        load_model(tmp_path)
    for part in (
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.self_attn.q_proj.bias is unexpected",
        "model.norm.weight has shape [59], want [60]",
    ):
        assert part in str(error.value)


def test_other_model_types_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    for load in (load_model, load_tokenizer):
        with pytest.raises(
            ValueError, match="model_type: got 'mamba', which is not supported, want gated_deltanet"
        ):
            load(tmp_path)


def test_arguments(tmp_path: Path) -> None:
    model = LlamaForCausalLM(llama_config(), llama_weights(llama_config()))
    with pytest.raises(ValueError, match="count: got 3"):
        model.first_layers(3)
    with pytest.raises(ValueError, match=r"dtype: got torch.float16"):
        LlamaForCausalLM(llama_config(), {}, dtype=torch.float16)
    cache = model.new_cache(1)
    with pytest.raises(ValueError, match=r"prompts: got lengths \[0\]"):
        model.prefill([[]], cache=cache, slots=[0])
    with pytest.raises(ValueError, match="prompts: got token ids from 5 to 61, want 0 to 60"):
        model.prefill([[5, 61]], cache=cache, slots=[0])
    early = model.first_layers(1)
    assert early.num_layers == 1
    assert torch.equal(
        early.prefill([[5, 6]], cache=early.new_cache(1), slots=[0]),
        LlamaForCausalLM(llama_config(num_hidden_layers=1), llama_weights(llama_config())).prefill(
            [[5, 6]], cache=early.new_cache(1), slots=[0]
        ),
    )
