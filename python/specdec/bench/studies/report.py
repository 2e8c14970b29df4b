"""A study: parts that are measured one after the other, and the files that say what came out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from rich.console import Console

from specdec.bench.studies.lab import Lab, Step


@dataclass(frozen=True)
class Study:
    """What `specdec bench --study` can measure.

    Attributes:
        name: of the option.
        title: of the page.
        about: where it comes from, a sentence.
        parts: by name, a module with TITLE, steps, measure, sections and draw each.
    """

    name: str
    title: str
    about: str
    parts: Mapping[str, ModuleType]

    def run(self, lab: Lab, report: Report, step: Step, console: Console) -> list[Path]:
        """Measures all parts and writes the report; returns the files written."""
        written: dict[Path, None] = {}
        for name, part in self.parts.items():
            begin = perf_counter()

            def told(text: str, name: str = name) -> None:
                step(f"{name}: {text}")

            result = part.measure(lab, told)
            written |= dict.fromkeys(report.add(name, result, perf_counter() - begin, console))
        return list(written)

    def steps(self, lab: Lab) -> dict[str, int]:
        """Calls of `step` that each part makes."""
        return {name: int(part.steps(lab)) for name, part in self.parts.items()}


class Report:
    """The files of a study, written anew after every part, so that what was measured is never lost.

    Args:
        study: what is measured.
        out: directory; made where it is missing.
        stem: what the names of the files begin with.
        json_path: the JSON file; None for one of this name in `out`.
        machine: what it runs on.
        command: how it was started.
        about: what was measured: model, type, prompts.
    """

    def __init__(
        self,
        study: Study,
        out: Path,
        stem: str,
        json_path: Path | None,
        *,
        machine: str,
        command: Sequence[str],
        about: str,
    ) -> None:
        self._study = study
        self._out = out
        self._stem = stem
        self._json = out / f"{stem}.json" if json_path is None else json_path
        self._result: dict[str, Any] = {
            "study": study.name,
            "machine": machine,
            "command": shlex.join(command),
            "about": about,
            "seconds": 0.0,
        }

    @property
    def mismatches(self) -> list[str]:
        """Entries whose tokens are not those of plain decoding although their bits should be."""
        return [
            f"{row.get('group', name)}, {row['name']}: {row['different_tokens']} tokens differ"
            for name in self._study.parts
            for row in self._result.get(name, {}).get("rows", [])
            if row.get("different_tokens") and row["strategy"] != "solve"  # it adds in another order
        ]

    def add(self, name: str, result: dict[str, Any], seconds: float, console: Console) -> list[Path]:
        """Takes a part's result, prints it and writes all files; returns these."""
        self._result[name] = result
        self._result["seconds"] += seconds
        console.print(f"\n[bold underline]{self._study.parts[name].TITLE}[/bold underline]")
        for section in self._study.parts[name].sections(result):
            section.print(console)
        self._out.mkdir(parents=True, exist_ok=True)
        self._json.write_text(json.dumps(self._result, indent=1) + "\n", encoding="utf-8")
        page = self._out / f"{self._stem}.md"
        page.write_text(self._markdown(), encoding="utf-8")
        picture = self._out / f"{self._stem}-{name}.png"
        self._draw(name, picture)
        return [self._json, page, picture]

    def _markdown(self) -> str:
        about = self._result
        blocks = [
            f"# {self._study.title}",
            f"Machine: {about['machine']}.\n\nCommand: `{about['command']}` ({about['seconds']:.0f} s).\n\n"
            f"{about['about']} Written by the command; every ratio comes from runs that took turns in one "
            f"process. {self._study.about}",
        ]
        for name, part in self._study.parts.items():
            if name in self._result:
                blocks.append(f"## {part.TITLE}\n\n![{part.TITLE}]({self._stem}-{name}.png)")
                blocks += [section.markdown(3) for section in part.sections(self._result[name])]
        return "\n\n".join(blocks) + "\n"

    def _draw(self, name: str, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        self._study.parts[name].draw(self._result[name], figure)
        figure.supxlabel(f"{self._result['machine']}\n{self._result['command']}", fontsize=6, color="0.4")
        figure.savefig(path, dpi=130)
