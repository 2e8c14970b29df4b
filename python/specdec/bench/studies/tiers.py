"""Two tiers against three: exits, N_d, N_i, what passes each tier, and what a round costs.

A round of m checks is to pass m (N_d E + M) + L layers, for exits after E and M of L layers, in two tiers
N_d E + L; what ran is counted beside it. How often a tier's token is that of the one above is counted given
that those before it were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.bench.harness import Measured, Unit, speedup_of
from specdec.bench.studies.lab import Entry, Lab, Step
from specdec.bench.studies.section import Section, times
from specdec.bench.studies.tier_costs import PassCosts, pass_costs
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.plan import Plan, Planner, SequencePlanner
from specdec.drafters.stage import Work
from specdec.loop import Loop
from specdec.methods import ADAPTIVE_TIERS, DrafterSpec

TITLE = "Two tiers against three"
LENGTHS = (1, 2, 3, 4)  # N_d of two tiers
INNER = (1, 2, 3)  # N_d of three
TENTATIVE = (2, 4, 6)  # N_i
PAPER = 2, 4  # N_d and N_i there
MOST = 16  # draft tokens a round
ACCEPTED = 0.8  # of the middle exit's tokens: what three tiers need, by the paper's arithmetic
CHOSEN = "chosen for each round"
LEGEND = (
    "Drafts: E x N_d, and M x N_i of the middle exit where there is one. Middle: drafted tokens that were "
    "the middle exit's, given that those before them were. Target: likewise the tokens of the tier below "
    "the target that were the target's. Checks: by the middle exit, a round. By the formula: m (N_d E + M) + "
    "L layer passes, N_d E + L in two tiers; drafts are shorter just before a sequence's end. By passes: the "
    "speedup if nothing but the number of layer passes took time. By operators: the speedup if nothing took "
    "time but the operators of the passes, timed by themselves, the head and passes over several nodes among "
    "them. Over two: speedup over the best two-tier setting of this table, whose choice after the fact "
    "favours it. Tokens/s: of the fastest turn on each prompt, which other work on the machine touches least."
)

Result = dict[str, Any]


class Watch:
    """Counts what happens in the rounds of a loop; it plans as the drafter's own planner does.

    Attributes:
        work: what the layers did, the loop's rounds of plain decoding included.
        rounds: by plan; None is plain decoding.
        checks: by plan, of drafts by the middle exit.
        passed: by the layers of two exits, of the lower one's tokens how many were the upper one's, and how
            many were looked at.
    """

    def __init__(self, planner: Planner, work: Work) -> None:
        self.work = work
        self.rounds: Counter[Plan | None] = Counter()
        self.checks: Counter[Plan] = Counter()
        self.passed: dict[tuple[int, int], tuple[int, int]] = {}
        self._planner = planner
        self._booked = 0
        self._plan: Plan | None = None

    @property
    def plans(self) -> Sequence[Plan]:
        """See `Planner.plans`."""
        return self._planner.plans

    def begin(self, slots: int) -> None:
        """See `Planner.begin`."""
        self._planner.begin(slots)

    def choose(self, rows: int) -> Plan | None:
        """See `Planner.choose`."""
        self._plan = self._planner.choose(rows)
        return self._plan

    def rests(self, rows: int) -> bool:
        """See `Planner.rests`."""
        return self._planner.rests(rows)

    def for_sequence(self) -> SequencePlanner:
        """See `Planner.for_sequence`."""
        return self._planner.for_sequence()

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        """See `Planner.accepted`."""
        before = self.passed.get((lower, upper), (0, 0))
        self.passed[lower, upper] = before[0] + kept, before[1] + said
        self._planner.accepted(lower, upper, kept, said)

    def observe(self, rows: int, nodes: int, tokens: int, seconds: float, rested: bool) -> None:
        """See `Planner.observe`."""
        plan = None if rested or nodes == 1 else self._plan
        self.rounds[plan] += 1
        if plan is not None:
            self.checks[plan] += self.work.checks - self._booked
        self._booked = self.work.checks
        self._planner.observe(rows, nodes, tokens, seconds, rested)


def passes_of(plan: Plan | None, rounds: int, checks: int, layers: int) -> int:
    """Layer passes of so many rounds of a plan with so many checks in all, as the formula has them."""
    if plan is None:
        return rounds * layers
    if not plan.middle:
        return rounds * (plan.length * plan.exit + layers)
    return checks * (plan.length * plan.exit + plan.middle) + rounds * layers


@dataclass
class Setting:
    """A row of the table.

    Attributes:
        name: in it.
        plan: the tiers; None: chosen for each round.
        adapters: of the exits, as `DrafterSpec.tiered` takes them.
        int8: whether exits are read through a head in int8.
        watches: of its runs, that of the warm-up first.
    """

    name: str
    plan: Plan | None = None
    adapters: str | None = None
    int8: bool = False
    watches: list[Watch] = field(default_factory=list)

    @property
    def tiers(self) -> int:
        """2 or 3; 0 where they are chosen."""
        return 0 if self.plan is None else 3 if self.plan.middle else 2

    @property
    def entry(self) -> Entry:
        """What the lab runs."""
        tiers = ADAPTIVE_TIERS if self.plan is None else str(self.plan)
        spec = DrafterSpec.tiered(tiers, adapters=self.adapters, int8=self.int8 or None)
        return Entry(self.name, spec, max_draft=MOST, adaptive=self.plan is None, watch=self.watch)

    def watch(self, loop: Loop) -> None:
        """Begins to count what happens in a loop."""
        drafter = loop.drafter
        assert isinstance(drafter, EarlyExitDrafter)
        watch = Watch(drafter.planner, drafter.work)
        drafter.planner = loop.budget.planned = watch
        self.watches.append(watch)


def settings(lab: Lab) -> list[Setting]:
    """What is measured; all of it takes turns."""
    exits, adapters = lab.exits(), lab.exit_adapters
    lengths, inner, tentative = ((2,), (2,), (4,)) if lab.quick else (LENGTHS, INNER, TENTATIVE)
    plans = [Plan(exit, n) for exit in exits for n in lengths]
    for i, exit in enumerate(exits):
        plans += [Plan(exit, n, middle, t) for middle in exits[i + 1 :] for n in inner for t in tentative]
    made = [Setting(str(plan), plan, adapters) for plan in plans]
    chosen = [Setting(CHOSEN, None, adapters), Setting(f"{CHOSEN}, head in int8", None, adapters, int8=True)]
    return [*made, *chosen]


def steps(lab: Lab) -> int:
    """Calls of `step` that `measure` makes."""
    return 1 + len(lab.units(1, _each(lab))) * (1 + len(settings(lab))) * _repeats(lab)


def measure(lab: Lab, step: Step) -> Result:
    """All settings in turn with plain decoding."""
    chosen, units = settings(lab), lab.units(1, _each(lab))
    entries = [setting.entry for setting in chosen]
    measured = lab.measured(entries, units, batch=1, count=_tokens(lab), repeats=_repeats(lab), step=step)
    layers, every = lab.model.num_layers, range(len(units))
    costs = pass_costs(lab)
    step("operators")
    rows = [
        row | _counts(setting, setting.watches[1:], row["rounds"], layers)
        for setting, row in zip(chosen, lab.rows(entries, units, measured, 1), strict=True)
    ]
    best = {n: _best(rows, n) for n in (2, 3)}
    two = best[2]
    assert two is not None
    for row, m in zip(rows, measured[1:], strict=True):
        row["over_two"] = speedup_of(m, measured[1 + two], every)
        row["by_operators"] = _by_operators(costs, row)
    return {
        "layers": layers,
        "runs": f"{len(units)} prompts, {_tokens(lab)} tokens each, {_repeats(lab)} turns.",
        "best": {str(n): None if i is None else rows[i]["name"] for n, i in best.items()},
        "rows": rows,
        "prompts": _by_prompt(chosen, units, measured, best, _repeats(lab), layers),
    }


def _by_operators(costs: PassCosts, row: Mapping[str, Any]) -> float | None:
    """The speedup of a row's plan, if nothing but operators took time."""
    if not row["tiers"]:
        return None
    took = costs.round(Plan.parse(row["name"]), row["checks_per_round"])
    return float(row["tokens_per_round"] * costs.plain / took)


def _best(rows: Sequence[Mapping[str, Any]], tiers: int) -> int | None:
    """The fastest row of so many tiers; None where there is none."""
    found = [i for i, row in enumerate(rows) if row["tiers"] == tiers]
    return max(found, key=lambda i: float(rows[i]["speedup"]), default=None)


def _each(lab: Lab) -> int:
    """Prompts of each kind."""
    return 1 if lab.quick or lab.large else 2


def _tokens(lab: Lab) -> int:
    return 24 if lab.quick else 32 if lab.large else 64


def _repeats(lab: Lab) -> int:
    return 1 if lab.quick else 2 if lab.large else 3


def _counts(setting: Setting, watches: Sequence[Watch], rounds: int, layers: int) -> dict[str, Any]:
    """What the layers did, in all runs of a setting."""
    by_plan: Counter[Plan | None] = sum((w.rounds for w in watches), Counter())
    checks: Counter[Plan] = sum((w.checks for w in watches), Counter())
    by_plan[None] += rounds - by_plan.total()  # where not one draft was allowed
    passes = sum(w.work.passes for w in watches) / rounds
    formula = sum(passes_of(p, n, 0 if p is None else checks[p], layers) for p, n in by_plan.items()) / rounds
    plan = setting.plan
    three = sum(n for p, n in by_plan.items() if p is not None and p.middle)
    return {
        "tiers": setting.tiers,
        "int8": setting.int8,
        "exit": plan and plan.exit,
        "length": plan and plan.length,
        "middle": plan and (plan.middle or None),
        "tentative": plan and (plan.tentative or None),
        "rounds_of_tiers": {"1": by_plan[None], "2": rounds - by_plan[None] - three, "3": three},
        "checks_per_round": checks.total() / three if three else 0.0,
        "passed_middle": _share(watches, lambda upper: upper < layers),
        "passed_target": _share(watches, lambda upper: upper == layers),
        "passes_per_round": passes,
        "formula_passes_per_round": formula,
    }


def _share(watches: Iterable[Watch], wanted: Callable[[int], bool]) -> float | None:
    """Of the tokens that these upper tiers looked at, those that were theirs; None where they saw none."""
    pairs = [pair for w in watches for (_, upper), pair in w.passed.items() if wanted(upper)]
    said = sum(said for _, said in pairs)
    return sum(kept for kept, _ in pairs) / said if said else None


def _by_prompt(
    chosen: Sequence[Setting],
    units: Sequence[Unit],
    measured: Sequence[Measured],
    best: Mapping[int, int | None],
    repeats: int,
    layers: int,
) -> list[dict[str, Any]]:
    """What each prompt says of the best two settings and of the choice."""
    ways = {"two": best[2], "three": best[3], "chosen": next(i for i, s in enumerate(chosen) if not s.tiers)}
    rows = []
    for number, unit in enumerate(units):
        row: dict[str, Any] = {"kind": unit.kind, "name": unit.names[0]}
        for name, i in ways.items():
            row[name] = None if i is None else speedup_of(measured[1 + i], measured[0], [number])
        three = best[3]
        if three is not None and best[2] is not None:
            first = 1 + number * repeats
            watches = chosen[three].watches[first : first + repeats]
            row["passed_middle"] = _share(watches, lambda upper: upper < layers)
            row["passed_target"] = _share(watches, lambda upper: upper == layers)
            row["three_over_two"] = speedup_of(measured[1 + three], measured[1 + best[2]], [number])
        rows.append(row)
    return rows


def sections(result: Result) -> list[Section]:
    """A table a number of tiers, what each prompt says, and what follows."""
    titles = {2: "Two tiers", 3: "Three tiers", 0: "Tiers chosen for each round"}
    plain = 1 / result["rows"][0]["plain_seconds_per_round"]
    made = []
    for tiers, title in titles.items():
        rows = [row for row in result["rows"] if row["tiers"] == tiers]
        if rows:
            text = [LEGEND, f"{result['runs']} Plain decoding: {plain:.1f} tokens/s."] if tiers == 2 else []
            made.append(Section(title, text, HEADER, [_cells(row, result["layers"]) for row in rows]))
    return [*made, _prompts(result)]


HEADER = [
    "drafts",
    "speedup",
    "over two",
    "tokens/s",
    "tokens a round",
    "middle",
    "target",
    "checks",
    "layer passes a round",
    "by the formula",
    "by passes",
    "by operators",
    "rounds plain, two, three tiers",
]


def _cells(row: Mapping[str, Any], layers: int) -> list[str]:
    of = [row["rounds_of_tiers"][n] / row["rounds"] for n in ("1", "2", "3")]
    return [
        row["name"],
        times(row["speedup"]),
        times(row["over_two"]),
        f"{row['tokens_per_second']:.1f}",
        f"{row['tokens_per_round']:.2f}",
        _percent(row["passed_middle"]),
        _percent(row["passed_target"]),
        f"{row['checks_per_round']:.2f}" if row["checks_per_round"] else "",
        f"{row['passes_per_round']:.2f}",
        f"{row['formula_passes_per_round']:.2f}",
        times(row["tokens_per_round"] * layers / row["passes_per_round"]),
        "" if row["by_operators"] is None else times(row["by_operators"]),
        " ".join(f"{share:.0%}" for share in of),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _prompts(result: Result) -> Section:
    two, three = (result["best"][n] for n in ("2", "3"))
    header = ["", "middle", "target", f"two: {two}", "three", "chosen", "three over two", "best"]
    names = {"two": "two tiers", "three": "three tiers", "chosen": CHOSEN}
    rows = []
    for row in result["prompts"]:
        speeds = {"plain decoding": 1.0}
        speeds |= {names[key]: row[key] for key in ("two", "three") if row[key] is not None}
        rows.append(
            [
                f"{row['kind']}/{row['name']}",
                _percent(row.get("passed_middle")),
                _percent(row.get("passed_target")),
                *(times(row[key]) for key in names),
                times(row.get("three_over_two")),
                max(speeds, key=speeds.__getitem__),
            ]
        )
    if three is not None:
        header[4] = f"three: {three}"
    return Section("Where each wins", account(result), header, rows)


def account(result: Result) -> list[str]:
    """What the prompts say, in sentences."""
    said = []
    two, three = (result["best"][n] for n in ("2", "3"))
    if three is not None:
        over = next(row for row in result["rows"] if row["name"] == three)["over_two"]
        said.append(
            f"The best of three tiers, {three}, is {over:.2f} times as fast as the best of two, {two}, over "
            "all prompts."
        )
        ratios = [r["three_over_two"] for r in result["prompts"] if (r["passed_target"] or 0.0) >= ACCEPTED]
        where = f"Where the target accepts {ACCEPTED:.0%} or more of the middle exit's tokens"
        said.append(
            f"{where}, on {len(ratios)} of {len(result['prompts'])} prompts, it is {min(ratios):.2f} to "
            f"{max(ratios):.2f} times as fast."
            if ratios
            else f"{where}: on none of these prompts."
        )
    limits = {
        n: max((r["by_operators"] for r in result["rows"] if r["tiers"] == n), default=0.0) for n in (2, 3)
    }
    if limits[3]:
        said.append(
            f"If nothing but the operators took time, the best of three tiers would be "
            f"{limits[3] / limits[2]:.2f} times as fast as the best of two ({limits[3]:.2f} and "
            f"{limits[2]:.2f} times plain decoding)."
        )
    chosen = next(row for row in result["rows"] if row["name"] == CHOSEN)
    better = max(1.0, *(row["speedup"] for row in result["rows"] if row["tiers"] == 2))
    said.append(
        f"What is {CHOSEN} is {chosen['speedup'] / better:.2f} times as fast as the better of plain decoding "
        "and the best two tiers."
    )
    return said


def draw(result: Result, figure: Any) -> None:
    """Speedups as bars with what the layer passes alone would give as a mark, and layer passes a round."""
    rows, layers = result["rows"], result["layers"]
    figure.set_size_inches(11, 1.4 + 0.3 * len(rows))
    bars, passes = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    places = range(len(rows))
    colors = [f"C{(2, 3, 0).index(row['tiers'])}" for row in rows]
    bars.barh(places, [row["speedup"] for row in rows], 0.75, color=colors)
    by_passes = [row["tokens_per_round"] * layers / row["passes_per_round"] for row in rows]
    bars.plot(by_passes, places, "|", color="k", markersize=10)
    for place, row in zip(places, rows, strict=True):
        bars.text(row["speedup"] + 0.01, place, times(row["speedup"]), fontsize=7, va="center")
    bars.axvline(1.0, color="0.4", linewidth=0.8)
    bars.set_yticks(places, [row["name"] for row in rows], fontsize=7)
    bars.invert_yaxis()
    bars.set_xlabel("speedup over plain decoding (mark: if layer passes alone took time)")
    passes.barh(places, [row["passes_per_round"] for row in rows], 0.75, color="0.75")
    passes.plot([row["formula_passes_per_round"] for row in rows], places, "|", color="k", markersize=10)
    passes.set_xlabel("layer passes a round (mark: by the formula)")
    for axes in (bars, passes):
        axes.spines[["top", "right"]].set_visible(False)
