"""Recurrent drafters with random weights, for targets of `loop.models`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loop.models import random_tensor
from specdec.models.drafter_config import DrafterTarget, RecurrentDrafterConfig, drafter_tensors
from specdec.models.features import Feature
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.recurrent_drafter import RecurrentDrafterModel

FEATURES = ("hidden:1", "readout:0")


def random_files(
    target: GatedDeltaNetForCausalLM,
    seed: int = 0,
    *,
    features: tuple[str, ...] = FEATURES,
    draft_vocab_size: int | None = None,
    sha256: str = "0" * 64,
    **layer: object,
) -> tuple[RecurrentDrafterConfig, dict[str, Tensor]]:
    """Configuration and tensors of a drafter whose layer has the target's sizes, or those in `layer`."""
    c = target.config
    config = RecurrentDrafterConfig(
        features=features,
        feature_size=sum(target.feature_size(Feature.parse(f)) for f in features),
        layer=replace(c, num_hidden_layers=1, early_exit_layers=(), **layer),  # type: ignore[arg-type]
        draft_vocab_size=draft_vocab_size,
        target=DrafterTarget("random", sha256, c.vocab_size, c.hidden_size),
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in drafter_tensors(config).items():
        if name == "draft_vocab":
            chosen = torch.randperm(c.vocab_size, generator=generator)[: shape[0]]
            tensors[name] = chosen.sort().values.int()
        else:
            tensors[name] = random_tensor(name, shape, generator)
    return config, tensors


def random_drafter(
    target: GatedDeltaNetForCausalLM, seed: int = 0, **options: object
) -> RecurrentDrafterModel:
    """A recurrent drafter of `random_files`."""
    config, tensors = random_files(target, seed, **options)  # type: ignore[arg-type]
    return RecurrentDrafterModel(config, tensors, target)
