"""Models: configuration, checkpoints, tokenizer, and the implementations that run them.

Importing this package loads no operator library; `load_model` does. So configurations, tokenizers and
training work without it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from specdec.models.checkpoint import load_config, resolve_model
from specdec.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

__all__ = ["Tokenizer", "load_model", "load_tokenizer"]


def load_model(
    name_or_dir: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> GatedDeltaNetForCausalLM:
    """The model of that name that comes with the package ("gdn-code"), or the one in a directory.

    Raises:
        ValueError: there is no such model, or its files are not what the format says.
        ImportError: the operator library is not built.
    """
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM.from_pretrained(resolve_model(name_or_dir), dtype=dtype)


def load_tokenizer(name_or_dir: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model, given as for `load_model`. Raises ValueError like it."""
    directory = resolve_model(name_or_dir)
    return Tokenizer.from_directory(directory, load_config(directory).bos_token_id)
