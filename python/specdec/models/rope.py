"""Rotary position embeddings (arXiv 2104.09864) and the variants that stretch them to longer texts.

Angles are computed as `transformers` computes them, operation by operation in float32, because at position
10^4 a frequency that is off by its last bit turns a head by 10^-3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec._checks import check_boolean, check_integer, check_number, shown
from specdec._rows import take_rows

_CHUNK = 256  # positions whose angles are computed at a time
_MAX_CONTEXT = 1 << 26
_OF_LENGTH = ("dynamic", "longrope")  # these turn a key by the length of the text that reads it


@dataclass(frozen=True)
class RopeConfig:
    """What fixes the angles. Every value is checked.

    Attributes:
        kind: "default"; "linear" (positions divided by `factor`); "llama3" (long wavelengths divided, short
            ones kept, those between blended); "yarn" (arXiv 2309.00071, the same by ramp, with cosines and
            sines multiplied by `attention_factor`).
        theta: base of the wavelengths.
        factor: how far the context is stretched.
        original_context: tokens that the model was trained on before it was stretched.
        low_freq_factor, high_freq_factor: of "llama3": `original_context` over the wavelengths from which on
            all is divided, and up to which all is kept.
        beta_fast, beta_slow: of "yarn": turns within `original_context` above which a frequency is kept, and
            below which it is divided.
        truncate: of "yarn": whether the ends of the ramp are whole dimensions.
        attention_factor: of "yarn".

    Raises:
        ValueError: names the field, what was given and what is wanted.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind in _OF_LENGTH:
            raise ValueError(
                f"config: rope_type: got {self.kind!r}, whose angles depend on the length of the text, so "
                "that cached keys would turn; want default, linear, llama3 or yarn"
            )
        if self.kind not in ("default", "linear", "llama3", "yarn"):
            raise ValueError(
                f"config: rope_type: got {shown(self.kind)}, want 'default', 'linear', 'llama3' or 'yarn'"
            )
        check_number("config: rope_theta", self.theta, above=1.0, high=1e12)
        check_number("config: rope factor", self.factor, low=1.0, high=1e6)
        check_integer("config: original_max_position_embeddings", self.original_context, 1, _MAX_CONTEXT)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            check_number(f"config: rope {name}", getattr(self, name), above=0.0, high=1e6)
        check_number("config: rope attention_factor", self.attention_factor, above=0.0, high=100.0)
        check_boolean("config: rope truncate", self.truncate)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"config: rope high_freq_factor: got {self.high_freq_factor}, "
                f"want more than low_freq_factor, which is {self.low_freq_factor}"
            )
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"config: rope beta_fast: got {self.beta_fast}, want beta_slow, {self.beta_slow}, or more"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], context: int) -> RopeConfig:
        """What a `config.json` says, either in `rope_parameters` or in `rope_theta` and `rope_scaling`.

        Args:
            values: the contents of the file.
            context: its `max_position_embeddings`.

        Raises:
            ValueError: a value of the wrong type or out of range, a missing one, or a variant that is not
                supported.
        """
        given: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):  # the newer name, then the older one
            part = values.get(key)
            if part is None:
                continue
            if not isinstance(part, Mapping):
                raise ValueError(f"config: {key}: got {shown(part)}, want an object or null")
            given = {**part, **given}
        if "partial_rotary_factor" in values:
            given.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
        partial = given.get("partial_rotary_factor")
        if partial is not None and (isinstance(partial, bool) or partial != 1):
            raise ValueError(f"config: partial_rotary_factor: got {shown(partial)}, want 1")
        kind = given.get("rope_type", given.get("type")) or "default"
        if not isinstance(kind, str):
            raise ValueError(f"config: rope_type: got {shown(kind)}, want a name")
        known: dict[str, Any] = {"kind": kind}
        for key, name in (("rope_theta", "theta"), *((k, k) for k in _OPTIONS.get(kind, ()))):
            value = given.get(key, values.get(key) if key == "rope_theta" else None)
            if value is not None:
                known[name] = value
        original = given.get("original_max_position_embeddings")
        known["original_context"] = context if original is None else original
        if kind == "yarn":
            # Checked here, as what follows from them is computed before the object is.
            check_integer(
                "config: original_max_position_embeddings", known["original_context"], 1, _MAX_CONTEXT
            )
            known.setdefault("factor", context / known["original_context"])
            known.setdefault("attention_factor", _yarn_attention(known["factor"], given))
        elif kind in ("linear", "llama3"):
            missing = [key for key in _OPTIONS[kind] if known.get(key) is None]
            if missing:
                raise ValueError(f"config: rope_parameters: got no {missing[0]}, which {kind} needs")
        return cls(**known)


_OPTIONS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
}


def _yarn_attention(factor: Any, given: Mapping[str, Any]) -> float:
    check_number("config: rope factor", factor, low=1.0, high=1e6)
    scales = [given.get(key) for key in ("mscale", "mscale_all_dim")]
    for key, value in zip(("mscale", "mscale_all_dim"), scales, strict=True):
        if value is not None:
            check_number(f"config: rope {key}", value, low=0.0, high=100.0)
    grown = math.log(factor)
    over, under = scales
    if over and under:
        return float((0.1 * over * grown + 1.0) / (0.1 * under * grown + 1.0))
    return 0.1 * grown + 1.0


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """What a token's position is multiplied by: float32 [head_dim / 2]."""
    frequencies = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config, head_dim)
    return frequencies


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    context, low, high = config.original_context, config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / config.factor, frequencies)
    share = (context / wavelengths - low) / (high - low)
    blended = (1 - share) * scaled / config.factor + share * scaled
    between = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return torch.where(between, blended, scaled)


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension that turns so often within the context."""
        context = config.original_context / (turns * 2 * math.pi)
        return (head_dim * math.log(context)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    powers = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return (1.0 / (config.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


class Rotation:
    """Cosines and sines of every position so far, for one head width.

    Args:
        config: what fixes the angles.
        head_dim: D, even.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(config, head_dim)
        self._factor = config.attention_factor
        self._table = torch.empty(0, 2, head_dim)  # [positions, (cos, sin), D]

    def at(self, positions: Tensor) -> Tensor:
        """The rotations of tokens.

        Args:
            positions: int64 [...], none negative.

        Returns:
            float32 [..., 2, D]: what `specdec.ops.rotate_heads` takes.
        """
        last = int(positions.max())
        while last >= len(self._table):
            self._grow()
        return take_rows(self._table, positions)

    def _grow(self) -> None:
        """Chunk by chunk, so that a position's numbers do not depend on how far the table reaches."""
        start = len(self._table)
        angles = torch.arange(start, start + _CHUNK, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        chunk = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1)
        self._table = torch.cat([self._table, chunk])
