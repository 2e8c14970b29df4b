"""The file that says which sub-layers of a model are left out, read as untrusted input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdec._checks import check_integer, check_keys, check_label, check_sha256, shown
from specdec.models.checkpoint import write_json
from specdec.models.config import read_json_object
from specdec.models.skipping import MAX_LAYERS, SkipSet

FORMAT = "specdec_skip"
VERSION = 1

_MAX_BYTES = 16 << 20
_MAX_VOCAB = 1 << 24
_KEYS = ("format", "version", "model", "device", "dtype", "mixers", "mlps", "vocabulary", "int8", "measured")
_MODEL_KEYS = ("name", "sha256", "layers")
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class SkipFile:
    """A set that was chosen for a model on a machine.

    Attributes:
        skips: the set.
        model: the model's name, for messages.
        sha256: of its weights, 64 hexadecimal digits in lower case (`checkpoint.weights_sha256`).
        layers: number of its layers.
        device: what the set was chosen on, such as the processor's name.
        dtype: of the activations then, "float32" or "bfloat16".
        vocabulary: the only tokens that are drafted, ascending; None: all.
        measured: what whoever chose it measured, of any form that JSON has. Nothing here reads it.
        int8: whether drafts are made with int8 copies of the matrices.

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """

    skips: SkipSet
    model: str
    sha256: str
    layers: int
    device: str
    dtype: str
    vocabulary: tuple[int, ...] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    int8: bool = False

    def __post_init__(self) -> None:
        check_label("model", self.model)
        check_label("device", self.device)
        check_sha256("sha256", self.sha256)
        check_integer("layers", self.layers, 1, MAX_LAYERS)
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype: got {shown(self.dtype)}, want {' or '.join(_DTYPES)}")
        self.skips.check_layers(self.layers)
        if self.vocabulary is not None:
            check_vocabulary(self.vocabulary, _MAX_VOCAB)
        if not isinstance(self.int8, bool):
            raise ValueError(f"int8: got {shown(self.int8)}, want true or false")
        if not isinstance(self.measured, Mapping):
            raise ValueError(f"measured: got {shown(self.measured)}, want an object")

    @classmethod
    def read(cls, path: str | Path) -> SkipFile:
        """The set in a JSON file that `write` made.

        Raises:
            ValueError: the file is missing or not of this form; the message names it and what is wrong.
        """
        values = read_json_object(Path(path), _MAX_BYTES)
        try:
            return cls._of(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> SkipFile:
        if values.get("format") != FORMAT:
            raise ValueError(f"format: got {shown(values.get('format'))}, want {FORMAT!r}")
        check_integer("version", values.get("version"), VERSION, VERSION)
        values = {"int8": False, **values}  # it may be left out
        check_keys("the file", values, _KEYS)
        model = values["model"]
        if not isinstance(model, dict):
            raise ValueError(f"model: got {shown(model)}, want an object")
        check_keys("model", model, _MODEL_KEYS)
        vocabulary = values["vocabulary"]
        return cls(
            SkipSet(_layers("mixers", values["mixers"]), _layers("mlps", values["mlps"])),
            model["name"],
            model["sha256"],
            model["layers"],
            values["device"],
            values["dtype"],
            None if vocabulary is None else tuple(_list("vocabulary", vocabulary)),
            values["measured"],
            values["int8"],
        )

    def write(self, path: str | Path) -> None:
        """Writes the file, whole or not at all. Raises OSError where that fails."""
        write_json(
            Path(path),
            {
                "format": FORMAT,
                "version": VERSION,
                "model": {"name": self.model, "sha256": self.sha256, "layers": self.layers},
                "device": self.device,
                "dtype": self.dtype,
                "mixers": sorted(self.skips.mixers),
                "mlps": sorted(self.skips.mlps),
                "vocabulary": None if self.vocabulary is None else list(self.vocabulary),
                "int8": self.int8,
                "measured": dict(self.measured),
            },
        )

    def check_model(self, sha256: str | None, layers: int, vocab_size: int) -> None:
        """Refuses another model than the set was chosen for, for which it would say nothing.

        Args:
            sha256: of the model's weights; None where they came from no file: any will do.
            layers: number of its layers.
            vocab_size: tokens of its vocabulary.

        Raises:
            ValueError: it is another one.
        """
        digest = self.sha256 if sha256 is None else sha256
        if (digest, layers) != (self.sha256, self.layers):
            raise ValueError(
                f"chosen for {self.model} with {self.layers} layers and weights of SHA-256 "
                f"{self.sha256[:16]}..., but the model has {layers} and {digest[:16]}..."
            )
        if self.vocabulary is not None:
            check_vocabulary(self.vocabulary, vocab_size)


def shipped_skip_file(sha256: str) -> Path | None:
    """The file that comes with the package for the model of these weights; None for all other models."""
    assets = Path(str(resources.files("specdec"))) / "assets"
    paths = sorted(assets.glob("*/skip.json"))
    return next((path for path in paths if SkipFile.read(path).sha256 == sha256), None)


def check_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuses what is no draft vocabulary: token ids that ascend.

    Args:
        tokens: the ids.
        vocab_size: of the model.

    Raises:
        ValueError: there are none, one is outside the model's vocabulary, or they do not ascend.
    """
    if not tokens:
        raise ValueError("vocabulary: got no tokens, want at least one")
    for token in tokens:
        check_integer("vocabulary", token, 0, vocab_size - 1)
    for low, high in pairwise(tokens):
        if low >= high:
            raise ValueError(f"vocabulary: got token {high} after {low}, want ids that ascend")


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: got {shown(value)}, want a list of numbers")
    return value


def _layers(name: str, value: object) -> frozenset[int]:
    """Numbers of layers as the file lists them, each once."""
    layers = _list(name, value)
    for layer in layers:
        check_integer(name, layer, 0, MAX_LAYERS - 1)
    if len(set(layers)) < len(layers):
        raise ValueError(f"{name}: got {shown(layers)}, want each layer at most once")
    return frozenset(layers)
