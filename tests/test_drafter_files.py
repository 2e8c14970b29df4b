"""Files of recurrent drafters: what is accepted, what is refused before anything is allocated, and how."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdec.models import checkpoint
from specdec.models.checkpoint import embedded_models, is_matrix, weights_sha256, write_json, write_tensors
from specdec.models.drafter_checkpoint import load_drafter_config, load_drafter_weights, save_drafter
from specdec.models.drafter_config import RecurrentDrafterConfig, drafter_tensors

SMALL: dict[str, Any] = {
    "model_type": "specdec_recurrent_drafter",
    "version": 1,
    "features": ["hidden:1", "readout:0"],
    "feature_size": 40,
    "layer": {
        "num_hidden_layers": 1, "num_heads": 2, "num_v_heads": 4, "head_dim": 4, "expand_v": 1.5,
        "intermediate_size": 24, "use_gate": True, "use_short_conv": True, "conv_size": 4, "conv_bias": False,
        "allow_neg_eigval": False, "norm_eps": 1e-6,
    },
    "draft_vocab_size": 7,
    "target": {"model": "tiny", "sha256": "0a" * 32, "vocab_size": 40, "hidden_size": 16},
}  # fmt: skip


def changed(**changes: Any) -> dict[str, Any]:
    """SMALL with other values; `layer__head_dim=8` changes one of the layer's."""
    values = copy.deepcopy(SMALL)
    for name, value in changes.items():
        *outer, key = name.split("__")
        place = values[outer[0]] if outer else values
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return values


def random_tensors(config: RecurrentDrafterConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in drafter_tensors(config).items()
    }
    if config.draft_vocab_size is not None:
        tokens = torch.randperm(config.target.vocab_size, generator=generator)[: config.draft_vocab_size]
        tensors["draft_vocab"] = tokens.sort().values.int()
    return tensors


@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_vocab_size": None}, {"features": [], "feature_size": 0}, {"layer__conv_bias": True}],
)
def test_files_come_back_as_they_were_written(tmp_path: Path, changes: dict) -> None:
    config = RecurrentDrafterConfig.from_dict(changed(**changes))
    assert RecurrentDrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    tensors = random_tensors(config)
    save_drafter(tmp_path, config, tensors)
    assert load_drafter_config(tmp_path) == config
    loaded = load_drafter_weights(tmp_path, config)
    assert set(loaded) == set(tensors)
    floats = {name: t for name, t in tensors.items() if t.is_floating_point()}
    assert config.num_parameters == sum(t.numel() for t in floats.values())
    for name, tensor in floats.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], tensor.bfloat16().float() if is_matrix(name) else tensor)
    if "draft_vocab" in tensors:
        assert torch.equal(loaded["draft_vocab"], tensors["draft_vocab"])
    half = load_drafter_weights(tmp_path, config, dtype=torch.bfloat16)
    assert {t.dtype for n, t in half.items() if is_matrix(n)} == {torch.bfloat16}
    assert ("fuse_proj.weight" in loaded) == ("own_proj.weight" in loaded) == bool(config.features)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gated_deltanet"}, "model_type: got 'gated_deltanet'"),
        ({"version": 2}, "version: got 2, want an integer, from 1 to 1"),
        ({"version": ...}, "version: got None"),
        ({"layer": ...}, "drafter config: layer missing"),
        ({"extra": 1}, "'extra'.* unknown"),
        ({"layer": []}, r"layer: got \[\], want an object"),
        ({"layer__head_dim": ...}, "layer: head_dim missing"),
        ({"layer__head_dim": "4"}, "drafter config: head_dim: got '4'"),
        ({"layer__num_hidden_layers": 2}, "layer.num_hidden_layers: got 2, want 1"),
        ({"layer__intermediate_size": 1 << 40}, "intermediate_size: got 1099511627776"),
        ({"target__hidden_size": 1 << 40}, "hidden_size: got 1099511627776"),
        ({"target__vocab_size": True}, "target.vocab_size: got True"),
        ({"target__sha256": "0A" * 32}, "target.sha256: got '0A0A"),
        ({"target__sha256": 7}, "target.sha256: got 7"),
        ({"target__model": ""}, "target.model: got ''"),
        ({"target__model": "a\nb"}, "target.model: got"),
        ({"features": "hidden:1"}, "features: got 'hidden:1', want a list"),
        ({"features": ["hidden:-1"]}, "features: got 'hidden:-1'"),
        ({"features": ["hidden:01"]}, "features: got 'hidden:01'"),
        ({"features": ["hidden:1", "hidden:1"]}, "want each at most once"),
        ({"features": [["hidden:1"]]}, r"features: got \['hidden:1'\]"),
        ({"features": [f"hidden:{i}" for i in range(65)]}, "features: got 65, want at most 64"),
        ({"features": []}, "feature_size: got 40, want an integer, from 0 to 0"),
        ({"feature_size": 0}, "feature_size: got 0"),
        ({"feature_size": 1 << 30}, "feature_size: got 1073741824"),
        ({"draft_vocab_size": 41}, "draft_vocab_size: got 41, want an integer, from 1 to 40"),
        ({"draft_vocab_size": 0}, "draft_vocab_size: got 0"),
        ({"draft_vocab_size": 7.0}, r"draft_vocab_size: got 7\.0"),
    ],
)
def test_bad_configs_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        RecurrentDrafterConfig.from_dict(changed(**changes))
    assert "\n" not in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted({*SMALL, *(f"{o}__{k}" for o in ("layer", "target") for k in SMALL[o])})), JSON)
def test_any_json_value_gives_a_configuration_or_one_clear_error(name: str, value: Any) -> None:
    try:
        config = RecurrentDrafterConfig.from_dict(changed(**{name: value}))
    except ValueError:
        return
    assert RecurrentDrafterConfig.from_dict(config.to_dict()) == config


def test_tensors_are_checked_before_they_are_read(tmp_path: Path) -> None:
    config = RecurrentDrafterConfig.from_dict(SMALL)
    save_drafter(tmp_path, config, random_tensors(config))
    good = load_file(tmp_path / "model.safetensors")

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_drafter_weights(tmp_path, config)

    refused({n: t for n, t in good.items() if n != "own_proj.weight"}, "own_proj.weight is missing")
    refused({**good, "lm_head.weight": torch.zeros(2)}, "lm_head.weight is unexpected")
    refused({**good, "fuse_proj.weight": torch.zeros(16, 39)}, r"shape \[16, 39\], want \[16, 40\]")
    refused({**good, "norm.weight": torch.zeros(16, dtype=torch.int32)}, "norm.weight has dtype I32")
    refused({**good, "draft_vocab": torch.zeros(7)}, r"draft_vocab has dtype F32, want one of \['I32'\]")
    for tokens in (
        [0, 1, 2, 3, 4, 6, 6],
        [0, 1, 2, 3, 4, 5, 40],
        [-1, 1, 2, 3, 4, 5, 6],
        [1, 0, 2, 3, 4, 5, 6],
    ):
        wrong = torch.tensor(tokens, dtype=torch.int32)
        refused({**good, "draft_vocab": wrong}, "draft_vocab: got .* want ascending token ids from 0 to 39")
        with pytest.raises(ValueError, match="tensors: draft_vocab"):
            save_drafter(tmp_path / "new", config, {**good, "draft_vocab": wrong})
    with pytest.raises(ValueError, match=r"tensors: .*norm.weight is missing"):
        save_drafter(tmp_path / "new", config, {n: t for n, t in good.items() if n != "norm.weight"})
    assert not (tmp_path / "new").exists()

    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_drafter_weights(tmp_path, config)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_drafter_weights(tmp_path, config)


def test_hash_of_a_target_is_that_of_its_weights(tmp_path: Path) -> None:
    path = embedded_models()["gdn-code"]
    assert weights_sha256(path) == hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    parts = {f"model-{i}.safetensors": {f"t{i}": torch.full((3,), float(i))} for i in (1, 2)}
    for name, tensors in parts.items():
        write_tensors(tmp_path / name, tensors)
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {f"t{n[6]}": n for n in parts}})
    whole = b"".join((tmp_path / name).read_bytes() for name in sorted(parts))
    assert weights_sha256(tmp_path) == hashlib.sha256(whole).hexdigest()


def test_what_cannot_be_written_is_an_os_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.safetensors"
    write_tensors(path, {"a": torch.zeros(2)})
    before = path.read_bytes()

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"kept\.safetensors: cannot be written \(.*No space left"):
        write_tensors(path, {"a": torch.ones(2)})
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
