"""Texts and models small enough to train on and behind in a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from loop.models import llama_config, llama_weights
from specdec.models.config import GatedDeltaNetConfig
from specdec.training.corpus import train_tokenizer, write_tokens
from specdec.training.loop import Training, TrainingOptions

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 1, "num_v_heads": 2,
    "head_dim": 32, "expand_v": 1.0, "intermediate_size": 96, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def small(**changes: object) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig.from_dict({**SMALL, **changes})


def write_text(folder: Path) -> Path:
    """About 30 KB of repetitive text in a few files."""
    for i in range(8):
        lines = [f"def add_{i}_{j}(x, y):\n    return x + y * {j}\n" for j in range(60)]
        (folder / f"file{i}.py").write_text("\n".join(lines))
    return folder


def gated_deltanet(text: Path, out: Path) -> Path:
    """The directory of a model of three layers that has learnt the text somewhat."""
    backend = train_tokenizer(text, 300, seed=0)
    backend.save(str(out / "tokenizer.json"))
    write_tokens(text, backend, out / "tokens.bin", seed=0)
    Training(out, TrainingOptions(small(), tokens=60 * 8 * 32, batch_size=8, seq_len=32, lr=1e-2)).run()
    return out


def llama(text: Path, out: Path, **changes: object) -> Path:
    """The directory of a model of four layers with random weights, all biases and no special token's name."""
    backend = train_tokenizer(text, 300, seed=0)
    described = json.loads(backend.to_str())
    described["added_tokens"][0]["content"] = "<end>"
    described["model"]["vocab"] = {
        "<end>" if token == "<|endoftext|>" else token: i for token, i in described["model"]["vocab"].items()
    }
    (out / "tokenizer.json").write_text(json.dumps(described))
    config = llama_config(
        vocab_size=300, num_hidden_layers=4, qkv_bias=True, output_bias=True, mlp_bias=True, **changes
    )
    values = {
        name: getattr(config, name)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
            "tie_word_embeddings", "mlp_bias",
        )
    }  # fmt: skip
    values |= {"model_type": "llama", "attention_bias": True, "eos_token_id": list(config.eos_token_ids)}
    (out / "config.json").write_text(json.dumps(values))
    save_file(
        {name: x.to(torch.float32) for name, x in llama_weights(config).items()}, out / "model.safetensors"
    )
    return out


def interrupted(arguments: Sequence[str], saved: Path) -> str:
    """Runs a module until the file `saved` shows that training is under way, presses Ctrl-C, and
    returns what it printed. It ends well.

    Args:
        arguments: the module and its arguments.
        saved: that the run writes with its first save.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not saved.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, output
    assert "stopped at step" in output
    return output
