"""Prompts from a folder of text, and how a model goes on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.generation import Request
from specdec.methods.autoregressive import autoregressive
from specdec.models.base import CausalLM
from specdec.models.tokenizer import Tokenizer
from specdec.training.corpus import read_texts

LENGTH = 48  # tokens of a prompt
_SHORTEST = 16
_CHARACTERS = 16 * LENGTH  # that are encoded: more than so many tokens have
_PASSES = 4  # over the folder, where it has few files
_COUNTED = 1 << 21  # characters at most in which tokens are counted

Text = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Texts:
    """Texts that a model wrote.

    Attributes:
        searched: prompts with the model's greedy continuations, all of one length.
        held_out: prompts that no choice depends on, from other files where there are enough.
        ranked: the model's tokens, the most frequent first, by the text that none of these was cut from.
    """

    searched: list[Text]
    held_out: list[list[int]]
    ranked: list[int]

    @property
    def sha256(self) -> str:
        """Of all tokens."""
        tokens = [self.searched, self.held_out, self.ranked]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


class _Cut(NamedTuple):
    """A prompt and where it was cut: the number of the file's text in their order, and the character."""

    prompt: list[int]
    text: int
    start: int


def cut_prompts(folder: Path, tokenizer: Tokenizer, count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings to continue, cut from the files below a folder at starts of lines, one from each file as
    long as they last.

    Raises:
        ValueError: `folder` is none, or there is too little text in it.
    """
    return [cut.prompt for cut in _cuts(folder, tokenizer, count, seed)]


def _cuts(folder: Path, tokenizer: Tokenizer, count: int, seed: int) -> list[_Cut]:
    if not folder.is_dir():
        raise ValueError(f"text: {str(folder)!r} is not a folder")
    chance = random.Random(seed)
    cuts: list[_Cut] = []
    known: set[tuple[int, ...]] = set()
    for _ in range(_PASSES):
        for number, text in enumerate(read_texts(folder, seed)):
            starts = [i + 1 for i, c in enumerate(text[: 3 * len(text) // 4]) if c == "\n"] or [0]
            start = chance.choice(starts)
            prompt = tokenizer.encode(text[start : start + _CHARACTERS])[:LENGTH]
            if len(prompt) >= _SHORTEST and tuple(prompt) not in known:
                known.add(tuple(prompt))
                cuts.append(_Cut(prompt, number, start))
            if len(cuts) == count:
                return cuts
    raise ValueError(
        f"text: {str(folder)!r} has {len(cuts)} places to begin at, want at least {count} "
        f"of {_SHORTEST} tokens or more"
    )


def write_texts(
    model: CausalLM,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    searched: int,
    held_out: int,
    new_tokens: int,
    seed: int = 0,
) -> Texts:
    """Prompts of a folder and the model's greedy continuations of them.

    Texts that the model ends early are left out where there are others.

    Args:
        model: the target.
        folder: of UTF-8 text files.
        tokenizer: the model's.
        searched, held_out: numbers of texts.
        new_tokens: of each continuation.
        seed: of the choice.

    Raises:
        ValueError: as `cut_prompts`.
    """
    cuts = _cuts(folder, tokenizer, held_out + searched + searched // 2, seed)
    prompts = [cut.prompt for cut in cuts]
    rest = prompts[held_out:]
    results = autoregressive(model, slots=len(rest)).run(
        [Request(p, new_tokens, ignore_eos=True) for p in rest]
    )
    texts = [(p, r.tokens) for p, r in zip(rest, results, strict=True)]
    texts.sort(key=lambda text: _ends(text[1], model))  # stable: those that do not end come first
    ranked = _ranked(folder, tokenizer, model.vocab_size, cuts, seed)
    return Texts(texts[:searched], prompts[:held_out], ranked)


def _ranked(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, cuts: Sequence[_Cut], seed: int
) -> list[int]:
    """All tokens, the most frequent first and of equally frequent ones that of the lower number, by the
    folder's text without what was cut and what follows there.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    left = _COUNTED
    for number, text in enumerate(read_texts(folder, seed)):
        at = 0
        for start in [*sorted(cut.start for cut in cuts if cut.text == number), len(text)]:
            piece = text[at:start][:left]
            at = max(at, start + _CHARACTERS)
            left -= len(piece)
            tokens = np.asarray(tokenizer.encode(piece), dtype=np.int64)
            counts += np.bincount(tokens, minlength=vocab_size)
        if left == 0:
            break
    ranked: list[int] = np.argsort(-counts, kind="stable").tolist()
    return ranked


def _ends(tokens: Sequence[int], model: CausalLM) -> bool:
    return bool(model.eos_token_ids.intersection(tokens))
