"""Exit adapters: small networks that make the hidden state at an early exit one for the model's own head.

Final norm and head were trained behind the last layer. What an early layer hands them says little unless the
model was trained to exit there (LayerSkip, arXiv 2404.16710). An adapter is a norm and a SwiGLU MLP, added to
the hidden state and trained with the model frozen (`specdec train-exits`); the model's final norm and head
follow. It has no memory and looks at one token alone, so an adapted exit is computed the same way whatever
stands beside it, and nothing of it is to be committed.

A directory of adapters holds `config.json` and `model.safetensors`, read as untrusted input: names, shapes
and dtypes are compared with the configuration before anything is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer, check_keys, check_label, check_number, check_sha256, shown
from specdec.models.base import SkippableLM
from specdec.models.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    check_shapes,
    is_matrix,
    read_headers,
    read_tensors,
    weights_sha256,
    write_json,
    write_tensors,
)
from specdec.models.config import MAX_CONFIG_BYTES, MAX_DIM, read_json_object
from specdec.models.features import Feature
from specdec.models.skipping import MAX_LAYERS

MODEL_TYPE = "specdec_exit_adapters"
VERSION = 1

_MAX_NUMBERS = 1 << 34  # of all adapters together
_KEYS = ("model_type", "version", "model", "exits", "norm_eps", "measured")
_MODEL_KEYS = ("name", "sha256", "layers", "hidden_size")
_EXIT_KEYS = ("layer", "width")
_PARTS = ("norm", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExitAdaptersConfig:
    """Sizes of the adapters of a model, every value checked.

    Attributes:
        widths: inner width of the adapter behind the first N layers, by N.
        model: the model's name, for messages.
        sha256: of its weights, 64 hexadecimal digits in lower case (`checkpoint.weights_sha256`).
        layers: number of its layers; N is below it.
        hidden_size: width D of its residual stream.
        norm_eps: epsilon of the adapters' norms.
        measured: what whoever trained them measured, of any form that JSON has. Nothing here reads it.

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """

    widths: Mapping[int, int]
    model: str
    sha256: str
    layers: int
    hidden_size: int
    norm_eps: float
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_label("model", self.model)
        check_sha256("sha256", self.sha256)
        check_integer("layers", self.layers, 2, MAX_LAYERS)
        check_integer("hidden_size", self.hidden_size, 1, MAX_DIM)
        check_number("norm_eps", self.norm_eps, above=0.0, high=0.1)
        if not self.widths:
            raise ValueError("exits: got none, want at least one")
        for exit, width in self.widths.items():
            check_integer("exits", exit, 1, self.layers - 1)
            check_integer(f"width of exit {exit}", width, 1, MAX_DIM)
        if self.num_parameters > _MAX_NUMBERS:
            raise ValueError(f"exits: got {self.num_parameters} numbers, want at most {_MAX_NUMBERS}")
        if not isinstance(self.measured, Mapping):
            raise ValueError(f"measured: got {shown(self.measured)}, want an object")

    @property
    def num_parameters(self) -> int:
        """Numbers of all adapters together."""
        return sum(self.hidden_size * (3 * width + 1) for width in self.widths.values())

    @classmethod
    def from_file(cls, path: str | Path) -> ExitAdaptersConfig:
        """The configuration in a JSON file that `save_exit_adapters` wrote.

        Raises:
            ValueError: the file is missing or not of this form; the message names it and what is wrong.
        """
        values = read_json_object(Path(path), MAX_CONFIG_BYTES)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExitAdaptersConfig:
        """The configuration that `to_dict` wrote. Raises ValueError where a value is none that it writes."""
        if values.get("model_type") != MODEL_TYPE:
            raise ValueError(f"model_type: got {shown(values.get('model_type'))}, want {MODEL_TYPE!r}")
        check_integer("version", values.get("version"), VERSION, VERSION)
        check_keys("the file", values, _KEYS)
        model, exits = values["model"], values["exits"]
        if not isinstance(model, dict):
            raise ValueError(f"model: got {shown(model)}, want an object")
        check_keys("model", model, _MODEL_KEYS)
        if not isinstance(exits, list):
            raise ValueError(f"exits: got {shown(exits)}, want a list of objects")
        widths: dict[int, int] = {}
        for entry in exits:
            if not isinstance(entry, dict):
                raise ValueError(f"exits: got {shown(entry)}, want an object")
            check_keys("exits", entry, _EXIT_KEYS)
            check_integer("exits", entry["layer"], 1)
            if entry["layer"] in widths:
                raise ValueError(f"exits: got layer {entry['layer']} twice, want each at most once")
            widths[entry["layer"]] = entry["width"]
        return cls(
            widths,
            model["name"],
            model["sha256"],
            model["layers"],
            model["hidden_size"],
            values["norm_eps"],
            values["measured"],
        )

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` from which `from_file` returns an equal configuration."""
        return {
            "model_type": MODEL_TYPE,
            "version": VERSION,
            "model": {
                "name": self.model,
                "sha256": self.sha256,
                "layers": self.layers,
                "hidden_size": self.hidden_size,
            },
            "exits": [{"layer": exit, "width": width} for exit, width in sorted(self.widths.items())],
            "norm_eps": self.norm_eps,
            "measured": dict(self.measured),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of the adapters."""
        shapes: dict[str, tuple[int, ...]] = {}
        for exit, width in sorted(self.widths.items()):
            shapes[f"exits.{exit}.norm.weight"] = (self.hidden_size,)
            shapes[f"exits.{exit}.gate_proj.weight"] = (width, self.hidden_size)
            shapes[f"exits.{exit}.up_proj.weight"] = (width, self.hidden_size)
            shapes[f"exits.{exit}.down_proj.weight"] = (self.hidden_size, width)
        return shapes

    def check_model(self, sha256: str | None, layers: int, hidden_size: int) -> None:
        """Refuses another model than the adapters were trained for, for which they would say nothing.

        Args:
            sha256: of the model's weights; None where they came from no file: any will do.
            layers: number of its layers.
            hidden_size: width of its residual stream.

        Raises:
            ValueError: it is another one.
        """
        digest = self.sha256 if sha256 is None else sha256
        if (digest, layers, hidden_size) != (self.sha256, self.layers, self.hidden_size):
            raise ValueError(
                f"trained for {self.model} with {self.layers} layers of width {self.hidden_size} and weights "
                f"of SHA-256 {self.sha256[:16]}..., but the model has {layers} of width {hidden_size} and "
                f"{digest[:16]}..."
            )


class ExitAdapter:
    """The adapter of one exit: `hidden + down(silu(gate(norm(hidden))) * up(norm(hidden)))`.

    Args:
        norm: float32 [D] weight of the norm.
        gate: [W, D].
        up: [W, D].
        down: [D, W].
        eps: of the norm.

    Attributes:
        num_parameters: numbers that a token reads.
    """

    def __init__(self, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float) -> None:
        self._norm = norm.float()
        self._gate_up = ops.pack_weight([gate, up])
        self._down = ops.pack_weight(down)
        self._eps = eps
        self.num_parameters = norm.numel() + gate.numel() + up.numel() + down.numel()

    @property
    def operands(self) -> ops.DraftAdapter:
        """Its weights, as `ops.draft_tree` takes them."""
        return ops.DraftAdapter(self._norm, self._gate_up, self._down, self._eps)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Adapts hidden states, each row with the same bits whatever the other rows are.

        Args:
            hidden: [..., D] the residual stream at the exit: float32, bfloat16 or float16.

        Returns:
            [..., D] in its dtype, to go through the model's final norm and head.
        """
        h = ops.rms_norm_linear(hidden, self._norm, self._eps, self._gate_up)
        return ops.swiglu_linear(h, self._down, residual=hidden)


class ExitAdapters(Mapping[int, ExitAdapter]):
    """A model's adapters by exit; an exit without one hands on its hidden state as it is.

    Args:
        adapters: the adapter behind the first N layers, by N.

    Example:
        >>> adapters = ExitAdapters.from_directory("my-exits", model)  # doctest: +SKIP
        >>> hidden = adapters.apply(4, hidden)  # after four layers  # doctest: +SKIP
    """

    def __init__(self, adapters: Mapping[int, ExitAdapter] | None = None) -> None:
        self._adapters = dict(sorted((adapters or {}).items()))

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str], model: SkippableLM) -> ExitAdapters:
        """The adapters in a directory that `save_exit_adapters` wrote.

        Args:
            directory: holds `config.json` and `model.safetensors`.
            model: the model that they were trained for.

        Raises:
            ValueError: a file is missing or not of this form, the tensors do not fit the configuration
                (nothing has been allocated then), or the adapters are another model's.
        """
        directory = Path(directory)
        config = ExitAdaptersConfig.from_file(directory / CONFIG_NAME)
        digest = None if model.source is None else weights_sha256(model.source)
        try:
            config.check_model(digest, model.num_layers, model.feature_size(Feature("hidden", 0)))
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from None
        path = directory / WEIGHTS_NAME
        if not path.is_file():
            raise ValueError(f"{directory}: has no {WEIGHTS_NAME}")
        where, shapes = read_headers([path])
        check_shapes(config.tensors(), shapes, str(directory))
        return cls.of(config, read_tensors(where, dict.fromkeys(where, torch.float32)))

    @classmethod
    def of(cls, config: ExitAdaptersConfig, tensors: Mapping[str, Tensor]) -> ExitAdapters:
        """The adapters with these tensors, exactly those of `config.tensors()`.

        Raises:
            ValueError: they do not fit.
        """
        check_shapes(config.tensors(), {name: tuple(x.shape) for name, x in tensors.items()}, "tensors")
        adapters = {}
        for exit in config.widths:
            norm, gate, up, down = (tensors[f"exits.{exit}.{part}.weight"] for part in _PARTS)
            adapters[exit] = ExitAdapter(norm, gate, up, down, config.norm_eps)
        return cls(adapters)

    def apply(self, exit: int, hidden: Tensor) -> Tensor:
        """`hidden` [..., D] after the first `exit` layers, adapted where there is an adapter for them."""
        adapter = self._adapters.get(exit)
        return hidden if adapter is None else adapter(hidden)

    def __getitem__(self, exit: int) -> ExitAdapter:
        return self._adapters[exit]

    def __iter__(self) -> Iterator[int]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)


def save_exit_adapters(
    directory: str | os.PathLike[str], config: ExitAdaptersConfig, tensors: Mapping[str, Tensor]
) -> None:
    """Writes `config.json` and `model.safetensors`, which `ExitAdapters.from_directory` reads back.

    Matrices are stored in bfloat16 and norms in float32. Each file is written beside its place and moved
    there, so an interrupted call leaves no half-written file.

    Args:
        directory: created where it does not exist.
        config: the configuration; `tensors` must fit it.
        tensors: name -> tensor, the names of `config.tensors()`.

    Raises:
        ValueError: the tensors do not fit.
    """
    check_shapes(config.tensors(), {name: tuple(x.shape) for name, x in tensors.items()}, "tensors")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensors[name]
        .detach()
        .to(device="cpu", dtype=torch.bfloat16 if is_matrix(name) else torch.float32)
        .contiguous()
        for name in config.tensors()
    }
    write_tensors(directory / WEIGHTS_NAME, stored)
    write_json(directory / CONFIG_NAME, config.to_dict())


def shipped_exit_adapters(model: SkippableLM) -> Path | None:
    """The adapters that come with the package for the model of these weights; None for all other models."""
    if model.source is None:
        return None
    assets = Path(str(resources.files("specdec"))) / "assets"
    digest = weights_sha256(model.source)
    paths = sorted(assets.glob(f"*/exits/{CONFIG_NAME}"))
    return next((p.parent for p in paths if ExitAdaptersConfig.from_file(p).sha256 == digest), None)
