"""Controlled acceptance: an oracle that is right with probability p drafts chains of n tokens.

The speedup is predicted without the loop: a round emits E = (1 - p^(n+1)) / (1 - p) tokens on average (arXiv
2211.17192), and takes T(n), the time of the model's forward pass over the round's 1 + n nodes, which folds E
tokens of the round before into the state. What the loop reaches is E' tokens a round, and a round costs as
many plain rounds as E' over the speedup: the two factors by which measurement and prediction differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from specdec.bench.studies.lab import Entry, Lab, Step, after
from specdec.bench.studies.section import Section, times
from specdec.bench.timing import interleaved
from specdec.budget import expected_tokens
from specdec.methods import DrafterSpec

TITLE = "Controlled acceptance"
CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LENGTHS = (1, 2, 4, 8, 16)
PAPER_ORACLE = 3.71  # arXiv 2607.16673, H100, its best length

Result = dict[str, Any]


def steps(lab: Lab) -> int:
    """Calls of `step` that `measure` makes."""
    chances, lengths, _ = _grid(lab)
    return 1 + len(chances) * len(lab.units(1, _prompts(lab))) * _repeats(lab) * (1 + len(lengths))


def measure(lab: Lab, step: Step) -> Result:
    """Round times, then the grid of p and n; plain decoding takes turns with the lengths of every p."""
    chances, lengths, count = _grid(lab)
    cost = RoundTimes.measure(lab, lengths, 1.0 if lab.quick else 15.0)
    step("round times")
    rows = []
    for p in chances:
        spec = DrafterSpec.parse("oracle", p=p)
        entries = [Entry(f"n = {n}", spec, max_draft=n, adaptive=False) for n in lengths]
        found = lab.compare(
            entries,
            lab.units(1, _prompts(lab)),
            batch=1,
            count=count,
            repeats=_repeats(lab),
            step=after(f"p = {p:g}", step),
        )
        for n, row in zip(lengths, found, strict=True):
            expected = expected_tokens(p, n)
            round_cost = cost(n, expected) / cost(0, 1.0)
            reached = row["tokens_per_round"] / row["speedup"]
            rows.append(
                row
                | {
                    "p": p,
                    "n": n,
                    "expected_tokens": expected,
                    "predicted_round_cost": round_cost,
                    "round_cost": reached,
                    "predicted_speedup": expected / round_cost,
                }
            )
    return {"rows": rows, "round_us": cost.as_dict()}


def _grid(lab: Lab) -> tuple[Sequence[float], Sequence[int], int]:
    """Chances, lengths and tokens a sequence."""
    return ((0.5, 1.0), (1, 4), 24) if lab.quick else (CHANCES, LENGTHS, 96)


def _prompts(lab: Lab) -> int:
    return 1 if lab.quick else 3


def _repeats(lab: Lab) -> int:
    return 1 if lab.quick else 2


class RoundTimes:
    """Microseconds of a forward pass over 1 + n nodes by how many tokens it folds in, one or all."""

    def __init__(self, us: Mapping[int, tuple[float, float]]) -> None:
        self._us = us

    @classmethod
    def measure(cls, lab: Lab, lengths: Sequence[int], seconds: float) -> RoundTimes:
        """Times passes over random tokens, each folding in what the one before left."""
        model = lab.model
        prompt = lab.units(1, 1)[0].prompts[0]
        cache = model.new_cache(1)
        model.prefill([prompt], cache=cache, slots=[0])
        slots = torch.tensor([0], dtype=torch.int32)
        rng = torch.Generator().manual_seed(0)

        def rounds(nodes: int, folded: int) -> Callable[[], object]:
            tokens = torch.randint(model.vocab_size, (1, nodes), generator=rng)
            accepted = torch.tensor([folded], dtype=torch.int32)

            def run() -> None:
                _, factors = model.forward(tokens, cache=cache, slots=slots)
                cache.defer(factors, None, accepted)

            return run

        cases = [(1 + n, folded) for n in (0, *lengths) for folded in dict.fromkeys((1, 1 + n))]
        us = interleaved({f"{c}": rounds(*c) for c in cases}, seconds, layers=1)
        return cls({n: (us[f"{(1 + n, 1)}"], us[f"{(1 + n, 1 + n)}"]) for n in (0, *lengths)})

    def __call__(self, n: int, folded: float) -> float:
        """Microseconds with n drafts where `folded` tokens, 1 to 1 + n, are folded in: on a line between."""
        one, every = self._us[n]
        return one + (every - one) * (folded - 1.0) / max(n, 1)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """By n: {"one": ..., "all": ...} tokens folded in."""
        return {str(n): {"one": one, "all": every} for n, (one, every) in self._us.items()}


def sections(result: Result) -> list[Section]:
    """The grid, prediction beside measurement, and what the shape is."""
    rows = result["rows"]
    chances = list(dict.fromkeys(row["p"] for row in rows))
    lengths = list(dict.fromkeys(row["n"] for row in rows))
    at = {(row["p"], row["n"]): row for row in rows}
    head = ["p", *(f"n = {n}" for n in lengths)]

    def grid(cell: Callable[[Mapping[str, Any]], str]) -> list[list[str]]:
        return [[f"{p:g}", *(cell(at[p, n]) for n in lengths)] for p in chances]

    round_us = result["round_us"]
    return [
        Section(
            "Speedup over plain decoding, measured (predicted)",
            [
                "An oracle's tokens are right with probability p; chains of n drafts in every round, batch "
                "of 1, greedy. The baseline is our own autoregressive loop, which takes turns. Predicted: E "
                "tokens a round, E = (1 - p^(n+1)) / (1 - p), over the time of the model's pass over 1 + n "
                "nodes in passes over one node."
            ],
            head,
            grid(lambda r: f"{r['speedup']:.2f}x ({r['predicted_speedup']:.2f}x)"),
        ),
        Section(
            "A round in plain rounds, measured (predicted)",
            [
                "What a round with n drafts costs in rounds of plain decoding. Below its expected tokens "
                "drafting gains, above them it loses."
            ],
            ["p", *head[1:]],
            grid(lambda r: f"{r['round_cost']:.2f} ({r['predicted_round_cost']:.2f})"),
        ),
        Section(
            "The model's pass by itself",
            ["Microseconds over 1 + n nodes, with one token of the round before to fold in, and with all."],
            ["folded in", *(f"n = {n}" for n in round_us)],
            [[name, *(f"{us[name]:.0f}" for us in round_us.values())] for name in ("one", "all")],
        ),
        Section("The shape, beside the paper's", account(result)),
    ]


def account(result: Result) -> list[str]:
    """Where drafting begins to gain, and by how much measurement, prediction and the paper differ."""
    rows = result["rows"]
    chances = sorted({row["p"] for row in rows})
    lengths = sorted({row["n"] for row in rows})
    by_chance = {p: [row["speedup"] for row in rows if row["p"] == p] for p in chances}
    always = [p for p in chances if all(min(by_chance[q]) >= 1.0 for q in chances if q >= p)]
    below = [s for p in chances if p < 0.7 for s in by_chance[p]]
    worst = min(rows, key=lambda row: float(row["speedup"]))
    best = max(rows, key=lambda row: float(row["speedup"]))
    ours = f"below 0.7 from {min(below):.2f}x to {max(below):.2f}x; " if below else ""
    ours += f"every length gains from p = {always[0]:g} on" if always else "at no p does every length gain"
    even = [
        f"n = {n}: {_chance(break_even(rows, n, 'speedup'))} "
        f"(predicted {_chance(break_even(rows, n, 'predicted_speedup'))})"
        for n in lengths
    ]
    surest = {row["n"]: row["predicted_round_cost"] for row in rows if row["p"] == chances[-1]}
    pass_cost = ", ".join(f"{surest[n]:.2f}" for n in lengths)
    within_reach = [
        f"n = {n}: {(n + 1) / PAPER_ORACLE:.2f}, here {surest[n]:.2f}"
        for n in lengths
        if n + 1 >= PAPER_ORACLE
    ]
    return [
        "The paper (SpecLA, arXiv 2607.16673, its study with controlled acceptance; an H100 and another "
        "model): little or no gain below p of about 0.7, a gain at every length from 0.8 on, "
        f"{PAPER_ORACLE:.2f}x with an oracle.",
        f"Here: {ours}; at least {worst['speedup']:.2f}x (p = {worst['p']:g}, n = {worst['n']}) and at most "
        f"{best['speedup']:.2f}x (p = {best['p']:g}, n = {best['n']}).",
        "The p from which on drafting gains, on a line between the measured ones: " + "; ".join(even) + ".",
        "Where the curves come from: a speedup is E over the cost of a round. With the most accepted the "
        f"model's pass costs {pass_cost} plain passes at n = {', '.join(map(str, lengths))}; at each n the "
        "gain begins where E exceeds the cost, so a long chain needs a higher p. How far they are from the "
        f"paper's: with all drafts accepted, {PAPER_ORACLE:.2f}x asks for rounds of as many plain rounds "
        f"as (n + 1) / {PAPER_ORACLE:.2f}: {'; '.join(within_reach)}.",
        _parts_of_the_difference(rows),
    ]


def _parts_of_the_difference(rows: Sequence[Mapping[str, Any]]) -> str:
    """Measured over predicted, taken apart into its two factors."""

    def span(values: Sequence[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f} (median {median(values):.2f})"

    ratio = span([row["speedup"] / row["predicted_speedup"] for row in rows])
    tokens = span([row["tokens_per_round"] / row["expected_tokens"] for row in rows])
    cost = span([row["predicted_round_cost"] / row["round_cost"] for row in rows])
    return (
        f"Measured over predicted speedup: {ratio}. It is the product of two: tokens a round over E, "
        f"{tokens}, from which tokens the oracle happened to get wrong and from last rounds, which the token "
        f"limit cuts; and the predicted cost of a round over the measured one, {cost}, from what the loop "
        "does around the pass (proposing, deciding, booking) and from the machine's other work."
    )


def break_even(rows: Sequence[Mapping[str, Any]], n: int, key: str) -> float | None:
    """The least p from which on `key` stays at 1 or more, between measured p on a line; None: beyond them."""
    points = sorted((row["p"], row[key]) for row in rows if row["n"] == n)
    if points[-1][1] < 1.0:
        return None
    found = float(points[0][0])
    for (p, low), (q, high) in pairwise(points):
        if low < 1.0 <= high:
            found = p + (q - p) * (1.0 - low) / (high - low)
    return found


def _chance(p: float | None) -> str:
    return "none" if p is None else f"{p:.2f}"


def draw(result: Result, figure: Any) -> None:
    """A heat map of the speedups and their curves, prediction dashed."""
    rows = result["rows"]
    chances = sorted({row["p"] for row in rows})
    lengths = sorted({row["n"] for row in rows})
    at = {(row["p"], row["n"]): row for row in rows}
    figure.set_size_inches(11, 4.4)
    left, right = figure.subplots(1, 2)
    grid = [[at[p, n]["speedup"] for n in lengths] for p in reversed(chances)]
    # Half and twice are equally far from 1, which is white.
    from matplotlib.colors import LogNorm

    edge = max(2.0, *(max(s, 1 / s) for row in grid for s in row))
    image = left.imshow(grid, cmap="RdBu", norm=LogNorm(1 / edge, edge), aspect="auto", alpha=0.7)
    for y, row in enumerate(grid):
        for x, speedup in enumerate(row):
            left.text(x, y, times(speedup), ha="center", va="center", fontsize=8)
    left.set_xticks(range(len(lengths)), lengths)
    left.set_yticks(range(len(chances)), [f"{p:g}" for p in reversed(chances)])
    left.set_xlabel("drafts a round, n")
    left.set_ylabel("chance that a draft is right, p")
    left.set_title("speedup, measured", loc="left", fontsize=10)
    marks = [mark for mark in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0) if 1 / edge <= mark <= edge]
    bar = figure.colorbar(image, ax=left, ticks=marks, format="{x:g}x")
    bar.minorticks_off()
    for number, n in enumerate(lengths):
        colour = f"C{number}"
        right.plot(chances, [at[p, n]["speedup"] for p in chances], "o-", color=colour, label=f"n = {n}")
        right.plot(chances, [at[p, n]["predicted_speedup"] for p in chances], "--", color=colour, alpha=0.6)
    right.axhline(1.0, color="0.4", linewidth=0.8)
    right.axvspan(chances[0], 0.7, color="0.93", zorder=0)
    if chances[-1] == 1.0:
        right.plot(
            [1.0], [PAPER_ORACLE], "k*", markersize=9, label=f"paper's oracle, {PAPER_ORACLE:.2f}x (H100)"
        )
    right.set_xlabel("chance that a draft is right, p")
    right.set_ylabel("speedup over plain decoding")
    right.set_title(
        "measured, and predicted (dashed); grey: little gain in the paper", loc="left", fontsize=10
    )
    right.legend(frameon=False, fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
