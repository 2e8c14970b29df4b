"""Where drafts of self-speculative decoding end: fixed lengths, thresholds, the paper's adaptive one, prices.

Beside every speedup stands what the paper's formula makes of the same runs: drafts of n levels that cost
c plain rounds each, a verification that costs v of them, and drafts that are kept with chance a, given that
those before them were, give (1 - a^(n+1)) / ((1 - a) (n c + v)). c and v are measured in the rounds
themselves, n is the mean length, and a sets what was kept against what was refused. Rounds without drafts
count as plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.bench.studies.lab import Entry, Lab, Step, after
from specdec.bench.studies.section import Section, times
from specdec.budget import expected_tokens
from specdec.methods import NOTHING, DrafterSpec

TITLE = "Where drafts end"
MOST = 12  # draft tokens, as in the paper
LENGTHS = (1, 2, 4, 8)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
TARGETS = (0.85, 0.9)
WIDEN = 3
TREES = ("2,1",)

POSITIONS = 8  # of acceptance by position, in the table
FEW = 0.1  # of the rounds: where fewer draft, what one costs is lost in what the others vary by
EVERY = "Every round drafts"
LEGEND = (
    "Accepted: drafted tokens that were kept. a: chance that one is, given that those before it were. c: "
    "time of drafting a token, v: of a round apart from drafting, both in plain rounds. Predicted: "
    "(1 - a^(n+1)) / ((1 - a) (n c + v)) with the mean length n."
)

Result = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Entries of one table."""

    name: str
    about: str
    entries: Sequence[Entry]


def plan(lab: Lab) -> list[Group]:
    """What is measured; all of it takes turns."""

    def entry(
        name: str,
        exit: str,
        *,
        most: int = MOST,
        adaptive: bool = False,
        tree: str = "1",
        int8: bool = False,
        skip: str | None = lab.skip,
    ) -> Entry:
        spec = DrafterSpec.skipping(skip, exit=exit, tree=tree, int8=int8)
        return Entry(name, spec, max_draft=most, adaptive=adaptive)

    lengths, thresholds, targets = ((2, 6), (0.6,), (0.85,)) if lab.quick else (LENGTHS, THRESHOLDS, TARGETS)
    widened = f",widen={WIDEN}"
    return [
        Group(
            EVERY,
            f"As in the paper: a draft in every round, up to {MOST} tokens, whether or not it pays. Widened: "
            f"{WIDEN} guesses of the token that ends a chain.",
            [
                *(entry(f"fixed, {k} tokens", "fixed", most=k) for k in lengths),
                *(entry(f"static, {t:g}", f"static:{t:g}") for t in thresholds),
                *(entry(f"adaptive, alpha {a:.2f}", f"adaptive:alpha={a:g}") for a in targets),
                entry(f"static, 0.6, widened to {WIDEN}", f"static:0.6{widened}"),
                entry(f"adaptive, alpha 0.85, widened to {WIDEN}", f"adaptive:alpha=0.85{widened}"),
                *(entry(f"adaptive, alpha 0.85, tree {tree}", "adaptive", tree=tree) for tree in TREES),
            ],
        ),
        Group(
            "Rounds draft where it pays",
            "Plain rounds where measured times and what became of earlier drafts say that a draft would not "
            "pay. Priced ends drafts by the same.",
            [
                entry("priced", "priced", adaptive=True),
                entry("adaptive, alpha 0.85, where it pays", "adaptive", adaptive=True),
                entry("priced, tree pruned", "priced", adaptive=True, tree="auto"),
            ],
        ),
        Group(
            "Drafts from int8 weights",
            "`--draft-int8`: the drafts are made by copies of the matrices with one byte a weight, of the "
            "same sub-layers or, `--skip none`, of all of them.",
            [
                entry("fixed, 2 tokens, int8", "fixed", most=2, int8=True),
                entry("adaptive, alpha 0.85, int8", "adaptive", int8=True),
                entry("adaptive, alpha 0.85, int8, nothing skipped", "adaptive", int8=True, skip=NOTHING),
                entry("priced, int8", "priced", adaptive=True, int8=True),
                entry("priced, int8, nothing skipped", "priced", adaptive=True, int8=True, skip=NOTHING),
            ],
        ),
    ]


def steps(lab: Lab) -> int:
    """Calls of `step` that `measure` makes."""
    return len(lab.units(1, _each(lab))) * (1 + sum(len(g.entries) for g in plan(lab))) * _repeats(lab)


def measure(lab: Lab, step: Step) -> Result:
    """All entries in turn with plain decoding."""
    groups = plan(lab)
    found = lab.compare(
        [entry for group in groups for entry in group.entries],
        lab.units(1, _each(lab)),
        batch=1,
        count=_tokens(lab),
        repeats=_repeats(lab),
        step=after("exits", step),
    )
    names = [group.name for group in groups for _ in group.entries]
    about = {group.name: group.about for group in groups}
    rows = [{"group": name} | row | costs_of(row) for name, row in zip(names, found, strict=True)]
    runs = f"{len(lab.units(1, _each(lab)))} prompts, {_tokens(lab)} tokens each, {_repeats(lab)} turns."
    return {"about": about, "runs": runs, "rows": rows}


def _each(lab: Lab) -> int:
    """Prompts of each kind."""
    return 1 if lab.quick or lab.large else 2


def _tokens(lab: Lab) -> int:
    return 24 if lab.quick else 32 if lab.large else 64


def _repeats(lab: Lab) -> int:
    return 1 if lab.quick else 3


def costs_of(row: Mapping[str, Any]) -> dict[str, float]:
    """c, v, a and the length of a draft in a row of `Lab.compare`, and the speedup that the formula gives.

    A round that drafts takes what is left of all rounds' time without drafting and plain rounds, over the
    number of such rounds; time that went into deciding against a draft counts as drafting too.
    """
    plain = row["plain_seconds_per_round"]
    rounds, drafting, levels = (row[f"fastest_{name}"] for name in ("rounds", "drafting_rounds", "levels"))
    if drafting == 0 or drafting < FEW * rounds:
        return {"c": 0.0, "v": 0.0, "a": 0.0, "n": 0.0, "predicted_speedup": 1.0}
    other = row["round_seconds"] - row["draft_seconds"]
    c = row["draft_seconds"] / levels / plain
    v = (other / plain - (rounds - drafting)) / drafting
    accepted = sum(row["accepted_at"])
    a = accepted / (accepted + row["drafting_rounds"] - row["complete_rounds"]) if accepted else 0.0
    n = levels / drafting
    tokens = rounds - drafting + drafting * expected_tokens(a, n)
    return {
        "c": c,
        "v": v,
        "a": a,
        "n": n,
        "predicted_speedup": tokens / (rounds - drafting + drafting * (n * c + v)),
    }


def sections(result: Result) -> list[Section]:
    """A table a group, acceptance by position, and speedups by kind of prompt."""
    rows = result["rows"]
    made = [
        Section(
            name,
            [about, *([] if name != EVERY else [LEGEND, result["runs"]])],
            [
                "",
                "speedup",
                "predicted",
                "tokens/s",
                "tokens a round",
                "drafted a round",
                "rounds with drafts",
                "accepted",
                "a",
                "c",
                "v",
            ],
            [
                [
                    "plain decoding",
                    times(1.0),
                    "",
                    f"{1 / rows[0]['plain_seconds_per_round']:.1f}",
                    *[""] * 7,
                ],
                *(
                    [
                        row["name"],
                        times(row["speedup"]),
                        times(row["predicted_speedup"]) if row["n"] else "",
                        f"{row['tokens_per_second']:.1f}",
                        f"{row['tokens_per_round']:.2f}",
                        f"{row['drafted'] / row['rounds']:.2f}",
                        f"{row['drafting_rounds'] / row['rounds']:.0%}",
                        f"{row['acceptance_rate']:.0%}" if row["drafted"] else "no drafts",
                        *(f"{row[key]:.2f}" if row["n"] else "" for key in "acv"),
                    ]
                    for row in rows
                    if row["group"] == name
                ),
            ],
        )
        for name, about in result["about"].items()
    ]
    return [*made, _positions(rows), _kinds(rows)]


def _positions(rows: Sequence[Mapping[str, Any]]) -> Section:
    return Section(
        "Acceptance by position",
        ["Of the drafted tokens at each depth below the last emitted one, those that were kept."],
        ["", *map(str, range(1, POSITIONS + 1))],
        [
            [row["name"], *(f"{a:.0%}" if a is not None else "" for a in _kept(row)[:POSITIONS])]
            for row in rows
        ],
    )


def _kept(row: Mapping[str, Any]) -> list[float | None]:
    """Accepted over drafted by position, as many as were drafted; None beyond."""
    shares = [a / d if d else None for a, d in zip(row["accepted_at"], row["drafted_at"], strict=True)]
    return [*shares, *[None] * (POSITIONS - len(shares))]


def _kinds(rows: Sequence[Mapping[str, Any]]) -> Section:
    kinds = list(rows[0]["speedup_by_kind"])
    return Section(
        "Speedup by kind of prompt",
        (),
        ["", *kinds],
        [[row["name"], *(times(row["speedup_by_kind"][kind]) for kind in kinds)] for row in rows],
    )


def draw(result: Result, figure: Any) -> None:
    """Measured speedups as bars with the prediction as a mark, and acceptance by position."""
    rows = result["rows"]
    figure.set_size_inches(11, 1.2 + 0.3 * len(rows))
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 2))
    places = range(len(rows))
    colors = [f"C{list(result['about']).index(row['group'])}" for row in rows]
    bars.barh(places, [row["speedup"] for row in rows], 0.75, color=colors)
    bars.plot([row["predicted_speedup"] for row in rows], places, "|", color="k", markersize=10)
    for place, row in zip(places, rows, strict=True):
        bars.text(row["speedup"] + 0.01, place, times(row["speedup"]), fontsize=7, va="center")
    bars.axvline(1.0, color="0.4", linewidth=0.8)
    bars.set_yticks(places, [row["name"] for row in rows], fontsize=7)
    bars.invert_yaxis()
    bars.set_xlabel("speedup over plain decoding (mark: predicted)")
    for row in rows:
        if row["group"] == EVERY and row["name"].startswith(("fixed, 12", "static", "adaptive")):
            kept = [a for a in _kept(row) if a is not None]
            curves.plot(range(1, len(kept) + 1), kept, marker=".", label=row["name"])
    curves.set_ylim(0, 1.02)
    curves.set_xlabel("position in the draft")
    curves.set_ylabel("accepted")
    curves.legend(fontsize=6, frameon=False)
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
