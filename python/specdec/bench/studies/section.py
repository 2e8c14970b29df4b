"""A part of a report: what it says, as text of a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and a table or none. Brackets and bars in them are shown as they are.

    Attributes:
        title: the heading.
        text: paragraphs before the table.
        header: of the columns; empty for no table.
        rows: cells; the first column is set left, the others right.
    """

    title: str
    text: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)

    def print(self, console: Console) -> None:
        """Writes it to a terminal."""
        console.print()
        console.print(Text(self.title, style="bold"))
        for paragraph in self.text:
            console.print(paragraph, markup=False)
        if self.header:
            table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
            for number, name in enumerate(self.header):
                table.add_column(Text(name), justify="right" if number else "left")
            for row in self.rows:
                table.add_row(*map(Text, row))
            console.print(table)

    def markdown(self, level: int) -> str:
        """It as Markdown under a heading of this level."""
        blocks = [f"{'#' * level} {self.title}", *self.text]
        if self.header:
            lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.rows]
            escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
            blocks.append("\n".join("| " + " | ".join(line) + " |" for line in escaped))
        return "\n\n".join(blocks)


def times(ratio: float | None) -> str:
    """A ratio as tables write it."""
    return "" if ratio is None else f"{ratio:.2f}x"
