"""Ablations of whole decoding runs: drafters, shapes of drafts, strategies of verification, commits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.bench.studies.lab import Entry, Lab, Step, after
from specdec.bench.studies.section import Section, times
from specdec.methods import DrafterSpec

TITLE = "Decoding"
CHAINS = (4, 8)
# Branching by depth, and the nodes that --max-draft leaves of it: trees of the sizes that the paper draws.
TREES = (("2,1", 8), ("2,2,1", 10), ("4,2,1", 16))
STRATEGY_TREE = ("4,2,1", 16)
PRUNED = "auto"  # `--draft-tree auto`: grown best first, pruned by confidence

Result = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Entries that are measured in turn.

    Attributes:
        name: of the ablation.
        batch: sequences decoded together.
        entries: what is compared.
    """

    name: str
    batch: int
    entries: Sequence[Entry]


def steps(lab: Lab) -> int:
    """Calls of `step` that `measure` makes."""
    groups, _ = plan(lab)
    return sum(
        len(lab.units(g.batch, _each(lab, g.batch))) * (1 + len(g.entries)) for g in groups
    ) * _repeats(lab)


def measure(lab: Lab, step: Step) -> Result:
    """Every group of entries in turn with plain decoding."""
    groups, skipped = plan(lab)
    rows = []
    for group in groups:
        found = lab.compare(
            group.entries,
            lab.units(group.batch, _each(lab, group.batch)),
            batch=group.batch,
            count=24 if lab.quick else 96,
            repeats=_repeats(lab),
            step=after(group.name, step),
        )
        rows += [{"group": group.name, **row} for row in found]
    return {"rows": rows, "skipped": skipped}


def _each(lab: Lab, batch: int) -> int:
    """Batches of each kind of prompt."""
    return 3 if batch == 1 else 1


def _repeats(lab: Lab) -> int:
    return 1 if lab.quick else 2


def plan(lab: Lab) -> tuple[list[Group], list[str]]:
    """What is measured, and what is not and why."""
    skipped: list[str] = []
    batches = (1,) if lab.quick else (1, 4, 16)
    named = _available(lab, [(name, "") for name in lab.drafters], skipped)
    groups = [
        Group("drafters", batch, [Entry(spec.label, spec) for spec in named]) for batch in batches if named
    ]
    for name in lab.drafters:
        if not _shapes(name):
            continue
        entries = []
        for spec in _available(lab, [(name, "1")], skipped):
            entries += [Entry(f"chain of {n}", spec, max_draft=n, adaptive=False) for n in CHAINS]
            entries.append(Entry("chain, as long as pays", spec))
        for tree, nodes in TREES:
            for spec in _available(lab, [(name, tree)], skipped):
                entries.append(Entry(f"tree {tree}, {nodes} nodes", spec, max_draft=nodes, adaptive=False))
        for spec in _available(lab, [(name, PRUNED)], skipped):
            entries.append(Entry("tree, pruned", spec))
        if entries:
            groups.append(Group(f"shapes, {name}", 1, entries))
    oracle = DrafterSpec.parse("oracle", p=0.8)
    chain = [
        Entry(f"{s}, chain of 8", oracle, max_draft=8, adaptive=False, strategy=s)
        for s in ("serial", "solve")
    ]
    groups.append(Group("strategies, oracle p = 0.8", 1, chain))
    tree, nodes = STRATEGY_TREE
    for name in lab.drafters:
        if not _shapes(name):
            continue
        entries = [
            Entry(f"{s}, tree {tree}, {nodes} nodes", spec, max_draft=nodes, adaptive=False, strategy=s)
            for spec in _available(lab, [(name, tree)], skipped)
            for s in ("serial", "hybrid", "solve")
        ]
        if entries:
            groups.append(Group(f"strategies, {name}", 1, entries))
    commits = [
        Entry(f"{way}, chain of 8", oracle, max_draft=8, adaptive=False, commit=way)
        for way in ("eager", "deferred")
    ]
    groups += [Group("commits, oracle p = 0.8", batch, commits) for batch in batches]
    return groups, list(dict.fromkeys(skipped))


def _shapes(name: str) -> bool:
    """Whether the shape of a drafter's drafts is measured: it drafts with a model, and alone."""
    spec = DrafterSpec.parse(name)
    return spec.has_model and not spec.combined


def _available(lab: Lab, wanted: Iterable[tuple[str, str]], skipped: list[str]) -> list[DrafterSpec]:
    """The drafters that this target has; why not, of the others. A tree of "" is the drafter's own."""
    found = []
    for name, tree in wanted:
        spec = DrafterSpec.parse(name, tree=tree) if tree else DrafterSpec.parse(name)
        why = lab.unavailable(spec)
        if why is None:
            found.append(spec)
        else:
            skipped.append(f"{name}: {why}")
    return found


def sections(result: Result) -> list[Section]:
    """A table a group."""
    made = []
    groups = list(dict.fromkeys(row["group"] for row in result["rows"]))
    for group in groups:
        rows = [row for row in result["rows"] if row["group"] == group]
        made.append(
            Section(
                group[0].upper() + group[1:],
                (),
                [
                    "",
                    "batch",
                    "speedup",
                    "tokens a round",
                    "drafts accepted",
                    "round, ms",
                    "of which verification",
                    "other tokens",
                ],
                [
                    [
                        row["name"],
                        f"{row['batch']}",
                        times(row["speedup"]),
                        f"{row['tokens_per_round']:.2f}",
                        f"{row['acceptance_rate']:.0%}" if row["drafted"] else "no drafts",
                        f"{1e3 * row['batch'] * row['seconds_per_round']:.2f}",
                        f"{1e3 * row['batch'] * row['verify_seconds_per_round']:.2f}",
                        _different(row),
                    ]
                    for row in rows
                ],
            )
        )
    if result["skipped"]:
        made.append(Section("Not measured", [f"- {why}" for why in result["skipped"]]))
    return made


def _different(row: dict[str, Any]) -> str:
    if row["different_tokens"] == 0:
        return f"0 of {row['compared_tokens']}"
    return (
        f"{row['different_tokens']} of {row['compared_tokens']}, "
        f"in {row['different_texts']} of {row['compared_texts']} texts"
    )


def draw(result: Result, figure: Any) -> None:
    """Speedups as bars, group by group."""
    rows = result["rows"]
    groups = list(dict.fromkeys((row["group"], row["batch"]) for row in rows))
    figure.set_size_inches(8, 1.0 + 0.28 * (len(rows) + 1.5 * len(groups)))
    axes = figure.subplots()
    place, ticks, labels = 0.0, [], []
    for number, (group, batch) in enumerate(groups):
        title = f"{group}, batch {batch}"
        axes.text(0.0, place, title, fontsize=8, fontweight="bold", va="center")
        for row in (r for r in rows if (r["group"], r["batch"]) == (group, batch)):
            place += 1
            axes.barh(place, row["speedup"], 0.8, color=f"C{number % 10}")
            axes.text(row["speedup"] + 0.02, place, times(row["speedup"]), fontsize=7, va="center")
            ticks.append(place)
            labels.append(row["name"])
        place += 1.6
    axes.axvline(1.0, color="0.4", linewidth=0.8)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speedup over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
