"""Small models for loop tests: random weights with sharp logits, so that greedy decoding is not one repeated
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.checkpoint import expected_tensors
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM


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
