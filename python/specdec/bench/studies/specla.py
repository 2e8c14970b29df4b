"""SpecLA's studies on this machine (arXiv 2607.16673): `specdec bench --study specla`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from rich.console import Console

from specdec.bench.studies import acceptance, commits, decoding, tree_verification
from specdec.bench.studies.lab import Lab, Step

NAME = "specla"
# Each has TITLE, steps, measure, sections and draw.
PARTS: dict[str, ModuleType] = {
    "acceptance": acceptance,
    "trees": tree_verification,
    "commits": commits,
    "decoding": decoding,
}


class Report:
    """The files of a study, written anew after every part, so that what was measured is never lost.

    Args:
        out: directory; made where it is missing.
        json_path: the JSON file; None for `specla.json` in `out`.
        machine: what it runs on.
        command: how it was started.
        about: what was measured: model, type, prompts.
    """

    def __init__(
        self, out: Path, json_path: Path | None, *, machine: str, command: Sequence[str], about: str
    ) -> None:
        self._out = out
        self._json = out / f"{NAME}.json" if json_path is None else json_path
        self._result: dict[str, Any] = {
            "study": NAME,
            "machine": machine,
            "command": shlex.join(command),
            "about": about,
            "seconds": 0.0,
        }

    @property
    def mismatches(self) -> list[str]:
        """Entries whose tokens are not those of plain decoding although their bits should be."""
        parts = (self._result.get(name, {"rows": []}) for name in ("acceptance", "decoding"))
        return [
            f"{row.get('group', 'acceptance')}, {row['name']}: {row['different_tokens']} tokens differ"
            for part in parts
            for row in part["rows"]
            if row["different_tokens"] and row["strategy"] != "solve"  # it adds in another order
        ]

    def add(self, name: str, result: dict[str, Any], seconds: float, console: Console) -> list[Path]:
        """Takes a part's result, prints it and writes all files; returns these."""
        self._result[name] = result
        self._result["seconds"] += seconds
        console.print(f"\n[bold underline]{PARTS[name].TITLE}[/bold underline]")
        for section in PARTS[name].sections(result):
            section.print(console)
        self._out.mkdir(parents=True, exist_ok=True)
        self._json.write_text(json.dumps(self._result, indent=1) + "\n", encoding="utf-8")
        page = self._out / f"{NAME}.md"
        page.write_text(self._markdown(), encoding="utf-8")
        picture = self._out / f"{NAME}-{name}.png"
        self._draw(name, picture)
        return [self._json, page, picture]

    def _markdown(self) -> str:
        about = self._result
        blocks = [
            "# SpecLA's studies on this machine",
            f"Machine: {about['machine']}.\n\nCommand: `{about['command']}` ({about['seconds']:.0f} s).\n\n"
            f"{about['about']} Written by the command; every ratio comes from runs that took turns in one "
            "process. The paper is arXiv 2607.16673; its figures are of an H100 and another model.",
        ]
        for name, part in PARTS.items():
            if name in self._result:
                blocks.append(f"## {part.TITLE}\n\n![{part.TITLE}]({NAME}-{name}.png)")
                blocks += [section.markdown(3) for section in part.sections(self._result[name])]
        return "\n\n".join(blocks) + "\n"

    def _draw(self, name: str, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        PARTS[name].draw(self._result[name], figure)
        figure.supxlabel(f"{self._result['machine']}\n{self._result['command']}", fontsize=6, color="0.4")
        figure.savefig(path, dpi=130)


def run(lab: Lab, report: Report, step: Step, console: Console) -> list[Path]:
    """Measures all parts and writes the report; returns the files written."""
    written: dict[Path, None] = {}
    for name, part in PARTS.items():
        begin = perf_counter()

        def told(text: str, name: str = name) -> None:
            step(f"{name}: {text}")

        result = part.measure(lab, told)
        written |= dict.fromkeys(report.add(name, result, perf_counter() - begin, console))
    return list(written)


def steps(lab: Lab) -> dict[str, int]:
    """Calls of `step` that each part makes."""
    return {name: int(part.steps(lab)) for name, part in PARTS.items()}
