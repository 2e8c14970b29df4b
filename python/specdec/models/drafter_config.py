"""Configuration of a recurrent drafter, read from an untrusted `config.json`.

A recurrent drafter is one Gated DeltaNet layer between its target's embedding and its target's head
(models/recurrent_drafter.py). Everything is checked here, before any tensor is allocated, so that the code
behind can rely on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec._checks import check_integer, check_keys, check_label, check_sha256, shown
from specdec.models.checkpoint import layer_tensors
from specdec.models.config import GatedDeltaNetConfig, read_json_object

MODEL_TYPE = "specdec_recurrent_drafter"
VERSION = 1

_MAX_CONFIG_BYTES = 1 << 20
_MAX_FEATURES = 64
_MAX_FEATURE_SIZE = 1 << 20
_FEATURE = re.compile(r"(?:hidden|readout):(?:0|[1-9][0-9]{0,3})", re.ASCII)
_LAYER_KEYS = (
    "num_hidden_layers",
    "num_heads",
    "num_v_heads",
    "head_dim",
    "expand_v",
    "intermediate_size",
    "use_gate",
    "use_short_conv",
    "conv_size",
    "conv_bias",
    "allow_neg_eigval",
    "norm_eps",
)
_KEYS = ("model_type", "version", "features", "feature_size", "layer", "draft_vocab_size", "target")
_TARGET_KEYS = ("model", "sha256", "vocab_size", "hidden_size")


@dataclass(frozen=True)
class DrafterTarget:
    """The model that a drafter was trained for.

    Attributes:
        model: its name, for messages.
        sha256: of its weights, see `checkpoint.weights_sha256`: 64 hexadecimal digits in lower case.
        vocab_size: rows V of its embedding and head.
        hidden_size: width D of its residual stream.

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """

    model: str
    sha256: str
    vocab_size: int
    hidden_size: int

    def __post_init__(self) -> None:
        check_label("drafter config: target.model", self.model)
        check_sha256("drafter config: target.sha256", self.sha256)
        # The bounds of both are those of the layer's own configuration.
        check_integer("drafter config: target.vocab_size", self.vocab_size, 1)
        check_integer("drafter config: target.hidden_size", self.hidden_size, 1)


@dataclass(frozen=True)
class RecurrentDrafterConfig:
    """Sizes of a recurrent drafter, every value checked.

    Attributes:
        features: names of the target's features that it reads, "hidden:N" or "readout:N"
            (models/features.py), as they lie side by side; empty for the independent drafter, which reads
            none.
        feature_size: channels F of all features together; 0 exactly without features.
        layer: the layer's sizes: one layer, vocabulary and width those of `target`.
        draft_vocab_size: tokens that it can draft, or None for the target's whole vocabulary.
        target: the model that it was trained for.

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """

    features: tuple[str, ...]
    feature_size: int
    layer: GatedDeltaNetConfig
    draft_vocab_size: int | None
    target: DrafterTarget

    def __post_init__(self) -> None:
        if len(self.features) > _MAX_FEATURES:
            raise ValueError(
                f"drafter config: features: got {len(self.features)}, want at most {_MAX_FEATURES}"
            )
        for feature in self.features:
            if not isinstance(feature, str) or not _FEATURE.fullmatch(feature):
                raise ValueError(
                    f'drafter config: features: got {shown(feature)}, want "hidden:N" or "readout:N"'
                )
        if len(set(self.features)) < len(self.features):
            raise ValueError(
                f"drafter config: features: got {shown(list(self.features))}, want each at most once"
            )
        least, most = (1, _MAX_FEATURE_SIZE) if self.features else (0, 0)
        check_integer("drafter config: feature_size", self.feature_size, least, most)
        for name, want in (
            ("num_hidden_layers", 1),
            ("vocab_size", self.target.vocab_size),
            ("hidden_size", self.target.hidden_size),
        ):
            if getattr(self.layer, name) != want:
                raise ValueError(
                    f"drafter config: layer.{name}: got {getattr(self.layer, name)}, want {want}"
                )
        if self.draft_vocab_size is not None:
            check_integer(
                "drafter config: draft_vocab_size", self.draft_vocab_size, 1, self.target.vocab_size
            )

    @property
    def num_parameters(self) -> int:
        """Numbers in the drafter's file. Embedding and head are the target's and not among them."""
        total = 0
        for shape in drafter_tensors(self).values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total - (self.draft_vocab_size or 0)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecurrentDrafterConfig:
        """The configuration in `values`, the contents of a drafter's `config.json`.

        Raises:
            ValueError: a key that is missing or unknown, a value of the wrong type or out of range, another
                model type or version.
        """
        if values.get("model_type") != MODEL_TYPE:
            got = shown(values.get("model_type"))
            raise ValueError(f"drafter config: model_type: got {got}, want {MODEL_TYPE!r}")
        check_integer("drafter config: version", values.get("version"), VERSION, VERSION)
        check_keys("drafter config", values, _KEYS)
        target, layer = (_object(values, name) for name in ("target", "layer"))
        check_keys("drafter config: target", target, _TARGET_KEYS)
        check_keys("drafter config: layer", layer, _LAYER_KEYS)
        if not isinstance(values["features"], list):
            got = shown(values["features"])
            raise ValueError(f"drafter config: features: got {got}, want a list of names")
        trained_for = DrafterTarget(**target)
        try:
            sizes = GatedDeltaNetConfig(
                **layer, vocab_size=trained_for.vocab_size, hidden_size=trained_for.hidden_size
            )
        except ValueError as error:
            raise ValueError(f"drafter {error}") from None
        return cls(
            features=tuple(values["features"]),
            feature_size=values["feature_size"],
            layer=sizes,
            draft_vocab_size=values["draft_vocab_size"],
            target=trained_for,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> RecurrentDrafterConfig:
        """The configuration in the JSON file `path`. Raises ValueError where it is missing or not valid."""
        return cls.from_dict(read_json_object(Path(path), _MAX_CONFIG_BYTES))

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` from which `from_dict` returns an equal configuration."""
        return {
            "model_type": MODEL_TYPE,
            "version": VERSION,
            "features": list(self.features),
            "feature_size": self.feature_size,
            "layer": {key: getattr(self.layer, key) for key in _LAYER_KEYS},
            "draft_vocab_size": self.draft_vocab_size,
            "target": {key: getattr(self.target, key) for key in _TARGET_KEYS},
        }


def drafter_tensors(config: RecurrentDrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the drafter's file holds.

    Matrices (`is_matrix`) are bfloat16 in a file of `save_drafter`, `draft_vocab` is int32, everything else
    float32. Without features there is neither `fuse_*` nor `own_*`.
    """
    width, read = config.target.hidden_size, config.feature_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.features:
        shapes["fuse_norm.weight"], shapes["fuse_proj.weight"] = (read,), (width, read)
        shapes["own_norm.weight"], shapes["own_proj.weight"] = (width,), (width, width)
    shapes["embed_norm.weight"], shapes["embed_proj.weight"] = (width,), (width, width)
    shapes.update({f"layer.{name}": shape for name, shape in layer_tensors(config.layer).items()})
    shapes["norm.weight"] = (width,)
    if config.draft_vocab_size is not None:
        shapes["draft_vocab"] = (config.draft_vocab_size,)
    return shapes


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values[name]
    if not isinstance(value, dict):
        raise ValueError(f"drafter config: {name}: got {shown(value)}, want an object")
    return value
