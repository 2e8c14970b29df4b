"""The sets and the search as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec.models.skipping import SkipSet
from specdec.tuning.skip_search import SOURCES, Trial


def draw(path: Path, layers: int, sets: Sequence[tuple[str, SkipSet]], trials: Sequence[Trial]) -> None:
    """Writes sets, a grid of layers by {mixer, MLP} each, above the paces of the trials in their order.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4 + 0.7 * len(sets)), layout="constrained")
    rows = figure.subplots(len(sets) + 1, 1, height_ratios=[0.6] * len(sets) + [3.0], squeeze=False)[:, 0]
    for axes, (name, skips) in zip(rows, sets, strict=False):
        kept = [[i not in skipped for i in range(layers)] for skipped in (skips.mixers, skips.mlps)]
        axes.pcolormesh(kept, cmap="Blues", vmin=0, vmax=1.6, edgecolors="white", linewidth=1)
        axes.set_yticks([0.5, 1.5], ["mixer", "MLP"])
        axes.set_xticks([i + 0.5 for i in range(layers)], [str(i) for i in range(layers)], fontsize="x-small")
        axes.invert_yaxis()
        axes.set_title(f"{name}: {len(skips)} of {2 * layers} sub-layers left out (white)", fontsize="small")
    history = rows[-1]
    for source in SOURCES:
        found = [t for t in trials if t.source == source and t.complete]
        history.plot([t.number for t in found], [t.pace for t in found], "o", markersize=3, label=source)
    early = [t for t in trials if not t.complete]
    history.plot(
        [t.number for t in early],
        [t.pace for t in early],
        "x",
        markersize=3,
        color="0.8",
        label="ended early",
    )
    best, line = float("inf"), []
    for t in trials:
        best = min(best, t.pace) if t.complete else best
        line.append(best)
    history.step(range(len(line)), line, where="post", color="black", linewidth=1, label="best so far")
    history.axhline(1.0, color="0.5", linestyle=":", linewidth=1)
    history.set_ylim(top=1.1 * max([1.0, *(t.pace for t in trials if t.complete)]))
    history.set_xlabel("trial")
    history.set_ylabel("time per token, plain decoding 1")
    history.legend(fontsize="small")
    figure.savefig(path, dpi=130)
