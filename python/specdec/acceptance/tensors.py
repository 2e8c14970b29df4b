"""Sampling parameters of many rows as the operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.acceptance.params import SamplingParams

_TINY = torch.finfo(torch.float32).tiny  # a top-p that is less would be 0


class SamplingTensors(NamedTuple):
    """How rows of logits become rows of probabilities, an entry a row.

    Attributes:
        temperature: float32 [R].
        top_k: int32 [R].
        top_p: float32 [R].
        min_p: float32 [R].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingTensors:
        """The parameters [R] of rows, in order."""
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float32),
            torch.tensor([min(p.top_k, 2**31 - 1) for p in params], dtype=torch.int32),
            torch.tensor([max(p.top_p, _TINY) for p in params], dtype=torch.float32),
            torch.tensor([p.min_p for p in params], dtype=torch.float32),
        )


def seed_bits(seeds: Sequence[int]) -> Tensor:
    """int64 [R]: the bits of unsigned 64-bit seeds."""
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in seeds], dtype=torch.int64)
