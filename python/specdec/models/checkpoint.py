"""Reading and writing Gated DeltaNet checkpoints: a directory with `config.json` and safetensors weights.

Only safetensors is read. A pickle can run code while it is loaded, so `.bin` and `.pt` files are refused.
Names and shapes of all tensors are compared with the configuration from the file headers before anything is
allocated.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.models.config import MAX_CONFIG_BYTES, MODEL_TYPE, GatedDeltaNetConfig, read_json_object
from specdec.models.gguf_file import SMOLLM2, smollm2_file

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_MAX_INDEX_BYTES = 64 << 20
_FLOATS = {"F64", "F32", "F16", "BF16"}
_LISTED = 8
# A list of numbers as `json.dumps` indents it; strings hold no line breaks there.
_NUMBERS = re.compile(r"\[\n([-+.\deE,\s]+)\n *\]")
_DRAFTER = "-drafter"  # what the name of an embedded drafter's directory ends with


def embedded_models() -> dict[str, Path]:
    """Models that come with the package, by name."""
    return {name: path for name, path in _assets().items() if not name.endswith(_DRAFTER)}


def embedded_drafters() -> dict[str, Path]:
    """Drafters that come with the package, by the name of the embedded model that each was trained for."""
    return {name.removesuffix(_DRAFTER): path for name, path in _assets().items() if name.endswith(_DRAFTER)}


def shipped_drafter(directory: Path | None) -> Path | None:
    """The drafter that comes with the embedded model in `directory`; None for all other models."""
    if directory is None:
        return None
    drafters, place = embedded_drafters(), directory.resolve()  # one directory may have several paths
    return next(
        (drafters.get(name) for name, path in embedded_models().items() if path.resolve() == place), None
    )


def _assets() -> dict[str, Path]:
    assets = Path(str(resources.files("specdec"))) / "assets"
    return {path.parent.name: path.parent for path in sorted(assets.glob(f"*/{CONFIG_NAME}"))}


def resolve_model(name_or_dir: str | os.PathLike[str]) -> Path:
    """Where a model is that is given by its name, its directory or its GGUF file.

    Names are those of embedded models and "smollm2"; a directory has a `config.json`.

    A directory wins over a name only when it is written as a path (`./gdn-code`).

    Raises:
        ValueError: none of these, or the package with "smollm2" is not installed.
    """
    embedded = embedded_models()
    name = os.fspath(name_or_dir)
    found = embedded.get(name)
    if found is not None:
        return found
    if name == SMOLLM2:
        return smollm2_file()
    path = Path(name_or_dir)
    if is_gguf(path):
        return path
    known = ", ".join([*embedded, SMOLLM2])
    if not path.is_dir():
        raise ValueError(f"model {name!r}: neither a directory, a GGUF file nor a model's name ({known})")
    if not (path / CONFIG_NAME).is_file():
        raise ValueError(f"model {name!r}: the directory has no {CONFIG_NAME} (models with a name: {known})")
    return path


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def model_type(source: Path) -> object:
    """The `model_type` of what `resolve_model` found. Raises ValueError where it cannot be read."""
    if is_gguf(source):
        return "llama"
    return read_json_object(source / CONFIG_NAME, MAX_CONFIG_BYTES).get("model_type", MODEL_TYPE)


def load_config(directory: str | os.PathLike[str]) -> GatedDeltaNetConfig:
    """The configuration of the Gated DeltaNet in `directory`.

    Raises:
        ValueError: it is missing or not valid, or a Llama-family model's.
    """
    if is_gguf(Path(directory)):
        raise ValueError(f"{directory}: holds a Llama-family model, want a Gated DeltaNet")
    return GatedDeltaNetConfig.from_file(Path(directory) / CONFIG_NAME)


def layer_tensors(config: GatedDeltaNetConfig) -> dict[str, tuple[int, ...]]:
    """Names (without `model.layers.<i>.`) and shapes of the tensors of one layer, in FLA's naming."""
    hidden, heads = config.hidden_size, config.num_v_heads
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn.q_proj.weight": (config.key_dim, hidden),
        "attn.k_proj.weight": (config.key_dim, hidden),
        "attn.v_proj.weight": (config.value_dim, hidden),
        "attn.a_proj.weight": (heads, hidden),
        "attn.b_proj.weight": (heads, hidden),
        "attn.A_log": (heads,),
        "attn.dt_bias": (heads,),
        "attn.o_norm.weight": (config.head_v_dim,),
        "attn.o_proj.weight": (hidden, config.value_dim),
        "mlp_norm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    if config.use_gate:
        shapes["attn.g_proj.weight"] = (config.value_dim, hidden)
    if config.use_short_conv:
        for name, channels in (("q", config.key_dim), ("k", config.key_dim), ("v", config.value_dim)):
            shapes[f"attn.{name}_conv1d.weight"] = (channels, 1, config.conv_size)
            if config.conv_bias:
                shapes[f"attn.{name}_conv1d.bias"] = (channels,)
    return shapes


def expected_tensors(config: GatedDeltaNetConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of `config` holds."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    for i in range(config.num_hidden_layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer_tensors(config).items()})
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def is_matrix(name: str) -> bool:
    """True for the tensors whose dtype is the model's: projections, embedding and head.

    Norm weights, gates' parameters and convolutions are few and enter elementwise arithmetic; they stay in
    float32.
    """
    return name.endswith("_proj.weight") or name in ("model.embeddings.weight", "lm_head.weight")


def check_tensors(config: GatedDeltaNetConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise one ValueError that lists what is missing, unexpected or mis-shaped in `shapes`."""
    check_shapes(expected_tensors(config), shapes, where)


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """`check_tensors` for any set of tensors."""
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is unexpected" for name in shapes if name not in expected]
    problems += [
        f"{name} has shape {list(shapes[name])}, want {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ValueError(f"{where}: the tensors do not fit the config: {'; '.join(problems[:_LISTED])}{more}")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, one or the shards that its index names."""
    if (directory / WEIGHTS_NAME).is_file():
        return [directory / WEIGHTS_NAME]
    index = directory / INDEX_NAME
    if not index.is_file():
        pickles = sorted(
            path.name for suffix in ("bin", "pt", "pth") for path in directory.glob(f"*.{suffix}")
        )
        if pickles:
            raise ValueError(
                f"{directory}: holds only {pickles[0]}, and pickled weights are not read "
                f"because they can run code; convert them to {WEIGHTS_NAME}"
            )
        raise ValueError(f"{directory}: has neither {WEIGHTS_NAME} nor {INDEX_NAME}")
    weight_map = read_json_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is missing or empty, want an object of tensor and file names")
    names = set()
    for tensor, name in weight_map.items():
        # A shard lies beside its index. Anything with a separator, a drive or ".." could reach another file.
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set("/\\:\0"):
            raise ValueError(
                f"{index}: {tensor} is in {name!r}, want a .safetensors file in the same directory"
            )
        names.add(name)
    files = [directory / name for name in sorted(names)]
    for path in files:
        if not path.is_file():
            raise ValueError(f"{index}: names {path.name}, which does not exist")
    return files


def load_weights(
    directory: str | os.PathLike[str],
    config: GatedDeltaNetConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """The weights of the model in `directory`, by FLA name.

    Args:
        directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
        config: what the tensors must fit.
        dtype: of the matrices (`is_matrix`). Everything else is float32, or float64 where `dtype` is float64.
        device: where the tensors are put.

    Returns:
        Name -> contiguous tensor, exactly the names of `expected_tensors(config)`. A tied `lm_head.weight`
        that a checkpoint repeats is left out.

    Raises:
        ValueError: no safetensors, a damaged file, an index that points outside, or tensors that are missing,
            unexpected, mis-shaped or not floating point. Nothing has been allocated then.
    """
    directory = Path(directory)
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: got {dtype}, want a floating-point dtype")
    small = torch.float64 if dtype == torch.float64 else torch.float32
    skipped = ("lm_head.weight",) if config.tie_word_embeddings else ()
    where, shapes = read_headers(weight_files(directory), skipped=skipped)
    check_tensors(config, shapes, str(directory))
    return read_tensors(where, {name: dtype if is_matrix(name) else small for name in where}, device=device)


def read_headers(
    files: Sequence[Path], *, skipped: Collection[str] = (), integers: Collection[str] = ()
) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """What tensors safetensors files hold, from their headers alone.

    Args:
        files: to read.
        skipped: tensors to leave out.
        integers: tensors that are int32; all others are floating point.

    Returns:
        The file and the shape of each tensor by its name.

    Raises:
        ValueError: a damaged file, a tensor that occurs twice or one of another dtype.
    """
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                if name in skipped:
                    continue
                if name in where:
                    raise ValueError(f"{path}: {name} is also in {where[name].name}, want it once")
                header = file.get_slice(name)
                wanted = {"I32"} if name in integers else _FLOATS
                if header.get_dtype() not in wanted:
                    raise ValueError(
                        f"{path}: {name} has dtype {header.get_dtype()}, want one of {sorted(wanted)}"
                    )
                where[name], shapes[name] = path, tuple(header.get_shape())
    return where, shapes


def read_tensors(
    where: Mapping[str, Path], dtypes: Mapping[str, torch.dtype], *, device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Tensors by name, each from its file and in its dtype."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(where.values())):
        with open_weights(path) as file:
            for name in (name for name, at in where.items() if at == path):
                # A copy in every case: the file's mapping must not outlive this call.
                tensors[name] = file.get_tensor(name).to(device=device, dtype=dtypes[name], copy=True)
    return tensors


def weights_sha256(directory: str | os.PathLike[str]) -> str:
    """SHA-256 of a model's weights: of its safetensors or GGUF file, or of its shards one after the other."""
    path = Path(directory)
    return files_sha256([path] if is_gguf(path) else weight_files(path))


def files_sha256(files: Sequence[Path]) -> str:
    """SHA-256 of files one after the other, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def open_weights(path: Path) -> Any:
    """`safe_open` with one-line errors."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({str(error).splitlines()[0]})") from None


def save_model(
    directory: str | os.PathLike[str],
    config: GatedDeltaNetConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write `config.json` and the weights so that `load_config` and `load_weights` read them back.

    Args:
        directory: created where it does not exist.
        config: the configuration; `weights` must fit it.
        weights: name -> tensor, the names of `expected_tensors(config)`.
        dtype: store the matrices in it and everything else in float32; None stores every tensor as it is.
        max_shard_bytes: one file up to this size, shards with an index above it.

    Each file is written beside its place and moved there, so an interrupted call leaves no half-written file.
    """
    check_tensors(config, {name: tuple(tensor.shape) for name, tensor in weights.items()}, "weights")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    def stored(name: str) -> Tensor:
        tensor = weights[name].detach().cpu()
        if dtype is not None:
            tensor = tensor.to(dtype if is_matrix(name) else torch.float32)
        return tensor.contiguous()

    shards = list(_shards(config, weights, dtype, max_shard_bytes))
    if len(shards) == 1:
        write_tensors(directory / WEIGHTS_NAME, {name: stored(name) for name in shards[0]})
        (directory / INDEX_NAME).unlink(missing_ok=True)
    else:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(directory / file, {name: stored(name) for name in names})
            weight_map.update(dict.fromkeys(names, file))
        write_json(directory / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})
        (directory / WEIGHTS_NAME).unlink(missing_ok=True)
    write_json(directory / CONFIG_NAME, config.to_dict())


def _shards(
    config: GatedDeltaNetConfig, weights: Mapping[str, Tensor], dtype: torch.dtype | None, limit: int
) -> Iterator[list[str]]:
    """Tensor names in file order; no shard exceeds `limit` bytes unless one tensor alone does."""
    shard: list[str] = []
    size = 0
    for name in expected_tensors(config):
        item = weights[name].element_size()
        if dtype is not None:
            item = dtype.itemsize if is_matrix(name) else 4
        need = weights[name].numel() * item
        if shard and size + need > limit:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += need
    yield shard


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all. Raises OSError where the disk is full or the like."""
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    mode = partial.stat().st_mode & 0o777  # what the user's umask gives; save_file writes 0600
    try:
        save_file(dict(tensors), partial, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # no OSError, whatever went wrong
        partial.unlink(missing_ok=True)
        raise OSError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from None
    partial.chmod(mode)
    os.replace(partial, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whole or not at all. A list of numbers is one line."""
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(value, indent=2))
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
