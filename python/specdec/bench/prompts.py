"""The prompts of a comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Attributes:
        kind: its group in the tables.
        name: unique within its kind.
        prompt: the text.
    """

    kind: str
    name: str
    prompt: str


def bundled_path() -> Path:
    """The prompts that come with the package: complete, edit, repeat and free text, six of each."""
    return Path(str(resources.files("specdec"))) / "assets" / "prompts.json"


def load_prompts(path: Path | None = None) -> list[Prompt]:
    """Reads a JSON list of {"kind", "name", "prompt"}.

    Args:
        path: the file; None takes the bundled prompts.

    Raises:
        ValueError: not readable or not of this form; the message says which entry and why.
    """
    path = bundled_path() if path is None else path
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"prompts: {path} is over {_MAX_BYTES >> 20} MiB")
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"prompts: {path} cannot be read ({error.strerror or error})") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"prompts: {path} is not valid JSON ({error})") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"prompts: {path} holds no list of prompts")
    prompts = []
    seen = set()
    for number, entry in enumerate(entries):
        values = [entry.get(key) if isinstance(entry, dict) else None for key in ("kind", "name", "prompt")]
        fields = [value for value in values if isinstance(value, str) and value]
        if len(fields) < len(values):
            raise ValueError(f"prompts: entry {number} of {path} lacks a text for 'kind', 'name' or 'prompt'")
        prompt = Prompt(*fields)
        if (prompt.kind, prompt.name) in seen:
            raise ValueError(f"prompts: {path} has two entries {prompt.kind}/{prompt.name}")
        seen.add((prompt.kind, prompt.name))
        prompts.append(prompt)
    return prompts


def groups_of(prompts: list[Prompt], batch: int) -> list[list[Prompt]]:
    """Batches of `batch` prompts of one kind each, every prompt in at least one.

    A kind whose number of prompts is no multiple of `batch` goes round: its first prompts fill the last one.
    """
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    return [
        [of_kind[(start + i) % len(of_kind)] for i in range(batch)]
        for of_kind in kinds.values()
        for start in range(0, len(of_kind), batch)
    ]
