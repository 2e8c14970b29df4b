"""Configuration of a Llama-family language model, read from an untrusted `config.json`.

The family: pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU MLP. It has the
`model_type` llama, mistral (without a sliding window) or qwen2 (biases on queries, keys and values).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec._checks import check_boolean, check_integer, check_number, shown
from specdec.models.config import (
    MAX_CONFIG_BYTES,
    MAX_DIM,
    MAX_PARAMETERS,
    check_special_tokens,
    read_json_object,
)
from specdec.models.rope import RopeConfig

MODEL_TYPES = ("llama", "mistral", "qwen2")

_HEAD_DIM_STEP = 16  # what `ops.tree_attention` takes
_MAX_HEAD_DIM = 256
_SIZES = {
    "vocab_size": 1 << 22,
    "hidden_size": MAX_DIM,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": _MAX_HEAD_DIM,
    "intermediate_size": MAX_DIM,
    "max_position_embeddings": 1 << 26,
}
_FLAGS = ("tie_word_embeddings", "qkv_bias", "output_bias", "mlp_bias")

# Keys that change the arithmetic, with the values under which it is the arithmetic of this package.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "use_qk_norm": (None, False),
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of a Llama-family model, every value checked.

    Attributes:
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU MLP.
        num_hidden_layers: blocks of one attention and one MLP each.
        num_attention_heads: query heads HQ.
        num_key_value_heads: key and value heads HK; HQ is a multiple, query head h reads key head
            h // (HQ / HK).
        head_dim: channels of a head, a multiple of 16 up to 256.
        max_position_embeddings: context that the model was made for; longer texts are not refused.
        rope: the rotary positions.
        rms_norm_eps: epsilon of every RMSNorm.
        tie_word_embeddings: the output head is the embedding.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        bos_token_id: token that marks a beginning, or None; whether prompts start with it is the tokenizer's.
        eos_token_ids: tokens that end a text, possibly none.

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, most in _SIZES.items():
            check_integer(f"config: {name}", getattr(self, name), 1, most)
        for name in _FLAGS:
            check_boolean(f"config: {name}", getattr(self, name))
        check_number("config: rms_norm_eps", self.rms_norm_eps, above=0.0, high=0.1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config: num_attention_heads: got {self.num_attention_heads}, "
                f"want a multiple of num_key_value_heads, which is {self.num_key_value_heads}"
            )
        if self.head_dim % _HEAD_DIM_STEP:
            raise ValueError(f"config: head_dim: got {self.head_dim}, want a multiple of {_HEAD_DIM_STEP}")
        check_integer("config: num_attention_heads * head_dim", self.query_dim, 1, MAX_DIM)
        check_special_tokens(self.vocab_size, self.bos_token_id, self.eos_token_ids)
        if self.num_parameters > MAX_PARAMETERS:
            raise ValueError(
                f"config: got sizes for {self.num_parameters} parameters, want at most {MAX_PARAMETERS}"
            )

    @property
    def query_dim(self) -> int:
        """Channels of all query heads, HQ * D."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Channels of all key (or value) heads, HK * D."""
        return self.num_key_value_heads * self.head_dim

    @property
    def mixer_parameters(self) -> int:
        """Numbers of a layer's attention, its norm counted in."""
        hidden, qkv = self.hidden_size, self.query_dim + 2 * self.key_dim
        return hidden * (qkv + self.query_dim + 1) + qkv * self.qkv_bias + hidden * self.output_bias

    @property
    def mlp_parameters(self) -> int:
        """Numbers of a layer's MLP, its norm counted in."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return hidden * (3 * inner + 1) + (2 * inner + hidden) * self.mlp_bias

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint, a tied head counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layer = self.mixer_parameters + self.mlp_parameters
        return self.num_hidden_layers * layer + embeddings + self.hidden_size

    def first_layers(self, count: int) -> LlamaConfig:
        """The configuration of the first `count` layers."""
        return replace(self, num_hidden_layers=count)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """The configuration in `values`, the contents of a `config.json`.

        Absent keys take the defaults of `transformers`, but sizes have to be there. Keys without influence on
        the numbers are ignored.

        Raises:
            ValueError: a value of the wrong type or out of range, or a variant with other arithmetic.
        """
        kind = values.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"config: model_type: got {shown(kind)}, want {', '.join(MODEL_TYPES)}")
        for key, allowed in _ONLY.items():
            given = values.get(key, allowed[0])
            # The type is compared too, because 1 == True in Python.
            if not any(given == value and type(given) is type(value) for value in allowed):
                wanted = " or ".join(str(value) for value in allowed)
                raise ValueError(f"config: {key}: got {shown(given)}, which is not supported, want {wanted}")
        _check_window(kind, values)

        def get(key: str, default: Any) -> Any:
            value = values.get(key)
            return default if value is None else value

        sizes: dict[str, Any] = dict.fromkeys(_SIZES)
        if kind == "llama":
            sizes["num_key_value_heads"] = values.get("num_attention_heads")
        sizes |= {key: value for key, value in values.items() if key in _SIZES and value is not None}
        # The head width and the angles follow from these.
        for name in ("hidden_size", "num_attention_heads", "max_position_embeddings"):
            check_integer(f"config: {name}", sizes[name], 1, _SIZES[name])
        if sizes["head_dim"] is None:
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        bias = get("attention_bias", False)
        eos = values.get("eos_token_id", None if kind == "qwen2" else 2)
        if not isinstance(eos, list):
            eos = [] if eos is None else [eos]
        return cls(
            **sizes,
            rope=RopeConfig.from_dict(values, sizes["max_position_embeddings"]),
            rms_norm_eps=get("rms_norm_eps", 1e-6),
            tie_word_embeddings=get("tie_word_embeddings", False),
            qkv_bias=True if kind == "qwen2" else bias,
            output_bias=False if kind == "qwen2" else bias,
            mlp_bias=get("mlp_bias", False),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=tuple(eos),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> LlamaConfig:
        """The configuration in the JSON file `path`. Raises ValueError where it is missing or not valid."""
        return cls.from_dict(read_json_object(Path(path), MAX_CONFIG_BYTES))


def _check_window(kind: str, values: Mapping[str, Any]) -> None:
    """Refuses layers that see a part of the text alone."""
    window = values.get("sliding_window")
    if kind == "qwen2" and values.get("use_sliding_window") in (None, False):
        window = None  # the number is there and not used
    if window is not None:
        raise ValueError(f"config: sliding_window: got {shown(window)}, which is not supported, want null")
    layers = values.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(t != "full_attention" for t in layers)):
        raise ValueError(f"config: layer_types: got {shown(layers)}, want full_attention in every layer")
