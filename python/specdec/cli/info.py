"""`specdec info`: what runs here."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec import __version__
from specdec.bench.machine import cpu_model, isa
from specdec.models.checkpoint import embedded_drafters, embedded_models

_LIBRARIES = Path(__file__).resolve().parent.parent / "_lib"


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


def _libraries() -> list[str]:
    found = []
    for path in sorted(_LIBRARIES.glob("*.so")):
        what = "token trees and the n-gram index"
        if path.name.startswith("libspecdec_cpu"):
            what = f"CPU operators for {_builds()}"
        elif path.name.startswith("libspecdec_cuda"):
            what = "CUDA operators"
        elif path.name.startswith("libspecdec_simt"):
            what = "CUDA operators through the executor, for tests"
        found.append(f"{path.name}: {what}")
    return found or ["none built: run `make build`"]


def _cuda() -> str:
    """Whether CUDA operators are there, and used."""
    if not any(_LIBRARIES.glob("libspecdec_cuda*.so")):
        return "not built"
    return "built" if torch.version.cuda else "built, not loaded: this torch has no CUDA"


def _builds() -> str:
    try:
        from specdec.ops._load import cpu_isa_builds
    except ImportError as error:
        return f"nothing usable ({error})"
    return ", ".join(cpu_isa_builds())


def _strategy_table() -> str:
    """Which measured table chooses the verification strategy on this machine."""
    try:
        from specdec.ops import cpu_isa, strategy
    except ImportError:
        return "none"
    user = strategy.user_table_path()
    if cpu_isa() in strategy.user_tables():
        return f"{user} (of `specdec tune --kernels`)"
    shipped = strategy.read_tables(strategy.shipped_table_path())
    measured = "measured" if cpu_isa() in shipped else "measured on other instruction sets"
    return f"{strategy.shipped_table_path()} (shipped, {measured})"


def _rows() -> list[tuple[str, str]]:
    return [
        ("specdec", __version__),
        ("torch", torch.__version__),
        ("CPU", f"{cpu_model()}, {os.cpu_count()} logical cores"),
        ("instruction set", isa() or "not built"),
        ("threads", str(torch.get_num_threads())),
        *[("library", line) for line in _libraries()],
        ("CUDA", _cuda()),
        ("strategy table", _strategy_table()),
        ("embedded models", ", ".join(embedded_models()) or "none"),
        ("drafters for", ", ".join(embedded_drafters()) or "none"),
    ]
