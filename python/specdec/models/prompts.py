"""Prompts of a batch as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def padded_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Prompts side by side.

    Returns:
        int64 [B, T] with zeros beyond a prompt's end, and int32 [B] the lengths.

    Raises:
        ValueError: a prompt is empty, there is none, or a token is outside the vocabulary.
    """
    lengths = [len(p) for p in prompts]
    if not prompts or min(lengths) < 1:
        raise ValueError(f"prompts: got lengths {lengths}, want at least one token in each")
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.long)
    check_tokens(tokens, vocab_size)
    return tokens, torch.as_tensor(lengths, dtype=torch.int32)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Refuses prompts with tokens outside the vocabulary.

    Raises:
        ValueError: there is one.
    """
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"prompts: got token ids from {low} to {high}, want 0 to {vocab_size - 1}")
