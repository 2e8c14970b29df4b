"""Reading Llama-family checkpoints: a directory with `config.json` and safetensors, or a GGUF file.

As for every checkpoint, names and shapes are compared with the configuration before anything is allocated,
and pickles are refused (`specdec.models.checkpoint`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specdec.models.checkpoint import (
    CONFIG_NAME,
    check_shapes,
    is_gguf,
    read_headers,
    read_tensors,
    weight_files,
)
from specdec.models.gguf_file import GGUFFile
from specdec.models.llama_config import LlamaConfig

# Buffers that older checkpoints carry along; they follow from the configuration.
_IGNORED = ".rotary_emb.inv_freq"


def llama_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of `config` holds."""
    hidden, inner = config.hidden_size, config.intermediate_size
    linear = {
        "self_attn.q_proj": (config.query_dim, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.key_dim, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.key_dim, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.query_dim, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
        for name, (outputs, inputs, bias) in linear.items():
            shapes[f"{layer}{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{layer}{name}.bias"] = (outputs,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def load_llama(source: Path, *, dtype: torch.dtype = torch.float32) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """The configuration and the weights of the model in a directory or a GGUF file.

    Args:
        source: the directory or the file.
        dtype: of the matrices; norms and biases are float32. A GGUF's weights are dequantised.

    Returns:
        The configuration, and name -> contiguous tensor, exactly the names of `llama_tensors`. A tied
        `lm_head.weight` that a checkpoint repeats is left out.

    Raises:
        ValueError: no weights, a damaged file, or tensors that are missing, unexpected, mis-shaped or not
            floating point.
    """
    if is_gguf(source):
        file = GGUFFile(source)
        config = LlamaConfig.from_dict(file.config())
        check_shapes(llama_tensors(config), file.shapes(), str(source))
        return config, {
            name: file.tensor(name, config).to(_stored(name, dtype)) for name in llama_tensors(config)
        }
    config = LlamaConfig.from_file(source / CONFIG_NAME)
    where, shapes = read_headers(
        weight_files(source), skipped=("lm_head.weight",) if config.tie_word_embeddings else ()
    )
    where = {name: path for name, path in where.items() if not name.endswith(_IGNORED)}
    check_shapes(llama_tensors(config), {name: shapes[name] for name in where}, str(source))
    return config, read_tensors(where, {name: _stored(name, dtype) for name in where})


def _stored(name: str, dtype: torch.dtype) -> torch.dtype:
    matrix = name.endswith("_proj.weight") or name in ("model.embed_tokens.weight", "lm_head.weight")
    return dtype if matrix else torch.float32
