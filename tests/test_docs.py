"""Examples of the documentation run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specdec

LOSSLESS = Path(__file__).parents[1] / "docs" / "lossless.md"


def test_the_example_of_lossless_md_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", LOSSLESS.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, LOSSLESS.name, "exec"), names)
    texts = capsys.readouterr().out.splitlines()
    assert len(texts) == 2 + 5
    result = names["result"]
    assert isinstance(result, specdec.Result)
    assert len(result.tokens) == 40
    pairs = set(zip(result.tokens, result.tokens[1:], strict=False))
    assert (names["newline"], names["newline"]) not in pairs


def test_completion_finds_names_that_were_not_imported_yet() -> None:
    assert {"Loop", "Request", "load_model", "__version__"} <= set(dir(specdec))
