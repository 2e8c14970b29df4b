"""Examples of the documentation run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specdec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LOSSLESS = DOCS / "lossless.md"


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


def test_the_example_of_models_md_writes_what_plain_decoding_writes() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "models.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, "models.md", "exec"), names)
    result, request, model = names["result"], names["request"], names["model"]
    assert isinstance(result, specdec.Result)
    assert isinstance(request, specdec.Request)
    plain = specdec.Loop(model).run([request])[0]  # type: ignore[arg-type]
    assert result.tokens == plain.tokens


def test_the_example_of_cli_md_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "cli.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(block, "cli.md", "exec"), {})
    assert capsys.readouterr().out.endswith(" True\n")  # both texts are plain decoding's


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_of_the_pages_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    names = {link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)} - {""}
    assert [name for name in sorted(names) if not (page.parent / name).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_pages_that_are_named_exist(page: str) -> None:
    names = set(re.findall(r"`(docs/[\w./-]+)`", (ROOT / page).read_text(encoding="utf-8")))
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


def test_completion_finds_names_that_were_not_imported_yet() -> None:
    assert {"Loop", "Request", "load_model", "__version__"} <= set(dir(specdec))
