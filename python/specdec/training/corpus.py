"""From a folder of text to a memory-mapped file of tokens, and from there to batches."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from torch import Tensor

from specdec._checks import check_integer

END_OF_TEXT = "<|endoftext|>"
TOKENS_NAME = "tokens.bin"

_MAX_FILE_BYTES = 4 << 20
# Line breaks with the indentation that follows, words with their space, single digits, punctuation runs.
_PIECES = r"\n[ \t]*|[ ]?[A-Za-z_]+|[0-9]|[ ]?[^\sA-Za-z_0-9]+|[ \t]+"


def read_texts(folder: str | os.PathLike[str], seed: int) -> Iterator[str]:
    """The texts below `folder`, in an order that `seed` fixes.

    Hidden files and folders, files over 4 MiB, empty files and files that are not UTF-8 are left out.
    """
    root = Path(folder)
    paths = sorted(
        path
        for path in root.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(root).parts) and path.is_file()
    )
    random.Random(seed).shuffle(paths)
    for path in paths:
        if 0 < path.stat().st_size <= _MAX_FILE_BYTES:
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def train_tokenizer(folder: str | os.PathLike[str], vocab_size: int, seed: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of the texts below `folder`; id 0 is the end of text.

    A small folder gives fewer than `vocab_size` entries. Raises ValueError for a size below the 257 that
    bytes and the end of text need.
    """
    check_integer("vocab_size", vocab_size, 257)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    backend.pre_tokenizer = pre.Sequence(
        [
            pre.Split(tokenizers.Regex(_PIECES), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(read_texts(folder, seed), trainer)
    return backend


def write_tokens(
    folder: str | os.PathLike[str],
    backend: tokenizers.Tokenizer,
    path: Path,
    seed: int,
    most: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> int:
    """Encode the texts below `folder` into `path` (uint32), each after an end-of-text token, up to `most`
    tokens; returns their number.

    The end of text is the tokenizer's token of that name, else the first of the model's `eos_token_ids`.
    Raises ValueError where there is neither, or the folder holds no text.
    """
    end = backend.token_to_id(END_OF_TEXT)
    if end is None and eos_token_ids:
        end = eos_token_ids[0]
    if end is None:
        raise ValueError(f"tokenizer: has no {END_OF_TEXT} token")
    partial = path.with_name(path.name + ".partial")
    total = 0
    with partial.open("wb") as file:
        for text in read_texts(folder, seed):
            ids = [end, *backend.encode(text, add_special_tokens=False).ids]
            ids = ids if most is None else ids[: most - total]
            np.asarray(ids, dtype=np.uint32).tofile(file)
            total += len(ids)
            if total == most:
                break
    if total == 0:
        partial.unlink()
        raise ValueError(f"text: {str(folder)!r} holds no readable text")
    os.replace(partial, path)
    return total


def frequent_tokens(path: Path, length: int, vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent of the first `length` tokens in a token file, int64, ascending.

    Of equally frequent ones those with the lower number are taken.
    """
    tokens = np.memmap(path, dtype=np.uint32, mode="r")[:length]
    counts = np.bincount(tokens.astype(np.int64), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


class TokenWindows:
    """Windows of `length + 1` tokens from a token file, split into training and held-out ones.

    The last 2% of the windows (at least one) are held out. Training windows come in a new random order every
    epoch; the order depends on the seed and the epoch alone, so any step can be repeated without stored
    random state.

    Args:
        path: file of `write_tokens`; it is memory-mapped.
        length: tokens that are predicted in a window.
        seed: of the order.

    Raises:
        ValueError: the file has fewer than two windows.
    """

    def __init__(self, path: Path, length: int, seed: int) -> None:
        self._tokens = np.memmap(path, dtype=np.uint32, mode="r")
        self._length = length
        self._seed = seed
        windows = (len(self._tokens) - 1) // length
        self.num_held_out = max(1, windows // 50)
        self.num_training = windows - self.num_held_out
        if self.num_training < 1:
            raise ValueError(
                f"text: holds {len(self._tokens)} tokens, "
                f"want at least {2 * length + 1} (two windows of {length})"
            )
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def training_tokens(self) -> int:
        """Tokens predicted in one epoch."""
        return self.num_training * self._length

    def _window(self, index: int) -> Tensor:
        start = index * self._length
        return torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Windows by their number: int64 `[len(indices), length + 1]`."""
        return torch.stack([self._window(index) for index in indices])

    def batch_indices(self, step: int, size: int) -> list[int]:
        """Numbers of the windows of training batch number `step`."""
        indices = []
        for position in range(step * size, (step + 1) * size):
            epoch, place = divmod(position, self.num_training)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self._seed + epoch)
                self._epoch, self._order = epoch, torch.randperm(self.num_training, generator=generator)
            indices.append(int(self._order[place]))
        return indices

    def batch(self, step: int, size: int) -> Tensor:
        """Training batch number `step`: int64 `[size, length + 1]`."""
        return self.rows(self.batch_indices(step, size))

    def held_out_indices(self, size: int, most: int) -> Iterator[range]:
        """Numbers of the first `most` held-out windows, in batches of up to `size`."""
        stop = self.num_training + min(self.num_held_out, most)
        for start in range(self.num_training, stop, size):
            yield range(start, min(start + size, stop))

    def held_out(self, size: int, most: int) -> Iterator[Tensor]:
        """The first `most` held-out windows in batches of up to `size`: int64 `[<= size, length + 1]`."""
        for indices in self.held_out_indices(size, most):
            yield self.rows(indices)
