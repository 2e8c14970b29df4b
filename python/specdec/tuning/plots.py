"""The choices and the search as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec.tuning.choices import Choice
from specdec.tuning.skip_search import SOURCES, Trial


def draw(
    path: Path,
    layers: int,
    vocab_size: int,
    choices: Sequence[tuple[str, Choice]],
    trials: Sequence[Trial],
) -> None:
    """Writes choices, a grid of layers by {mixer, MLP} each, above the paces of the trials in their order and
    their vocabularies.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2 + 0.7 * len(choices)), layout="constrained")
    heights = [*[0.6] * len(choices), 3.0, 0.9]
    rows = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (name, (skips, size)) in zip(rows, choices, strict=False):
        kept = [[i not in skipped for i in range(layers)] for skipped in (skips.mixers, skips.mlps)]
        axes.pcolormesh(kept, cmap="Blues", vmin=0, vmax=1.6, edgecolors="white", linewidth=1)
        axes.set_yticks([0.5, 1.5], ["mixer", "MLP"])
        axes.set_xticks([i + 0.5 for i in range(layers)], [str(i) for i in range(layers)], fontsize="x-small")
        axes.invert_yaxis()
        title = f"{name}: {len(skips)} of {2 * layers} sub-layers left out (white)"
        if size is not None:
            title += f", drafts of {size} of {vocab_size} tokens"
        axes.set_title(title, fontsize="small")
    history, vocabularies = rows[-2:]
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
    history.set_ylabel("time per token, plain decoding 1")
    history.legend(fontsize="small")
    sizes = [t.choice.vocabulary or vocab_size for t in trials]
    shades = ["0.8" if not t.complete else "C0" for t in trials]
    vocabularies.scatter([t.number for t in trials], sizes, s=6, c=shades)
    vocabularies.set_yscale("log", base=2)
    some = sorted({vocab_size, *sizes})
    vocabularies.set_yticks(some, [str(size) for size in some], fontsize="x-small")
    vocabularies.set_xlim(history.get_xlim())
    vocabularies.set_xlabel("trial")
    vocabularies.set_ylabel("tokens drafted")
    figure.savefig(path, dpi=130)
