"""The model that a drafter is trained for: what it computes, and the weights that the drafter shares."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from specdec.models import load_model
from specdec.models.base import CausalLM
from specdec.models.checkpoint import load_config, load_weights, weights_sha256
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.features import Feature

GROUPS = ("last", "fused", "readouts", "none")


class FrozenTarget:
    """A target with its embedding and head as plain float32 tensors.

    Args:
        directory: of its checkpoint.

    Attributes:
        directory: as given.
        config: sizes.
        sha256: of the weights.
        model: computes features.
        weights: all of its tensors, by the names of the checkpoint.
        embeddings: `[V, D]`.
        head: `[V, D]`.
        last: the feature behind which final norm and head make the target's distribution.

    Raises:
        ValueError: it cannot be loaded.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: GatedDeltaNetConfig = load_config(directory)
        self.sha256 = weights_sha256(directory)
        self.model: CausalLM = load_model(directory)
        self.weights = load_weights(directory, self.config)
        self.embeddings = self.weights["model.embeddings.weight"]
        self.head = self.weights.get("lm_head.weight", self.embeddings)
        self.last = Feature("hidden", self.config.num_hidden_layers - 1)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What the head reads, from features `last` `[..., D]`."""
        weight = self.weights["model.norm.weight"]
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)

    def first_layer(self) -> dict[str, Tensor]:
        """Tensors of the first block, by the names of a drafter's `layer`."""
        prefix = "model.layers.0."
        return {name.removeprefix(prefix): x for name, x in self.weights.items() if name.startswith(prefix)}

    def choose_features(self, text: str) -> tuple[Feature, ...]:
        """The features that `text` names: a comma-separated list of features and of these groups.

        last: the last hidden state; fused: the hidden states of a low, a middle and the last layer; readouts:
        the recurrent read-outs of these layers; none: no feature, alone.

        Raises:
            ValueError: it names something else, something twice or a layer that the target does not have.
        """
        top = self.config.num_hidden_layers - 1
        layers = sorted({min(1, top), top // 2, top})
        chosen: list[Feature] = []
        if text.strip() == "none":
            return ()
        for part in (piece.strip() for piece in text.split(",")):
            if part == "last":
                chosen.append(self.last)
            elif part in ("fused", "readouts"):
                kind = "hidden" if part == "fused" else "readout"
                chosen += [Feature.parse(f"{kind}:{layer}") for layer in layers]
            else:
                try:
                    feature = Feature.parse(part)
                    self.model.feature_size(feature)
                except ValueError as error:
                    raise ValueError(f"features: {error}; groups are {', '.join(GROUPS)}") from None
                chosen.append(feature)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"features: got {text!r}, want each at most once")
        return tuple(chosen)
