"""Prompts from a folder, and what the model makes of them."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest

from loop.models import random_model
from specdec.generation import Request
from specdec.methods.autoregressive import autoregressive
from specdec.models import load_tokenizer
from specdec.models.tokenizer import Tokenizer
from specdec.training.corpus import read_texts
from specdec.tuning.texts import LENGTH, _cuts, cut_prompts, write_texts

ENDS = frozenset(range(1, 60))  # of 4096 tokens
NEW = 24
LINE = "def function_{0}(argument):\n    return argument + {0}\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("gdn-code")


def folder(path: Path, files: int) -> Path:
    for i in range(files):
        (path / f"{i}.py").write_text("".join(LINE.format(100 * i + j) for j in range(40)), encoding="utf-8")
    (path / "short.txt").write_text("x\n", encoding="utf-8")
    (path / "no_text.bin").write_bytes(b"\xff\xfe\xfd" * 100)
    return path


def test_prompts_begin_at_lines_of_different_files(tmp_path, tokenizer) -> None:
    prompts = cut_prompts(folder(tmp_path, 5), tokenizer, 5)
    assert all(len(p) == LENGTH and p[0] == 0 for p in prompts)
    texts = [tokenizer.decode(p) for p in prompts]
    assert all(t.startswith(("def function_", "    return")) for t in texts)
    numbers = {next(n for n in range(500) if f"_{n}(" in t) // 100 for t in texts}
    assert numbers == set(range(5))
    assert cut_prompts(tmp_path, tokenizer, 5) == prompts
    assert cut_prompts(tmp_path, tokenizer, 5, seed=1) != prompts
    more = cut_prompts(tmp_path, tokenizer, 8)  # several from a file
    assert more[:5] == prompts
    assert len({tuple(p) for p in more}) == 8


def test_too_little_text_is_refused(tmp_path, tokenizer) -> None:
    with pytest.raises(ValueError, match=r"text: .* is not a folder"):
        cut_prompts(tmp_path / "none", tokenizer, 1)
    with pytest.raises(ValueError, match="has 0 places to begin at, want at least 1"):
        cut_prompts(tmp_path, tokenizer, 1)
    (tmp_path / "short.txt").write_text("x\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has 0 places"):
        cut_prompts(tmp_path, tokenizer, 1)


def test_texts_are_the_models_own_and_go_on_where_they_can(tmp_path, tokenizer) -> None:
    model = random_model(vocab_size=tokenizer.vocab_size, eos_token_ids=tuple(ENDS))
    texts = write_texts(model, folder(tmp_path, 9), tokenizer, searched=4, held_out=2, new_tokens=NEW)
    assert len(texts.searched) == 4
    assert len(texts.held_out) == 2
    prompts = cut_prompts(tmp_path, tokenizer, 8)
    assert texts.held_out == prompts[:2]
    ended = []
    for prompt in prompts[2:]:
        tokens = autoregressive(model).run([Request(prompt, NEW, ignore_eos=True)])[0].tokens
        ended.append(bool(ENDS.intersection(tokens)))
        assert ((prompt, tokens) in texts.searched) or ended[-1] or sum(not e for e in ended) > 4
    assert any(ended)
    assert len(texts.sha256) == 64
    other = write_texts(model, tmp_path, tokenizer, searched=4, held_out=2, new_tokens=NEW, seed=1)
    assert other.sha256 != texts.sha256


def test_tokens_are_ranked_by_the_text_that_is_not_scored(tmp_path, tokenizer) -> None:
    model = random_model(vocab_size=tokenizer.vocab_size, eos_token_ids=tuple(ENDS))
    folder(tmp_path, 4)
    ranked = write_texts(model, tmp_path, tokenizer, searched=3, held_out=2, new_tokens=NEW).ranked
    counts: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    cuts = _cuts(tmp_path, tokenizer, 6, 0)
    assert len({cut.text for cut in cuts}) < 6  # two from one file
    for number, text in enumerate(read_texts(tmp_path, 0)):
        free = [True] * len(text)
        for cut in cuts:
            if cut.text == number:
                free[cut.start : cut.start + 16 * LENGTH] = [False] * 16 * LENGTH
        for kept, run in groupby(zip(free, text, strict=False), key=lambda pair: pair[0]):
            if kept:
                counts.update(tokenizer.encode("".join(c for _, c in run)))
        whole.update(tokenizer.encode(text))
    del counts[0], whole[0]  # every piece begins with it
    order = sorted(range(tokenizer.vocab_size), key=lambda token: (-counts[token], token))
    assert [t for t in ranked if t] == [t for t in order if t]
    by_all = sorted(range(tokenizer.vocab_size), key=lambda token: (-whole[token], token))
    assert [t for t in ranked if t] != [t for t in by_all if t]
