"""Prompts from a folder of text, and how a model goes on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.generation import Request
from specdec.methods.autoregressive import autoregressive
from specdec.models.base import CausalLM
from specdec.models.tokenizer import Tokenizer
from specdec.training.corpus import read_texts

LENGTH = 48  # tokens of a prompt
_SHORTEST = 16
_CHARACTERS = 16 * LENGTH  # that are encoded: more than so many tokens have
_PASSES = 4  # over the folder, where it has few files

Text = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Texts:
    """Texts that a model wrote.

    Attributes:
        searched: prompts with the model's greedy continuations, all of one length.
        held_out: prompts that no choice depends on, from other files where there are enough.
    """

    searched: list[Text]
    held_out: list[list[int]]

    @property
    def sha256(self) -> str:
        """Of all tokens."""
        return hashlib.sha256(json.dumps([self.searched, self.held_out]).encode()).hexdigest()


def cut_prompts(folder: Path, tokenizer: Tokenizer, count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings to continue, cut from the files below a folder at starts of lines, one from each file as
    long as they last.

    Raises:
        ValueError: `folder` is none, or there is too little text in it.
    """
    if not folder.is_dir():
        raise ValueError(f"text: {str(folder)!r} is not a folder")
    chance = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(_PASSES):
        for text in read_texts(folder, seed):
            starts = [i + 1 for i, c in enumerate(text[: 3 * len(text) // 4]) if c == "\n"] or [0]
            start = chance.choice(starts)
            prompt = tokenizer.encode(text[start : start + _CHARACTERS])[:LENGTH]
            if len(prompt) >= _SHORTEST and prompt not in prompts:
                prompts.append(prompt)
            if len(prompts) == count:
                return prompts
    raise ValueError(
        f"text: {str(folder)!r} has {len(prompts)} places to begin at, want at least {count} "
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
    prompts = cut_prompts(folder, tokenizer, held_out + searched + searched // 2, seed)
    rest = prompts[held_out:]
    results = autoregressive(model, slots=len(rest)).run(
        [Request(p, new_tokens, ignore_eos=True) for p in rest]
    )
    texts = [(p, r.tokens) for p, r in zip(rest, results, strict=True)]
    texts.sort(key=lambda text: _ends(text[1], model))  # stable: those that do not end come first
    return Texts(texts[:searched], prompts[:held_out])


def _ends(tokens: Sequence[int], model: CausalLM) -> bool:
    return bool(model.eos_token_ids.intersection(tokens))
