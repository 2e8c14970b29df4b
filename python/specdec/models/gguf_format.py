"""The container of a GGUF file (llama.cpp's format, versions 2 and 3, little-endian), as untrusted input.

A header of typed values, then what tensors there are, then their data. Every length is compared with the
file before anything is read or allocated for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_BLOCK = 32  # weights that share a scale in the quantised types
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of a number
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor is.

    Attributes:
        shape: outermost dimension first.
        kind: F32, F16, BF16, Q4_0, Q4_1 or Q8_0.
        start, stop: its bytes in the file.
    """

    shape: tuple[int, ...]
    kind: str
    start: int
    stop: int


class GGUFContainer:
    """An open GGUF file.

    Args:
        path: the file.

    Attributes:
        path: as given.
        fields: the header's values by their keys; arrays are lists.
        tensors: by their names.

    Raises:
        ValueError: it is not readable, or a tensor's type is none of the above.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise self._unreadable(getattr(error, "strerror", None) or str(error)) from None
        self._at = 0
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._unreadable(str(error).splitlines()[0]) from None

    def tensor(self, name: str) -> Tensor:
        """A tensor's numbers, float32: exactly those that the format defines."""
        found = self.tensors[name]
        data = torch.frombuffer(bytearray(self._bytes[found.start : found.stop]), dtype=torch.uint8)
        if found.kind == "F32":
            values = data.view(torch.float32)
        elif found.kind in _BYTES:
            values = data.view(torch.float16 if found.kind == "F16" else torch.bfloat16).float()
        else:
            values = _dequantised(data.view(-1, _BLOCK_BYTES[found.kind]), found.kind)
        return values.reshape(found.shape)

    def _read_header(self) -> None:
        if self._bytes[:4] != _MAGIC:
            raise self._unreadable("it does not begin with GGUF")
        self._at = 4
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise self._unreadable(f"version {version}, want one of {_VERSIONS}")
        tensors, fields = self._take("QQ")
        for _ in range(fields):
            key = self._string()
            self.fields[key] = self._value(*self._take("I"))
        found = list(self._tensor_infos(tensors))
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._unreadable(f"alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            numbers = prod(shape)
            if kind in _BYTES:
                size = numbers * _BYTES[kind]
            elif shape[-1] % _BLOCK:
                raise self._unreadable(f"{name} has rows of {shape[-1]}, want a multiple of {_BLOCK}")
            else:
                size = numbers // _BLOCK * _BLOCK_BYTES[kind]
            if start + offset + size > len(self._bytes):
                raise self._unreadable(f"{name} ends beyond the file")
            if name in self.tensors:
                raise self._unreadable(f"{name} is there twice")
            self.tensors[name] = GGUFTensor(shape, kind, start + offset, start + offset + size)

    def _tensor_infos(self, count: int) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
        for _ in range(count):
            name = self._string()
            (dimensions,) = self._take("I")
            if not 0 < dimensions <= _MAX_DIMENSIONS:
                raise self._unreadable(f"{name} has {dimensions} dimensions")
            shape = self._take(f"{dimensions}Q")[::-1]
            kind, offset = self._take("IQ")
            if kind not in _TYPES:
                wanted = ", ".join(_TYPES.values())
                raise ValueError(f"{self.path}: {name} has the type of number {kind}, want {wanted}")
            if 0 in shape:
                raise self._unreadable(f"{name} has shape {list(shape)}")
            yield name, shape, _TYPES[kind], offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, count = self._take("IQ")
            if of == _STRING:
                self._check_left(8 * count)
                return [self._string() for _ in range(count)]
            if of not in _NUMBERS:
                raise self._unreadable(f"an array of the type {of}")
            self._check_left(struct.calcsize(_NUMBERS[of]) * count)
            return list(self._take(f"{count}{_NUMBERS[of]}"))
        if kind not in _NUMBERS:
            raise self._unreadable(f"a value of the type {kind}")
        (value,) = self._take(_NUMBERS[kind])
        return bool(value) if kind == _BOOL else value

    def _string(self) -> str:
        (length,) = self._take("Q")
        self._check_left(length)
        self._at += length
        return self._bytes[self._at - length : self._at].decode("utf-8")

    def _take(self, form: str) -> tuple[Any, ...]:
        taken = struct.unpack_from(f"<{form}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{form}")
        return taken

    def _check_left(self, size: int) -> None:
        if size > len(self._bytes) - self._at:
            raise self._unreadable("it ends in its header")

    def _unreadable(self, reason: str) -> ValueError:
        return ValueError(f"{self.path}: not a readable GGUF file ({reason})")


def _dequantised(blocks: Tensor, kind: str) -> Tensor:
    """float32 [blocks, 32] of uint8 [blocks, bytes]: a float16 scale, for Q4_1 a float16 offset, then codes.

    Scales have 11 bits and codes up to 8: the products are exact, and the offset's sum is rounded once.
    """
    scale = blocks[:, :2].contiguous().view(torch.float16).float()  # [blocks, 1]
    if kind == "Q8_0":
        return scale * blocks[:, 2:].contiguous().view(torch.int8).float()
    codes = blocks[:, -_BLOCK // 2 :]
    numbers = torch.cat([codes & 15, codes >> 4], dim=1)  # [blocks, 32]
    if kind == "Q4_0":
        return scale * (numbers.float() - 8.0)
    return scale * numbers.float() + blocks[:, 2:4].contiguous().view(torch.float16).float()
