"""Configuration, checkpoint files and tokenizer: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specdec.models.checkpoint import (
    expected_tensors,
    is_matrix,
    load_config,
    load_weights,
    resolve_model,
    save_model,
    write_json,
)
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.tokenizer import StopMatcher, Tokenizer

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "num_v_heads": 4,
    "head_dim": 4, "expand_v": 1.5, "intermediate_size": 24,
}  # fmt: skip


def small(**changes: object) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig.from_dict({**SMALL, **changes})


def random_weights(config: GatedDeltaNetConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_tensors(config).items()}


# --- configuration ---


def test_embedded_config() -> None:
    config = load_config(resolve_model("gdn-code"))
    assert (config.key_dim, config.value_dim, config.conv_dim) == (128, 256, 512)
    assert config.eos_token_ids == (0,)
    assert config.bos_token_id == 0
    assert config.early_exit_layers == (2, 5)
    stored = load_file(resolve_model("gdn-code") / "model.safetensors")
    assert config.num_parameters == sum(tensor.numel() for tensor in stored.values())


def test_defaults_and_rules_of_the_format() -> None:
    config = GatedDeltaNetConfig.from_dict({})
    # 2048 * 4 * 2 / 3 = 5461.3, up to a multiple of 256.
    assert config.intermediate_size == 5632
    assert (config.num_v_heads, config.head_v_dim, config.value_dim) == (6, 512, 3072)
    assert GatedDeltaNetConfig.from_dict({"hidden_ratio": None}).intermediate_size == 5632
    assert GatedDeltaNetConfig.from_dict({"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert GatedDeltaNetConfig.from_dict({"eos_token_id": None}).eos_token_ids == ()
    # 192 * 2/3 is 127.99999 in float arithmetic; the format means 128.
    assert GatedDeltaNetConfig.from_dict({"head_dim": 192, "expand_v": 0.6666666}).head_v_dim == 128
    assert GatedDeltaNetConfig.from_dict({"fuse_norm": False, "torch_dtype": "bfloat16", "x": 1}) == config


@pytest.mark.parametrize(
    "changes", [{}, {"use_gate": False}, {"conv_bias": True}, {"tie_word_embeddings": True}]
)
def test_parameter_count_and_dict_round_trip(changes: dict) -> None:
    config = small(**changes, early_exit_layers=[1], eos_token_id=[3, 5])
    assert config.num_parameters == sum(tensor.numel() for tensor in random_weights(config).values())
    assert GatedDeltaNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "16"}, "hidden_size: got '16', want an integer"),
        ({"hidden_size": True}, "hidden_size: got True"),
        ({"hidden_size": 0}, "hidden_size: got 0"),
        ({"hidden_size": 1 << 40}, "hidden_size: got 1099511627776"),
        ({"hidden_size": 16.0}, r"hidden_size: got 16\.0"),
        ({"num_v_heads": 3}, "num_v_heads: got 3, want a multiple of num_heads, which is 2"),
        ({"expand_v": 1.3}, r"expand_v: got 1\.3, want a value whose product with head_dim 4"),
        ({"expand_v": float("nan")}, "expand_v: got nan"),
        ({"expand_v": float("inf")}, "expand_v: got inf"),
        ({"norm_eps": 0.0}, r"norm_eps: got 0\.0"),
        ({"norm_eps": "1e-6"}, "norm_eps: got '1e-6'"),
        ({"use_gate": 1}, "use_gate: got 1, want true or false"),
        ({"use_short_conv": False, "conv_bias": True}, "conv_bias: got true"),
        ({"conv_size": 0}, "conv_size: got 0"),
        ({"bos_token_id": 40}, "bos_token_id: got 40, want an integer, from 0 to 39"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id: got '2'"),
        ({"eos_token_id": {}}, "eos_token_id: got {}"),
        ({"early_exit_layers": [2]}, "early_exit_layers: got 2, want an integer, from 1 to 1"),
        ({"early_exit_layers": [1, 1]}, "early_exit_layers: got 1 after 1, want ascending"),
        ({"early_exit_layers": "1"}, "early_exit_layers: got '1', want a list"),
        ({"attn": {"layers": [1], "num_heads": 2}}, "attn: got .* not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', which is not supported"),
        ({"use_mamba_gate": False}, "use_mamba_gate: got False, which is not supported"),
        ({"model_type": "llama"}, "model_type: got 'llama'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"intermediate_size": None, "hidden_ratio": float("inf")}, "hidden_ratio: got inf"),
        (
            {"hidden_size": 1 << 17, "vocab_size": 1 << 22, "num_hidden_layers": 1024},
            "parameters, want at most",
        ),
    ],
)
def test_bad_configs_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        small(**changes)
    assert "\n" not in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*SMALL, "eos_token_id", "attn", "early_exit_layers"]), JSON, max_size=4)
)
def test_any_json_gives_a_config_or_a_value_error(changes: dict) -> None:
    try:
        config = small(**changes)
    except ValueError:
        return
    assert GatedDeltaNetConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "[" * 100_000, '{"hidden_size": ' + "9" * 9000 + "}", "\xff"]
)
def test_damaged_config_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(tmp_path)


def test_oversized_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(" " * (1 << 20) + "{}")
    with pytest.raises(ValueError, match="too large"):
        load_config(tmp_path)


# --- checkpoint files ---


def test_resolve_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolve_model("gdn-code") / "tokenizer.json").is_file()
    with pytest.raises(
        ValueError, match=r"'nothing': neither a directory, a GGUF file nor a model's name .*gdn-code"
    ):
        resolve_model("nothing")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "gdn-code").mkdir()
    (tmp_path / "gdn-code" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gdn-code").resolve() != (tmp_path / "gdn-code").resolve()
    assert resolve_model("./gdn-code").resolve() == (tmp_path / "gdn-code").resolve()


@pytest.mark.parametrize("shard_bytes", [1 << 30, 5000, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tmp_path: Path, shard_bytes: int, tied: bool) -> None:
    config = small(tie_word_embeddings=tied)
    weights = random_weights(config)
    # A view with free strides must be stored as it reads.
    weights["model.embeddings.weight"] = weights["model.embeddings.weight"].T.contiguous().T
    save_model(tmp_path, config, weights, max_shard_bytes=shard_bytes)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes == 1 << 30)
    assert len(files) == {1 << 30: 1, 1: len(weights)}.get(shard_bytes, len(files))
    assert not list(tmp_path.glob("*.partial"))
    # Others may read the weights where they may read any new file of this user.
    assert (tmp_path / files[0]).stat().st_mode == (tmp_path / "config.json").stat().st_mode
    assert load_config(tmp_path) == config
    loaded = load_weights(tmp_path, config)
    assert set(loaded) == set(expected_tensors(config))
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].is_contiguous()


def test_saving_again_in_another_layout_replaces_the_first(tmp_path: Path) -> None:
    config = small()
    for seed, limit in ((0, 1 << 30), (1, 5000), (2, 1 << 30)):
        save_model(tmp_path, config, random_weights(config, seed), max_shard_bytes=limit)
        loaded = load_weights(tmp_path, config)
        assert torch.equal(loaded["model.norm.weight"], random_weights(config, seed)["model.norm.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    config = small()
    weights = random_weights(config)
    save_model(tmp_path, config, weights, dtype=torch.bfloat16)
    loaded = load_weights(tmp_path, config, dtype=dtype)
    rest = torch.float64 if dtype == torch.float64 else torch.float32
    for name, tensor in loaded.items():
        assert tensor.dtype == (dtype if is_matrix(name) else rest)
        stored = weights[name].bfloat16() if is_matrix(name) else weights[name]
        assert torch.equal(tensor, stored.to(tensor.dtype))
    with pytest.raises(ValueError, match=r"dtype: got torch\.int8"):
        load_weights(tmp_path, config, dtype=torch.int8)


def test_loaded_weights_do_not_depend_on_the_file(tmp_path: Path) -> None:
    config = small()
    weights = random_weights(config)
    save_model(tmp_path, config, weights)
    loaded = load_weights(tmp_path, config)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(loaded["model.norm.weight"], weights["model.norm.weight"])


def test_every_misfit_is_reported_by_name(tmp_path: Path) -> None:
    config = small()
    weights = random_weights(config)
    del weights["model.layers.1.attn.A_log"]
    weights["model.layers.0.attn.D"] = torch.ones(4)
    weights["model.layers.0.attn.q_conv1d.weight"] = torch.ones(8, 4)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit the config") as error:
        load_weights(tmp_path, config)
    for part in (
        "model.layers.1.attn.A_log is missing",
        "model.layers.0.attn.D is unexpected",
        "model.layers.0.attn.q_conv1d.weight has shape [8, 4], want [8, 1, 4]",
    ):
        assert part in str(error.value)
    # A config of another size mismatches everywhere; the message stays short.
    with pytest.raises(ValueError, match=r"and \d+ more") as error:
        load_weights(tmp_path, small(hidden_size=32))
    assert len(str(error.value)) < 1500


def test_a_hostile_config_is_refused_from_the_header(tmp_path: Path) -> None:
    """The config asks for 100 billion numbers, the file holds few: allocating first would be fatal."""
    save_file(random_weights(small()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit the config"):
        load_weights(tmp_path, small(vocab_size=1 << 21, hidden_size=1 << 14))


def test_a_tied_head_may_be_repeated_and_an_untied_one_must_be_there(tmp_path: Path) -> None:
    weights = random_weights(small())
    save_file(weights, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in load_weights(tmp_path, small(tie_word_embeddings=True))
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        load_weights(tmp_path, small())


def test_only_safetensors_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        load_weights(tmp_path, small())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin, and pickled weights are not read"):
        load_weights(tmp_path, small())


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b'\x08\0\0\0\0\0\0\0{"a": 1}', b"{}"])
def test_damaged_weights(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file") as error:
        load_weights(tmp_path, small())
    assert "\n" not in str(error.value)


def test_truncated_weights(tmp_path: Path) -> None:
    save_model(tmp_path, small(), random_weights(small()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_weights(tmp_path, small())


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    weights = random_weights(small())
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int32)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has dtype I32"):
        load_weights(tmp_path, small())


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "model.bin", 3]
)
def test_an_index_cannot_point_outside(tmp_path: Path, name: object) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(random_weights(small()), tmp_path / "secret.safetensors")
    index = {"weight_map": dict.fromkeys(expected_tensors(small()), name)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"want a \.safetensors file in the same directory"):
        load_weights(directory, small())


def test_bad_indices(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map is missing"):
        load_weights(tmp_path, small())
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ValueError, match=r"names one\.safetensors, which does not exist"):
        load_weights(tmp_path, small())
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    for name in ("one", "two"):
        save_file(random_weights(small()), tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"is also in one\.safetensors"):
        load_weights(tmp_path, small())


# --- tokenizer ---


@pytest.fixture(scope="module")
def code_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(resolve_model("gdn-code"), bos_token_id=0)


@pytest.fixture(scope="module")
def metaspace_tokenizer() -> Tokenizer:
    """A tokenizer in the manner of SentencePiece: spaces as a mark, unknown characters as byte tokens."""
    words = ["▁", "a", "b", "c", "▁the", "▁a", "é", "▁b", "<unk>"]
    vocab = {word: i for i, word in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    model = tokenizers.models.BPE(
        vocab=vocab, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True, unk_token="<unk>"
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    d = tokenizers.decoders
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    return Tokenizer(backend, bos_token_id=None)


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    decoder = tokenizer.stream()
    return [*map(decoder.push, tokens), decoder.finish()]


def test_encode_prepends_the_beginning(code_tokenizer: Tokenizer) -> None:
    tokens = code_tokenizer.encode("def f(x):\n    return x\n")
    assert tokens[0] == 0
    assert code_tokenizer.decode(tokens) == "def f(x):\n    return x\n"
    assert code_tokenizer.encode("") == [0]
    assert code_tokenizer.vocab_size == 4096
    assert 0 not in code_tokenizer.encode("")[1:]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_streaming_gives_the_text_and_no_half_characters(code_tokenizer: Tokenizer, text: str) -> None:
    tokens = code_tokenizer.encode(text)
    pieces = streamed(code_tokenizer, tokens)
    assert "".join(pieces) == text == code_tokenizer.decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_any_tokens_equals_decoding_them(code_tokenizer: Tokenizer) -> None:
    rng = random.Random(5)
    for _ in range(100):
        # Mostly single bytes: broken, overlong and interrupted sequences of every kind.
        tokens = [rng.randrange(257) if rng.random() < 0.8 else rng.randrange(4096) for _ in range(40)]
        assert "".join(streamed(code_tokenizer, tokens)) == code_tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="abc é€😀", max_size=30))
def test_streaming_without_byte_level(metaspace_tokenizer: Tokenizer, text: str) -> None:
    tokens = metaspace_tokenizer.encode(text)
    pieces = streamed(metaspace_tokenizer, tokens)
    assert "".join(pieces) == metaspace_tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_garbage_stays_within_a_window(metaspace_tokenizer: Tokenizer) -> None:
    """Bytes that never become UTF-8 are shown after a bounded delay."""
    lone = metaspace_tokenizer.backend.token_to_id("<0xFF>")
    decoder = metaspace_tokenizer.stream()
    shown = "".join(decoder.push(lone) for _ in range(200))
    assert set(shown) == {"\ufffd"}
    assert len(shown) > 200 - 64


def test_missing_and_damaged_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path, None)


def test_json_has_a_list_of_numbers_on_a_line(tmp_path: Path) -> None:
    values = {
        "numbers": [0, -5, 1.5e-07, 3.25],
        "nested": [[1, 2], [], {"a": [7]}],
        "others": ["[\n1\n]", "[ 1 ]", None, True],
        "one": {"empty": {}, "list": [1]},
    }
    write_json(tmp_path / "a.json", values)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == values
    lines = text.splitlines()
    assert '  "numbers": [0, -5, 1.5e-07, 3.25],' in lines
    assert "    [1, 2]," in lines
    assert '    "list": [1]' in lines
    assert len(lines) == 20


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The specification of StopMatcher by brute force: first complete, then longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ab\n", max_size=5), max_size=8),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=3),
)
def test_stop_matcher_against_brute_force(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    expected, stop = first_stop("".join(pieces), stops)
    shown, seen = "", ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        assert expected.startswith(shown)
        if not matcher.stopped:
            # Nothing is held without need: the held text is the beginning of a stop string.
            held = seen[len(shown) :]
            assert not held or any(s.startswith(held) for s in stops)
    assert matcher.matched == stop
    assert shown + matcher.finish() == expected


@pytest.mark.parametrize("stops", ["abc", [""], [3]])
def test_bad_stops(stops: object) -> None:
    with pytest.raises(ValueError, match="want a list of non-empty strings"):
        StopMatcher(stops)  # type: ignore[arg-type]
