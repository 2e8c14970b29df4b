"""Reading and writing recurrent drafters: a directory with `config.json` and `model.safetensors`.

The rules are those of models (models/checkpoint.py): safetensors alone, and names, shapes and dtypes of all
tensors are compared with the configuration before anything is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from specdec._checks import shown
from specdec.models.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    check_shapes,
    is_matrix,
    read_headers,
    read_tensors,
    write_json,
    write_tensors,
)
from specdec.models.drafter_config import RecurrentDrafterConfig, drafter_tensors

VOCABULARY = "draft_vocab"


def load_drafter_config(directory: str | os.PathLike[str]) -> RecurrentDrafterConfig:
    """The configuration of the drafter in `directory`.

    Raises:
        ValueError: it is missing or not valid.
    """
    return RecurrentDrafterConfig.from_file(Path(directory) / CONFIG_NAME)


def load_drafter_weights(
    directory: str | os.PathLike[str],
    config: RecurrentDrafterConfig,
    *,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The drafter's tensors by name, exactly those of `drafter_tensors(config)`.

    Args:
        directory: holds `model.safetensors`.
        config: what the tensors must fit.
        dtype: of the matrices. Everything else is float32, or float64 where `dtype` is float64; `draft_vocab`
            is int32.

    Raises:
        ValueError: no such file, a damaged one, tensors that are missing, unexpected, mis-shaped or of the
            wrong dtype (nothing has been allocated then), or a `draft_vocab` that is no ascending list of
            tokens.
    """
    path = Path(directory) / WEIGHTS_NAME
    if not path.is_file():
        raise ValueError(f"{directory}: has no {WEIGHTS_NAME}")
    where, shapes = read_headers([path], integers=[VOCABULARY])
    check_shapes(drafter_tensors(config), shapes, str(directory))
    small = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = {name: dtype if is_matrix(name) else small for name in where}
    if VOCABULARY in where:
        dtypes[VOCABULARY] = torch.int32
    tensors = read_tensors(where, dtypes)
    if VOCABULARY in tensors:
        check_draft_vocabulary(tensors[VOCABULARY], config.target.vocab_size, str(directory))
    return tensors


def check_draft_vocabulary(tokens: Tensor, vocab_size: int, where: str) -> None:
    """Refuses what is no ascending list of distinct tokens.

    Raises:
        ValueError: naming `where`.
    """
    ids = tokens.tolist()
    if ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        raise ValueError(
            f"{where}: {VOCABULARY}: got {shown(ids)}, want ascending token ids from 0 to {vocab_size - 1}"
        )


def save_drafter(
    directory: str | os.PathLike[str], config: RecurrentDrafterConfig, tensors: Mapping[str, Tensor]
) -> None:
    """Writes `config.json` and `model.safetensors` so that the functions above read them back.

    Matrices are stored in bfloat16, `draft_vocab` in int32 and everything else in float32. Each file is
    written beside its place and moved there, so an interrupted call leaves no half-written file.

    Args:
        directory: created where it does not exist.
        config: the configuration; `tensors` must fit it.
        tensors: name -> tensor, the names of `drafter_tensors(config)`.

    Raises:
        ValueError: the tensors do not fit, or `draft_vocab` is no ascending list of tokens.
    """
    check_shapes(
        drafter_tensors(config), {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "tensors"
    )
    if VOCABULARY in tensors:
        check_draft_vocabulary(tensors[VOCABULARY], config.target.vocab_size, "tensors")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)

    def stored(name: str) -> Tensor:
        dtype = torch.int32 if name == VOCABULARY else torch.bfloat16 if is_matrix(name) else torch.float32
        return tensors[name].detach().to(device="cpu", dtype=dtype).contiguous()

    write_tensors(directory / WEIGHTS_NAME, {name: stored(name) for name in drafter_tensors(config)})
    write_json(directory / CONFIG_NAME, config.to_dict())
