"""The comparison as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from specdec._rules import is_lossless
from specdec.bench.contenders import BASELINE, REFERENCE
from specdec.bench.harness import Row


def drafter_label(row: Row) -> str:
    """A row's drafter; an oracle with its p, a tree with its shape, and when drafts end."""
    drafter = row["drafter"]
    if drafter is None:
        return ""
    if "oracle_p" in row:
        return f"{drafter} p={row['oracle_p']:g}"
    parts = [str(drafter)]
    if "draft_int8" in row:
        parts.append("int8" if row["draft_int8"] else "own weights")
    parts += [f"{name} {row[f'draft_{name}']}" for name in ("tree", "exit") if f"draft_{name}" in row]
    return " ".join(parts)


def contender_label(row: Row) -> str:
    """A row's method, drafter and rule of acceptance."""
    parts = [str(row["method"]), drafter_label(row), acceptance_label(row)]
    return ", ".join(part for part in parts if part)


def acceptance_label(row: Row) -> str:
    """What decided about a row's drafts; a lossy rule always shows that it is one."""
    rule = row.get("acceptance")
    if rule is None:
        return ""
    return str(rule) if is_lossless(str(rule)) else f"{rule} (LOSSY)"


def _accepted(row: Row) -> str:
    if row["drafter"] is None:
        return ""
    return f"{row['acceptance_rate']:.0%}" if row["drafted"] else "no drafts"


def table_of(rows: Sequence[Row]) -> Table:
    """Rows over all prompts are set in bold, those of a kind follow them."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    sampled = any(row["acceptance"] is not None for row in rows)
    for name in ("method", "drafter", *(["acceptance"] if sampled else []), "batch", "prompts"):
        table.add_column(name)
    for name in ("tokens/s", "rounds/s", "accepted\nlength", "drafts\naccepted", "accept\ntime", "speedup"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        kind = row.get("kind")
        table.add_row(
            str(row["method"]),
            drafter_label(row),
            *([acceptance_label(row)] if sampled else []),
            str(row["batch"]),
            "all" if kind is None else str(kind),
            f"{row['tokens_per_second']:.0f}",
            f"{row['rounds_per_second']:.0f}",
            f"{row['mean_accepted_length']:.2f}",
            _accepted(row),
            f"{row['acceptance_share']:.1%}" if row["acceptance_share"] is not None else "",
            Text("mismatch", style="bold red") if row["speedup"] is None else f"{row['speedup']:.2f}x",
            style="bold" if kind is None else "",
        )
    return table


def over_reference(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(batch, tokens/s of the autoregressive loop over the reference model's), where both were measured."""
    ratios = []
    for row in rows:
        speedup = row["speedup"]
        if row["method"] == REFERENCE and "kind" not in row and isinstance(speedup, float):
            ratios.append((int(str(row["batch"])), 1.0 / speedup))
    return ratios


def write_json(path: Path, machine: str, rows: Sequence[Row]) -> None:
    """{"machine": ..., "rows": [...]}; rows without "kind" are over all prompts."""
    path.write_text(json.dumps({"machine": machine, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")


def write_plot(path: Path, machine: str, rows: Sequence[Row]) -> None:
    """Bars of speedup over the baseline by prompt kind, one panel a batch size; a mismatch has no bar."""
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(row["batch"] for row in rows))
    kinds = list(dict.fromkeys(str(row.get("kind", "all")) for row in rows))
    labels = list(dict.fromkeys(contender_label(row) for row in rows))
    figure = Figure(figsize=(max(2 + 1.6 * len(kinds), 8), 0.8 + 3.2 * len(batches)), layout="constrained")
    panels = figure.subplots(len(batches), 1, squeeze=False)[:, 0]
    width = 0.8 / len(labels)
    for axes, batch in zip(panels, batches, strict=True):
        for number, label in enumerate(labels):
            by_kind = {
                str(row.get("kind", "all")): row["speedup"]
                for row in rows
                if row["batch"] == batch and contender_label(row) == label
            }
            heights = [float(str(by_kind[k])) if by_kind.get(k) is not None else 0.0 for k in kinds]
            places = [i + (number - (len(labels) - 1) / 2) * width for i in range(len(kinds))]
            bars = axes.bar(places, heights, width * 0.92, label=label)
            axes.bar_label(bars, [f"{h:.2f}" if h else "mismatch" for h in heights], fontsize=7, padding=2)
        axes.axhline(1.0, color="0.4", linewidth=0.8, zorder=0)
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set_ylabel(f"speedup over {BASELINE}")
        axes.set_title(f"batch {batch}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", frameon=False, fontsize=8, ncols=3)
    figure.supxlabel(machine, fontsize=7, color="0.4")
    figure.savefig(path, dpi=150)
