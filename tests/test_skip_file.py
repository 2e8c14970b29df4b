"""Sets of skipped sub-layers, and the file that holds one: the round trip and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.models.skip_file import SkipFile
from specdec.models.skipping import SkipSet

DIGEST = "0123456789abcdef" * 4


def a_file(**changes: Any) -> SkipFile:
    fields: dict[str, Any] = {
        "skips": SkipSet.of([1, 3], [2]),
        "model": "some model",
        "sha256": DIGEST,
        "layers": 4,
        "device": "a processor",
        "dtype": "float32",
        **changes,
    }
    return SkipFile(**fields)


def test_a_set_says_what_it_skips() -> None:
    skips = SkipSet.of([9, 4, 5, 6], [0])
    assert (str(skips), len(skips)) == ("mixers 4-6,9; mlps 0", 5)
    assert str(SkipSet()) == "mixers none; mlps none"
    skips.check_layers(10)
    with pytest.raises(ValueError, match="mixers: got layer 9, want 0 to 8"):
        skips.check_layers(9)
    with pytest.raises(ValueError, match="mlps: got layer 0"):
        SkipSet.of([], [0]).check_layers(0)


@pytest.mark.parametrize("layers", [[-1], [True], [1.0], ["1"], [1 << 20]])
def test_numbers_that_are_no_layers_are_refused(layers) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="mixers: got"):
        SkipSet.of(layers)
    with pytest.raises(ValueError, match="mlps: got"):
        SkipSet.of((), layers)


def test_a_set_is_of_frozensets() -> None:
    with pytest.raises(ValueError, match="mixers: got"):
        SkipSet([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "file",
    [
        a_file(),
        a_file(skips=SkipSet(), dtype="bfloat16", int8=True),
        a_file(vocabulary=(0, 5, 7), measured={"draft_cost": 0.4, "acceptance": [0.9, 0.8]}),
    ],
)
def test_a_file_comes_back_as_it_was_written(tmp_path: Path, file: SkipFile) -> None:
    path = tmp_path / "skip.json"
    file.write(path)
    assert SkipFile.read(path) == file
    assert [p.name for p in tmp_path.iterdir()] == ["skip.json"]


def test_int8_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "skip.json"
    a_file().write(path)
    values = json.loads(path.read_text())
    del values["int8"]
    path.write_text(json.dumps(values))
    assert SkipFile.read(path) == a_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format: got 'other'"),
        ({"version": 2}, "version: got 2"),
        ({"version": True}, "version: got True"),
        ({"extra": 1}, "extra.* unknown"),
        ({"device": None}, "device: got None"),
        ({"device": "a\nb"}, "device: got"),
        ({"dtype": "float16"}, "dtype: got 'float16', want float32 or bfloat16"),
        ({"mixers": "1"}, "mixers: got '1', want a list"),
        ({"mixers": [1, 1]}, "mixers: got .*at most once"),
        ({"mixers": [[1]]}, "mixers: got"),
        ({"mlps": [4]}, "mlps: got layer 4, want 0 to 3"),
        ({"mlps": [-1]}, "mlps: got -1"),
        ({"vocabulary": []}, "vocabulary: got no tokens"),
        ({"vocabulary": [3, 3]}, "vocabulary: got token 3 after 3"),
        ({"vocabulary": [-1]}, "vocabulary: got -1"),
        ({"vocabulary": 7}, "vocabulary: got 7, want a list"),
        ({"measured": [1]}, "measured: got"),
        ({"int8": 1}, "int8: got 1, want true or false"),
        ({"model": 3}, "model: got 3, want an object"),
        ({"model": {"name": "m", "sha256": DIGEST}}, "model: layers missing"),
        ({"model": {"name": "", "sha256": DIGEST, "layers": 4}}, "model: got ''"),
        ({"model": {"name": "m", "sha256": DIGEST.upper(), "layers": 4}}, "sha256: got"),
        ({"model": {"name": "m", "sha256": DIGEST, "layers": 0}}, "layers: got 0"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "skip.json"
    a_file().write(path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=rf"{path}: .*{message}"):
        SkipFile.read(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "skip.json"
    with pytest.raises(ValueError, match="cannot be read"):
        SkipFile.read(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match="want an object"):
        SkipFile.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        SkipFile.read(path)
    a_file().write(path)
    values = json.loads(path.read_text())
    del values["device"]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="device missing"):
        SkipFile.read(path)


def test_a_file_is_for_one_model() -> None:
    file = a_file(vocabulary=(1, 60))
    file.check_model(DIGEST, 4, 61)
    with pytest.raises(ValueError, match=r"chosen for some model with 4 layers.*the model has 4 and 1111"):
        file.check_model("1" * 64, 4, 61)
    with pytest.raises(ValueError, match="the model has 5"):
        file.check_model(DIGEST, 5, 61)
    with pytest.raises(ValueError, match="vocabulary: got 60"):
        file.check_model(DIGEST, 4, 60)
