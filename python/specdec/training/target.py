"""Models whose weights stay as they are: what they compute on a text, and what is trained behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from specdec.models import load_model
from specdec.models.base import CausalLM
from specdec.models.checkpoint import is_gguf, load_config, load_weights, model_type, weights_sha256
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.features import Feature, FeatureTap
from specdec.models.llama_config import MODEL_TYPES
from specdec.training.optimization import multiplies_bfloat16

GROUPS = ("last", "fused", "readouts", "none")


class FrozenModel(ABC):
    """A model with its final norm and head as plain float32 tensors.

    Args:
        directory: of its checkpoint, or its GGUF file.
        num_layers: blocks.
        norm: [D] weight of the final norm.
        norm_eps: of its norms.
        head: [V, D].
        eos_token_ids: tokens that end a text.

    Attributes:
        directory, num_layers, norm_eps, head, eos_token_ids: as given.
        sha256: of the weights.
        last: the feature behind which final norm and head make the model's distribution.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_layers: int,
        norm: Tensor,
        norm_eps: float,
        head: Tensor,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.directory = directory
        self.num_layers = num_layers
        self.norm_eps = norm_eps
        self.head = head.float()
        self.eos_token_ids = eos_token_ids
        self.sha256 = weights_sha256(directory)
        self.last = Feature("hidden", num_layers - 1)
        self._norm = norm.float()

    @property
    def name(self) -> str:
        """For messages and files."""
        path = self.directory.resolve()
        return path.stem if is_gguf(path) else path.name or "model"

    @property
    def hidden_size(self) -> int:
        """Width D of the residual stream."""
        return self.head.shape[1]

    @property
    def vocab_size(self) -> int:
        """Number of tokens V."""
        return self.head.shape[0]

    def check_weights(self, sha256: str, out: Path) -> None:
        """Raises ValueError where the run in `out` was begun with other weights, those of `sha256`."""
        if sha256 != self.sha256:
            raise ValueError(f"{self.directory}: has other weights than those that the run in {out} is for")

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What the head reads, from the residual stream `[..., D]` behind a layer."""
        return F.rms_norm(hidden, self._norm.shape, self._norm, self.norm_eps)

    @abstractmethod
    def feature_size(self, feature: Feature) -> int:
        """Numbers that a feature has for each token; see `CausalLM.feature_size`."""

    @abstractmethod
    def read(self, tokens: Tensor, tap: FeatureTap) -> None:
        """Computes features of texts, each read on its own from its first token.

        Args:
            tokens: int64 [B, T].
            tap: collects [B, T, F].
        """


class FrozenTarget(FrozenModel):
    """A Gated DeltaNet, read with this package's chunked prefill.

    Args:
        directory: of its checkpoint.

    Attributes:
        config: sizes.
        model: computes features.
        weights: all of its tensors, by the names of the checkpoint.
        embeddings: `[V, D]`.

    Raises:
        ValueError: it cannot be loaded.
    """

    def __init__(self, directory: Path) -> None:
        self.config: GatedDeltaNetConfig = load_config(directory)
        self.model: CausalLM = load_model(directory)
        self.weights = load_weights(directory, self.config)
        self.embeddings = self.weights["model.embeddings.weight"]
        super().__init__(
            directory,
            num_layers=self.config.num_hidden_layers,
            norm=self.weights["model.norm.weight"],
            norm_eps=self.config.norm_eps,
            head=self.weights.get("lm_head.weight", self.embeddings),
            eos_token_ids=self.config.eos_token_ids,
        )

    def feature_size(self, feature: Feature) -> int:
        return self.model.feature_size(feature)

    def read(self, tokens: Tensor, tap: FeatureTap) -> None:
        rows = len(tokens)
        cache = self.model.new_cache(rows)
        self.model.prefill(tokens.tolist(), cache=cache, slots=range(rows), tap=tap)

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


def frozen_model(directory: Path) -> FrozenModel:
    """The model of either family that `resolve_model` found. Raises ValueError where it cannot be loaded."""
    if model_type(directory) in MODEL_TYPES:
        from specdec.training.llama_target import FrozenLlama

        return FrozenLlama(directory, autocast=multiplies_bfloat16())
    return FrozenTarget(directory)
