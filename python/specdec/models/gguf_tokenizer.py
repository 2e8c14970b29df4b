"""The tokenizer in a GGUF file: byte-level BPE alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specdec._checks import shown
from specdec.models.gguf_file import GGUFFile
from specdec.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the model in a GGUF file.

    Raises:
        ValueError: the file is damaged or has another kind of tokenizer.
    """
    file = GGUFFile(path)

    kind, pre = (file.field(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != "gpt2":
        raise ValueError(f"{path}: tokenizer.ggml.model: got {shown(kind)}, want 'gpt2'")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
    }
    if pre not in splits:
        raise ValueError(f"{path}: tokenizer.ggml.pre: got {shown(pre)}, want one of {sorted(splits)}")
    tokens, merges, kinds = (_list(file, name) for name in ("tokens", "merges", "token_type"))
    if len(kinds) != len(tokens):
        raise ValueError(f"{path}: tokenizer.ggml.token_type: got {len(kinds)} entries, want {len(tokens)}")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{path}: not a readable tokenizer ({str(error).splitlines()[0]})") from None
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = splits[pre]
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos = file.field("tokenizer.ggml.bos_token_id") if file.field("tokenizer.ggml.add_bos_token") else None
    return Tokenizer(backend, bos)


def _list(file: GGUFFile, name: str) -> list[Any]:
    value = file.field(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise ValueError(f"{file.path}: tokenizer.ggml.{name}: got {shown(value)}, want a list")
    return value
