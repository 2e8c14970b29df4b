"""GGUF files against the package `gguf`, which llama.cpp's authors write, and damaged ones."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from loop.models import llama_config, llama_weights
from specdec.cli.app import app
from specdec.generation import Request
from specdec.loop import Loop
from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import weights_sha256
from specdec.models.gguf_file import GGUFFile
from specdec.models.gguf_format import GGUFContainer
from specdec.models.llama import LlamaForCausalLM
from specdec.models.llama_checkpoint import llama_tensors
from specdec.models.llama_config import LlamaConfig
from specdec.models.skip_file import SkipFile
from specdec.models.skipping import SkipSet

RUNNER = CliRunner()
gguf = pytest.importorskip("gguf")
CONFIG = llama_config(vocab_size=64, hidden_size=64, intermediate_size=96, head_dim=16, eos_token_ids=(2,))
TOKENS = ["<|end|>", "<|start|>", "<|stop|>", *(chr(c) for c in range(0x41, 0x7D)), "ab"]


def write(
    path: Path, *, kinds: dict[str, str] | None = None, drop: str = "", fields: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """A file of random weights as llama.cpp's converter makes it, and these weights by Hugging Face name."""
    weights = llama_weights(CONFIG, 3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_key_length(CONFIG.head_dim)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(CONFIG.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_array("of.floats", [0.5, 1.5])
    writer.add_bool("of.truth", True)
    for key, value in (fields or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    for name, tensor in weights.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored == drop:
            continue
        for part, heads in (("q_proj", CONFIG.num_attention_heads), ("k_proj", CONFIG.num_key_value_heads)):
            if part in name:  # what the converter calls permuting
                halves = tensor.view(heads, 2, CONFIG.head_dim // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        kind = (kinds or {}).get(stored, "F32")
        quant = gguf.GGMLQuantizationType[kind]
        data = tensor.numpy() if kind == "F32" else gguf.quants.quantize(tensor.numpy(), quant)
        writer.add_tensor(stored, data, raw_dtype=None if kind == "F32" else quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_model_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write(path)
    model = load_model(path)
    assert isinstance(model, LlamaForCausalLM)
    assert model.source == path
    assert len(weights_sha256(path)) == 64
    want = LlamaForCausalLM(CONFIG, weights)
    logits = [m.prefill([[5, 6, 7]], cache=m.new_cache(1), slots=[0]) for m in (model, want)]
    assert torch.equal(*logits)
    assert model.eos_token_ids == {2}
    file = GGUFContainer(path)
    assert file.fields["of.floats"] == [0.5, 1.5]
    assert file.fields["of.truth"] is True


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_types_are_dequantised_as_the_package_does(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    stored = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"]
    write(path, kinds=dict.fromkeys(stored, kind))
    ours = GGUFContainer(path)
    for tensor in gguf.GGUFReader(path).tensors:
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert (tensor.tensor_type.name == kind) == (tensor.name in stored)
        assert np.array_equal(ours.tensor(tensor.name).numpy(), want)
    assert isinstance(load_model(path), LlamaForCausalLM)


def test_text(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    assert tokenizer.encode("<|stop|>AB") == [2, TOKENS.index("A"), TOKENS.index("B")]
    assert tokenizer.bos_token_id is None  # unless the file asks for one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight is missing"),
        ({"kinds": {"output_norm.weight": "Q5_0"}}, "output_norm.weight has the type of number 6, want F32"),
        ({"fields": {"llama.expert_count": 8}}, "llama.expert_count: got 8, which is not supported"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type: got 'yarn'"),
        (
            {"fields": {"llama.vocab_size": 65}},
            r"model.embed_tokens.weight has shape \[64, 64\], want \[65, 64\]",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_model(tmp_path / "model.gguf")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable GGUF file"),
        (b"GGUF", "not a readable GGUF file"),
        (b"PK\x03\x04" + bytes(64), "it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, want one of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), "not a readable GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "it ends in its header"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"a", 99), "a value of the type 99"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"a", 9, 4, 1 << 40), "it ends in its header"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"a", 9, 9, 1), "an array of the type 9"),
        (b"GGUF" + struct.pack("<IQQQcIQc", 3, 0, 1, 1, b"a", 8, 1, b"\xff"), "not a readable GGUF file"),
        (b"GGUF" + struct.pack("<IQQQcIQIQ", 3, 1, 0, 1, b"a", 1, 1 << 60, 0, 0), "a ends beyond the file"),
        (b"GGUF" + struct.pack("<IQQQcIQIQ", 3, 1, 0, 1, b"a", 1, 0, 0, 0), r"a has shape \[0\]"),
        (b"GGUF" + struct.pack("<IQQQcIQIQ", 3, 1, 0, 1, b"a", 1, 33, 8, 0), "a has rows of 33"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 1, 0, 1, b"a", 9), "a has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds the architecture None, want 'llama'"),
    ],
)
def test_damaged_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=message) as error:
            load(path)
        assert "\n" not in str(error.value)


def test_any_damage_is_a_value_error_or_another_model(tmp_path: Path) -> None:
    """Every cut, and bytes of the header changed at random."""
    path = tmp_path / "model.gguf"
    write(path)
    whole = path.read_bytes()
    intact = LlamaConfig.from_dict(GGUFFile(path).config())
    read = 0
    header = min(t.start for t in GGUFContainer(path).tensors.values())
    r = random.Random(0)
    for trial in range(400):
        damaged = bytearray(whole)
        if trial < 100:
            del damaged[r.randrange(len(whole)) :]
        else:
            for _ in range(r.randint(1, 3)):
                damaged[r.randrange(header)] = r.randrange(256)
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
            config = LlamaConfig.from_dict(file.config())
            if config == intact and file.shapes().keys() == llama_tensors(config).keys():
                read += len([file.tensor(name, config) for name in file.shapes()])
        except ValueError:
            continue
    assert read > 0


def test_commands_run_it(tmp_path: Path) -> None:
    """Every drafter writes the text that the loop alone gives."""
    path = tmp_path / "model.gguf"
    write(path)
    model, tokenizer = load_model(path), load_tokenizer(path)
    want = Loop(model).run([Request(tokenizer.encode("ABAB"), 20)])[0].tokens
    skips = tmp_path / "skip.json"
    SkipFile(SkipSet.of([1], [0]), "random", weights_sha256(path), 2, "cpu", "float32").write(skips)
    for options in (
        ["--method", "autoregressive"],
        ["--drafter", "ngram"],
        ["--drafter", "exit:1"],
        ["--drafter", f"model:{path}", "--draft-tree", "2,1"],
        ["--method", "self-speculative", "--skip", str(skips)],
    ):
        command = ["generate", "ABAB", "--json", "--max-new-tokens", "20", "--model", str(path), *options]
        result = RUNNER.invoke(app, command)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["tokens"] == want


@pytest.mark.parametrize(
    "command",
    [
        ["train-drafter", "--target", "MODEL", "--text", "FOLDER", "--out", "FOLDER/out"],
        ["bench", "--methods", "reference", "--model", "MODEL"],
        ["generate", "A", "--model", "MODEL", "--drafter", "adapted:FOLDER"],
    ],
)
def test_commands_for_other_models_say_so(command: list[str], tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    places = {"MODEL": "model.gguf", "FOLDER": ".", "FOLDER/out": "out"}
    places = {word: str(tmp_path / path) for word, path in places.items()}
    result = RUNNER.invoke(app, [places.get(word, word) for word in command])
    assert result.exit_code != 0
    assert "Gated DeltaNet" in f"{result.output} {result.exception}"
