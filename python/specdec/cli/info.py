"""`specdec info`: what runs here."""

from __future__ import annotations

import os

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec import __version__
from specdec.bench.machine import cpu_model, isa
from specdec.models.checkpoint import embedded_models


def run() -> None:
    """Prints the table to stdout."""
    table = Table.grid(padding=(0, 2))
    for name, value in _rows():
        # Folding keeps paths whole in narrow terminals; a pipe gets one line a row.
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 400
    console.print(table)


def _rows() -> list[tuple[str, str]]:
    return [
        ("specdec", __version__),
        ("torch", torch.__version__),
        ("CPU", f"{cpu_model()}, {os.cpu_count()} logical cores"),
        ("instruction set", isa() or "none: the operators are not built"),
        ("threads", str(torch.get_num_threads())),
        *[("library", line) for line in _libraries()],
        ("CUDA", "not built"),
        ("strategy table", _strategy_table()),
        ("embedded models", ", ".join(embedded_models()) or "none"),
    ]
