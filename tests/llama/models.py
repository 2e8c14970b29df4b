"""Small random Llama-family models with sharp logits, so that greedy decoding is not one repeated token."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.llama import LlamaForCausalLM
from specdec.models.llama_checkpoint import llama_tensors
from specdec.models.llama_config import LlamaConfig


def random_config(**overrides: object) -> LlamaConfig:
    """Two layers, grouped heads, sizes that no vector width divides."""
    sizes: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 60,
        "intermediate_size": 77,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "bos_token_id": 0,
        "eos_token_ids": (0,),
        "tie_word_embeddings": True,
        **overrides,
    }
    return LlamaConfig(**sizes)  # type: ignore[arg-type]


def random_weights(config: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in llama_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.5 * noise
        else:
            # Queries and keys are larger, so that attention is no average of everything.
            weights[name] = noise * shape[-1] ** -0.5 * (2.0 if "q_proj" in name or "k_proj" in name else 1.0)
    return weights


def random_llama(seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: object) -> LlamaForCausalLM:
    """A model with random weights."""
    config = random_config(**overrides)
    return LlamaForCausalLM(config, random_weights(config, seed), dtype=dtype)
