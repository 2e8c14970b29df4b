"""Configuration of a Gated DeltaNet language model, read from an untrusted `config.json`.

The format is the one that flash-linear-attention (FLA) writes for `model_type: gated_deltanet`, with its
defaults for absent keys. Everything is checked here, before any tensor is allocated, so that the code behind
can rely on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec._checks import check_boolean, check_integer, check_number, shown

MODEL_TYPE = "gated_deltanet"

MAX_CONFIG_BYTES = 1 << 20
# Far above every published model and far below what would exhaust a machine through one dimension alone.
MAX_DIM = 1 << 17
_MAX_HEAD_DIM = 1024
MAX_PARAMETERS = 1 << 38
_SIZES = {
    "vocab_size": 1 << 22,
    "hidden_size": MAX_DIM,
    "num_hidden_layers": 1024,
    "num_heads": 1024,
    "num_v_heads": 1024,
    "head_dim": _MAX_HEAD_DIM,
    "intermediate_size": MAX_DIM,
    "conv_size": 16,
}

# Keys that change the arithmetic, with the values under which it is the arithmetic of this package.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE,),
    "attn": (None,),
    "hidden_act": ("swish", "silu"),
    "use_mamba_gate": (True,),
    "use_beta": (True,),
    "use_residual": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (None, "l2"),
    "qk_activation": (None, "silu"),
    "share_conv_kernel": (False,),
    "gate_fn": (None, "swish", "silu"),
    "gate_logit_normalizer": (None,),
    "elementwise_affine": (None, True),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "residual_in_fp32": (None, False),
    "logit_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
}

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 21,
    "num_heads": 6,
    "num_v_heads": None,
    "head_dim": 256,
    "expand_v": 2.0,
    "use_gate": True,
    "use_short_conv": True,
    "conv_size": 4,
    "conv_bias": False,
    "allow_neg_eigval": False,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "early_exit_layers": (),
}


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Sizes and options of a Gated DeltaNet model (arXiv 2412.06464), every value checked.

    Attributes:
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the residual stream.
        num_hidden_layers: blocks of one token mixer and one MLP each.
        num_heads: query and key heads (HK).
        num_v_heads: value heads (HV), a multiple of `num_heads`; value head h reads key head h // (HV / HK).
        head_dim: channels of a query or key head (DK).
        expand_v: channels of a value head over `head_dim`; the product is a whole number (DV).
        intermediate_size: width of the SwiGLU MLP.
        use_gate: multiply the head norm by SiLU of a projection of the input.
        use_short_conv: causal depthwise convolutions on q, k, v. SiLU is applied to q, k, v either way.
        conv_size: taps of a convolution, the newest last.
        conv_bias: the convolutions have a bias.
        allow_neg_eigval: beta is 2 sigmoid(b) instead of sigmoid(b) (arXiv 2411.12537).
        norm_eps: epsilon of every RMSNorm, the head norm included.
        tie_word_embeddings: the output head is the embedding.
        bos_token_id: token that a prompt starts with, or None.
        eos_token_ids: tokens that end a text, possibly none.
        early_exit_layers: numbers of layers after which the shared norm and head were trained to predict too.

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    num_v_heads: int
    head_dim: int
    expand_v: float
    intermediate_size: int
    use_gate: bool = True
    use_short_conv: bool = True
    conv_size: int = 4
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    early_exit_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, most in _SIZES.items():
            check_integer(f"config: {name}", getattr(self, name), 1, most)
        for name in ("use_gate", "use_short_conv", "conv_bias", "allow_neg_eigval", "tie_word_embeddings"):
            check_boolean(f"config: {name}", getattr(self, name))
        check_number("config: norm_eps", self.norm_eps, above=0.0, high=0.1)
        check_number("config: expand_v", self.expand_v, above=0.0, high=64.0)
        if self.num_v_heads % self.num_heads:
            raise ValueError(
                f"config: num_v_heads: got {self.num_v_heads}, "
                f"want a multiple of num_heads, which is {self.num_heads}"
            )
        width = self.head_dim * self.expand_v
        if not math.isclose(width, round(width), rel_tol=1e-5):
            raise ValueError(
                f"config: expand_v: got {self.expand_v}, "
                f"want a value whose product with head_dim {self.head_dim} is whole"
            )
        check_integer("config: head_dim * expand_v", self.head_v_dim, 1, _MAX_HEAD_DIM)
        check_integer("config: num_heads * head_dim", self.key_dim, 1, MAX_DIM)
        check_integer("config: num_v_heads * head_dim * expand_v", self.value_dim, 1, MAX_DIM)
        if self.conv_bias and not self.use_short_conv:
            raise ValueError("config: conv_bias: got true, want false because use_short_conv is false")
        check_special_tokens(self.vocab_size, self.bos_token_id, self.eos_token_ids)
        previous = 0
        for layer in self.early_exit_layers:
            check_integer("config: early_exit_layers", layer, 1, self.num_hidden_layers - 1)
            if layer <= previous:
                raise ValueError(
                    f"config: early_exit_layers: got {layer} after {previous}, want ascending layers"
                )
            previous = layer
        if self.num_parameters > MAX_PARAMETERS:
            raise ValueError(
                f"config: got sizes for {self.num_parameters} parameters, want at most {MAX_PARAMETERS}"
            )

    @property
    def head_k_dim(self) -> int:
        """Channels of a query or key head (DK)."""
        return self.head_dim

    @property
    def head_v_dim(self) -> int:
        """Channels of a value head (DV)."""
        return round(self.head_dim * self.expand_v)

    @property
    def key_dim(self) -> int:
        """Channels of all query (or key) heads, HK * DK."""
        return self.num_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """Channels of all value heads, HV * DV."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of q, k and v side by side, in this order: what a convolution window holds."""
        return 2 * self.key_dim + self.value_dim

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint, a tied head counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layer = self.mixer_parameters + self.mlp_parameters
        return self.num_hidden_layers * layer + embeddings + self.hidden_size

    @property
    def mixer_parameters(self) -> int:
        """Numbers of a layer's token mixer, its norm counted in."""
        conv = self.conv_dim * (self.conv_size + self.conv_bias) if self.use_short_conv else 0
        projections = self.hidden_size * (
            self.conv_dim + self.value_dim * (1 + self.use_gate) + 2 * self.num_v_heads
        )
        return conv + projections + 2 * self.num_v_heads + self.head_v_dim + self.hidden_size

    @property
    def mlp_parameters(self) -> int:
        """Numbers of a layer's MLP, its norm counted in."""
        return (3 * self.intermediate_size + 1) * self.hidden_size

    def first_layers(self, count: int) -> GatedDeltaNetConfig:
        """The configuration of the first `count` layers."""
        exits = tuple(layer for layer in self.early_exit_layers if layer < count)
        return replace(self, num_hidden_layers=count, early_exit_layers=exits)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GatedDeltaNetConfig:
        """The configuration in `values`, the contents of an FLA `config.json`.

        Absent keys take FLA's defaults. `intermediate_size` null follows FLA's rule: two thirds of
        `hidden_size * hidden_ratio`, rounded up to a multiple of 256. Keys without influence on the numbers
        are ignored.

        Raises:
            ValueError: a value of the wrong type or out of range, or a variant with other arithmetic (hybrid
                `attn` layers, another activation, ...).
        """
        for key, allowed in _ONLY.items():
            given = values.get(key, allowed[0])
            # The type is compared too, because 1 == True in Python.
            if not any(given == value and type(given) is type(value) for value in allowed):
                wanted = " or ".join(json.dumps(value) for value in allowed)
                raise ValueError(f"config: {key}: got {shown(given)}, which is not supported, want {wanted}")
        got = {key: values.get(key, default) for key, default in _DEFAULTS.items()}

        hidden_size = got["hidden_size"]
        intermediate_size = got["intermediate_size"]
        if intermediate_size is None:
            ratio = 4 if got["hidden_ratio"] is None else got["hidden_ratio"]
            check_integer("config: hidden_size", hidden_size, 1, MAX_DIM)
            check_number("config: hidden_ratio", ratio, above=0.0, high=64.0)
            intermediate_size = -(-int(hidden_size * ratio * 2 / 3) // 256) * 256
        eos = got["eos_token_id"]
        if eos is None:
            eos = []
        elif not isinstance(eos, list):
            eos = [eos]
        exits = got["early_exit_layers"]
        if not isinstance(exits, (list, tuple, type(None))):
            raise ValueError(f"config: early_exit_layers: got {shown(exits)}, want a list of layer numbers")
        return cls(
            vocab_size=got["vocab_size"],
            hidden_size=hidden_size,
            num_hidden_layers=got["num_hidden_layers"],
            num_heads=got["num_heads"],
            num_v_heads=got["num_heads"] if got["num_v_heads"] is None else got["num_v_heads"],
            head_dim=got["head_dim"],
            expand_v=got["expand_v"],
            intermediate_size=intermediate_size,
            use_gate=got["use_gate"],
            use_short_conv=got["use_short_conv"],
            conv_size=got["conv_size"],
            conv_bias=got["conv_bias"],
            allow_neg_eigval=got["allow_neg_eigval"],
            norm_eps=got["norm_eps"],
            tie_word_embeddings=got["tie_word_embeddings"],
            bos_token_id=got["bos_token_id"],
            eos_token_ids=tuple(eos),
            early_exit_layers=tuple(exits or ()),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> GatedDeltaNetConfig:
        """The configuration in the JSON file `path`. Raises ValueError where it is missing or not valid."""
        return cls.from_dict(read_json_object(Path(path), MAX_CONFIG_BYTES))

    def to_dict(self) -> dict[str, Any]:
        """The contents of a `config.json` from which `from_dict` returns an equal configuration."""
        return {
            "model_type": MODEL_TYPE,
            "architectures": ["GatedDeltaNetForCausalLM"],
            "attn_mode": "chunk",
            "attn": None,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_heads": self.num_heads,
            "num_v_heads": self.num_v_heads,
            "head_dim": self.head_dim,
            "expand_v": self.expand_v,
            "use_gate": self.use_gate,
            "use_short_conv": self.use_short_conv,
            "conv_size": self.conv_size,
            "conv_bias": self.conv_bias,
            "allow_neg_eigval": self.allow_neg_eigval,
            "hidden_ratio": None,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "swish",
            "norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
            "early_exit_layers": list(self.early_exit_layers),
        }


def check_special_tokens(vocab_size: int, bos: int | None, eos: tuple[int, ...]) -> None:
    """Refuses special tokens outside the vocabulary and lists of them that are no end tokens of a model.

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """
    if bos is not None:
        check_integer("config: bos_token_id", bos, 0, vocab_size - 1)
    for token in eos:
        check_integer("config: eos_token_id", token, 0, vocab_size - 1)
    if len(eos) > 64:
        raise ValueError(f"config: eos_token_id: got {len(eos)} entries, want at most 64")


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `path`. Raises ValueError where it is missing, malformed or over `max_bytes`."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(raw) > max_bytes:
        raise ValueError(f"{path}: too large, want at most {max_bytes} bytes")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a JSON {type(value).__name__}, want an object")
    return value
