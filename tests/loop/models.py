"""Small models for loop tests: random weights with sharp logits, so that greedy decoding is not one repeated
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.checkpoint import expected_tensors
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.llama import LlamaForCausalLM
from specdec.models.llama_checkpoint import llama_tensors
from specdec.models.llama_config import LlamaConfig


def random_model(
    seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: object
) -> GatedDeltaNetForCausalLM:
    """A two-layer Gated DeltaNet with random weights."""
    sizes: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_v_heads": 4,
        "head_dim": 32,
        "expand_v": 1.0,
        "intermediate_size": 96,
        "bos_token_id": 0,
        "eos_token_ids": (0,),
        "tie_word_embeddings": True,
        **overrides,
    }
    config = GatedDeltaNetConfig(**sizes)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: random_tensor(name, shape, generator) for name, shape in expected_tensors(config).items()
    }
    return GatedDeltaNetForCausalLM(config, weights, dtype=dtype)


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random tensor of a size that suits its checkpoint name."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name.endswith("A_log"):
        return noise.abs()
    if name.endswith(("dt_bias", "bias")) or "conv1d" in name:
        return 0.5 * noise
    return noise * shape[-1] ** -0.5


def llama_config(**overrides: object) -> LlamaConfig:
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


def llama_weights(config: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
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
            # Queries and keys are larger, so that attention is no average of everything, and logits, too.
            larger = 2.0 if "q_proj" in name or "k_proj" in name else 1.3 if "embed" in name else 1.0
            weights[name] = noise * shape[-1] ** -0.5 * larger
    return weights


def random_llama(
    seed: int = 0, *, dtype: torch.dtype = torch.float32, **overrides: object
) -> LlamaForCausalLM:
    """A model with random weights."""
    config = llama_config(**overrides)
    return LlamaForCausalLM(config, llama_weights(config, seed), dtype=dtype)


FAMILIES = {"gated deltanet": random_model, "llama": random_llama}
