"""Verification over batch sizes 1 to 256: cold states, graph replay, beside published figures of others.

python bench/gpu/batch.py --json batch.json
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import QWEN, TINY, WIDE, Heads, Layers, Options, finish, measure, options, require, table

from specdec.ops import Pending

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
NAMES = ("serial", "solve", "serial deferred", "solve deferred")


def published(heads: Heads, B: int, T: int) -> dict[str, float]:
    """Others' microseconds of this shape by kernel, on the GPU that they name."""
    found = (row for row in PUBLISHED["rows"] if row["heads"] == str(heads))
    return {row["kernel"]: row["us"][f"{B}/{T}"] for row in found if f"{B}/{T}" in row["us"]}


def rows_of(heads: Heads, B: int, T: int, run: Options) -> list[dict[str, Any]]:
    """One row a strategy, without and with the commit of the round before (T - 1 tokens, at least one)."""
    layers = Layers(heads, B, T, run.device)
    expected = layers.expected(layers.states[0])
    for strategy in ("serial", "solve"):
        require(layers.verify(0, strategy)[0], expected, f"{strategy} {heads} B={B} T={T}")
    accepted = torch.full((B,), max(1, T - 1), dtype=torch.int32, device=run.device)
    pending = [Pending(layers.verify(i, "serial")[1], None, accepted) for i in range(layers.sets)]

    def calls(strategy: str, deferred: bool) -> list[Any]:
        return [
            partial(layers.verify, i, strategy, **({"pending": pending[i]} if deferred else {}))
            for i in range(layers.sets)
        ]

    us = measure({name: calls(name.split()[0], name.endswith("deferred")) for name in NAMES}, run)
    others = published(heads, B, T)
    return [
        {"name": name, "heads": str(heads), "B": B, "T": T, "us": us[name], "published_us": others}
        for name in NAMES
    ]


def main(argv: list[str] | None = None) -> None:
    run = options(__doc__, argv)
    rows: list[dict[str, Any]] = []
    if run.quick:
        shapes = [(TINY, 2, 4)]
    else:
        shapes = [
            (heads, B, T)
            for heads in (QWEN, WIDE)
            for B in (1, 2, 4, 8, 16, 32, 64, 128, 256)
            for T in (4, 8)
        ]
    for heads, B, T in shapes:
        rows += rows_of(heads, B, T, run)
        if run.device == "cuda":
            torch.cuda.empty_cache()
    lines = []
    for i in range(0, len(rows), len(NAMES)):
        group = rows[i : i + len(NAMES)]
        others = "; ".join(f"{us:g} ({kernel})" for kernel, us in group[0]["published_us"].items())
        head = [group[0]["heads"], str(group[0]["B"]), str(group[0]["T"])]
        lines.append([*head, *(f"{row['us']:.1f}" for row in group), others])
    table(
        f"Microseconds a layer (published: {PUBLISHED['gpu']})",
        ["heads", "B", "T", *NAMES, "published"],
        lines,
    )
    finish(run, rows, {"published": PUBLISHED})


if __name__ == "__main__":
    main()
