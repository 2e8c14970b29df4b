"""Conversion of Hugging Face Gated DeltaNet text models to the FLA checkpoint format that this package reads.

Qwen3.5 and Qwen3-Next use the same layer under other names: q, k, v (and gates) share fused projections and
one convolution, and the norms of the residual stream store their distance from one. A model whose layers are
all `linear_attention` with dense MLPs is representable; anything else is refused by name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec._checks import shown
from specdec.models.checkpoint import (
    CONFIG_NAME,
    check_tensors,
    is_matrix,
    open_weights,
    save_model,
    weight_files,
)
from specdec.models.config import GatedDeltaNetConfig, read_json_object
from specdec.models.tokenizer import TOKENIZER_NAME

_MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_next")
_MAX_CONFIG_BYTES = 1 << 20
# Parts of a published checkpoint beside the text model: image encoder and multi-token-prediction head.
_BESIDE = ("model.visual.", "visual.", "mtp.")


def convert(model_or_dir: Any, out_dir: str | os.PathLike[str]) -> GatedDeltaNetConfig:
    """Write a Hugging Face Qwen3.5 or Qwen3-Next style text model as a model directory of this package.

    Args:
        model_or_dir: a `transformers` causal language model, or the directory of one (`config.json` and
            safetensors). A directory is read without `transformers`, and its `tokenizer.json` is copied.
        out_dir: receives `config.json` and the weights. Matrices keep their dtype; the rest is float32.

    Returns:
        The configuration that was written.

    Raises:
        ValueError: the model has full-attention or mixture-of-experts layers, another activation, quantised
            weights, or tensors that do not fit its own configuration. Nothing has been written then.
    """
    tokenizer: Path | None = None
    if isinstance(model_or_dir, (str, os.PathLike)):
        directory = Path(model_or_dir)
        values = read_json_object(directory / CONFIG_NAME, _MAX_CONFIG_BYTES)
        config = convert_config(values)  # refused before any weight is read
        weights = _read_tensors(directory)
        tokenizer = directory / TOKENIZER_NAME
    else:
        values = model_or_dir.config.to_dict()
        config = convert_config(values)
        weights = dict(model_or_dir.state_dict())
    converted = convert_weights(config, weights)
    save_model(out_dir, config, converted)
    if tokenizer is not None and tokenizer.is_file():
        shutil.copyfile(tokenizer, Path(out_dir) / TOKENIZER_NAME)
    return config


def convert_config(values: Mapping[str, Any]) -> GatedDeltaNetConfig:
    """The configuration that a Hugging Face `config.json` describes, or ValueError."""
    kind = values.get("model_type")
    if kind not in _MODEL_TYPES:
        raise ValueError(f"config: model_type: got {shown(kind)}, want one of {', '.join(_MODEL_TYPES)}")
    text = values.get("text_config") or values
    if not isinstance(text, Mapping):
        raise ValueError(f"config: text_config: got {shown(text)}, want an object")
    layers = text.get("num_hidden_layers")
    types = text.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(
            f"config: layer_types: got {shown(types)}, want a list with one entry for each layer"
        )
    others = {str(t) for t in types} - {"linear_attention"}
    if others:
        raise ValueError(f"config: layer_types: got {', '.join(sorted(others))}, want linear_attention only")
    if kind == "qwen3_next":
        dense = set(text.get("mlp_only_layers") or ())
        step = text.get("decoder_sparse_step") or 1
        if text.get("num_experts") and any(i not in dense and (i + 1) % step == 0 for i in range(len(types))):
            raise ValueError(
                "config: num_experts: got mixture-of-experts layers, want dense MLPs in every layer"
            )
    if text.get("hidden_act") != "silu":
        raise ValueError(f"config: hidden_act: got {shown(text.get('hidden_act'))}, want 'silu'")
    try:
        head_dim, value_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
        translated = {
            "vocab_size": text["vocab_size"],
            "hidden_size": text["hidden_size"],
            "num_hidden_layers": layers,
            "num_heads": text["linear_num_key_heads"],
            "num_v_heads": text["linear_num_value_heads"],
            "head_dim": head_dim,
            "expand_v": value_dim / head_dim,
            "intermediate_size": text["intermediate_size"],
            "conv_size": text["linear_conv_kernel_dim"],
            "norm_eps": text["rms_norm_eps"],
        }
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"config: a size is missing or not a number ({error})") from None
    return GatedDeltaNetConfig.from_dict(
        {
            **translated,
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
            "bos_token_id": text.get("bos_token_id"),
            "eos_token_id": text.get("eos_token_id"),
            "quantization_config": values.get("quantization_config"),
        }
    )


def convert_weights(config: GatedDeltaNetConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face tensors -> FLA tensors for `config`.

    Args:
        config: from `convert_config`.
        weights: the state dict of the causal language model; an image encoder and a multi-token-prediction
            head beside the text model are ignored.

    Raises:
        ValueError: names missing, left-over and mis-shaped tensors.
    """
    left: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not name.startswith(_BESIDE):
            left[name.replace("model.language_model.", "model.", 1)] = tensor
    out: dict[str, Tensor] = {}

    def take(name: str, *shape: int) -> Tensor:
        tensor = left.pop(name, None)
        if tensor is None:
            raise ValueError(f"weights: {name} is missing")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"weights: {name} has shape {list(tensor.shape)}, want {list(shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"weights: {name} has dtype {tensor.dtype}, want a floating-point dtype")
        return tensor

    c = config
    hidden, inner = c.hidden_size, c.intermediate_size
    qkv_sizes = [c.key_dim, c.key_dim, c.value_dim]
    out["model.embeddings.weight"] = take("model.embed_tokens.weight", c.vocab_size, hidden)
    out["model.norm.weight"] = _one_plus(take("model.norm.weight", hidden))
    if c.tie_word_embeddings:
        left.pop("lm_head.weight", None)
    else:
        out["lm_head.weight"] = take("lm_head.weight", c.vocab_size, hidden)
    for i in range(c.num_hidden_layers):
        old, new = f"model.layers.{i}.", f"model.layers.{i}."
        mixer = old + "linear_attn."
        out[new + "attn_norm.weight"] = _one_plus(take(old + "input_layernorm.weight", hidden))
        out[new + "mlp_norm.weight"] = _one_plus(take(old + "post_attention_layernorm.weight", hidden))
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            out[f"{new}mlp.{name}.weight"] = take(f"{old}mlp.{name}.weight", *shape)
        if mixer + "in_proj_qkvz.weight" in left:
            qkvz = take(mixer + "in_proj_qkvz.weight", c.conv_dim + c.value_dim, hidden)
            ba = take(mixer + "in_proj_ba.weight", 2 * c.num_v_heads, hidden)
            q, k, v, z, b, a = _ungroup(c, qkvz, ba)
        else:
            qkv = take(mixer + "in_proj_qkv.weight", c.conv_dim, hidden)
            q, k, v = torch.split(qkv, qkv_sizes)
            z = take(mixer + "in_proj_z.weight", c.value_dim, hidden)
            b = take(mixer + "in_proj_b.weight", c.num_v_heads, hidden)
            a = take(mixer + "in_proj_a.weight", c.num_v_heads, hidden)
        for name, tensor in zip("qkvgba", (q, k, v, z, b, a), strict=True):
            out[f"{new}attn.{name}_proj.weight"] = tensor
        taps = take(mixer + "conv1d.weight", c.conv_dim, 1, c.conv_size)
        for name, tensor in zip("qkv", torch.split(taps, qkv_sizes), strict=True):
            out[f"{new}attn.{name}_conv1d.weight"] = tensor
        out[new + "attn.A_log"] = take(mixer + "A_log", c.num_v_heads)
        out[new + "attn.dt_bias"] = take(mixer + "dt_bias", c.num_v_heads)
        # The head norm, unlike the others, stores its weight as it is.
        out[new + "attn.o_norm.weight"] = take(mixer + "norm.weight", c.head_v_dim)
        out[new + "attn.o_proj.weight"] = take(mixer + "out_proj.weight", hidden, c.value_dim)
    if left:
        some = ", ".join(sorted(left)[:4])
        raise ValueError(f"weights: {len(left)} tensors have no place in a Gated DeltaNet, among them {some}")
    out = {name: tensor if is_matrix(name) else tensor.float() for name, tensor in out.items()}
    check_tensors(config, {name: tuple(tensor.shape) for name, tensor in out.items()}, "converted weights")
    return out


def _one_plus(weight: Tensor) -> Tensor:
    """The factor of a norm that stores its distance from one, in float32 as that norm computes it."""
    return 1.0 + weight.float()


def _ungroup(config: GatedDeltaNetConfig, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
    """Qwen3-Next's fused projections, whose rows are grouped by key head, as q, k, v, z, b, a matrices."""
    group = config.num_v_heads // config.num_heads
    sizes = [config.head_k_dim, config.head_k_dim, group * config.head_v_dim, group * config.head_v_dim]
    hidden = config.hidden_size
    # [HK, rows of one key head, hidden]
    parts = torch.split(qkvz.reshape(config.num_heads, -1, hidden), sizes, dim=1)
    gates = torch.split(ba.reshape(config.num_heads, -1, hidden), [group, group], dim=1)
    return tuple(part.reshape(-1, hidden) for part in (*parts, *gates))


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors checkpoint, without those beside the text model."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                if not name.startswith(_BESIDE):
                    tensors[name] = file.get_tensor(name)
    return tensors
