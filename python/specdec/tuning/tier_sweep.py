"""`specdec tune --method hispec`: with which exits, and of what lengths, a model drafts fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specdec.bench.studies.section import Section, times
from specdec.drafters.adaptive import likely_plans
from specdec.drafters.plan import Plan
from specdec.loop import Loop
from specdec.methods.autoregressive import autoregressive
from specdec.methods.hispec import exits_of, hispec
from specdec.models.exit_adapter import ExitAdapters
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.llama import LlamaForCausalLM
from specdec.tuning.advisor import Decoded, decode_in_turn

PROMPTS = 4
TOKENS, TURNS = 48, 2
MOST = 16  # draft tokens a round
DARK = 0.7  # of the range of colours from the middle on: black is not read there

Tierable = GatedDeltaNetForCausalLM | LlamaForCausalLM


@dataclass(frozen=True)
class Found:
    """What one setting did.

    Attributes:
        plan: the tiers of every round; None: chosen for each round.
        speedup: over plain decoding, the geometric mean over the prompts.
        by_prompt: of each prompt.
        tokens: a round.
        accepted: of the tokens that the target looked at, those that it kept; None where it saw none.
    """

    plan: Plan | None
    speedup: float
    by_prompt: Sequence[float]
    tokens: float
    accepted: float | None

    @property
    def name(self) -> str:
        """As `--tiers` takes it."""
        return "auto" if self.plan is None else str(self.plan)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = self.plan
        return {
            "tiers": self.name,
            "exit": plan and plan.exit,
            "length": plan and plan.length,
            "middle": plan and (plan.middle or None),
            "tentative": plan and (plan.tentative or None),
            "speedup": self.speedup,
            "speedup_by_prompt": list(self.by_prompt),
            "tokens_per_round": self.tokens,
            "acceptance_rate": self.accepted,
        }


def plans_of(model: Tierable, adapters: ExitAdapters | None = None) -> list[Plan]:
    """What is tried: two tiers by each exit of the model, or that has an adapter, and three by each pair,
    with several lengths.

    Raises:
        ValueError: the model has a single layer.
    """
    return sorted(likely_plans(exits_of(model, adapters)), key=_order)


def _order(plan: Plan) -> tuple[int, ...]:
    return plan.middle, plan.exit, plan.length, plan.tentative


def sweep(
    model: Tierable,
    prompts: Sequence[Sequence[int]],
    *,
    adapters: ExitAdapters | None = None,
    int8: bool = False,
    seconds: float = 0.0,
    on_run: Callable[[str], None] = lambda name: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Found] | None:
    """Decodes the prompts with every setting, with what is chosen for each round, and plainly, in turn.

    Args:
        model: the target.
        prompts: token ids.
        adapters: of the exits.
        int8: exits are read through a copy of the head in int8.
        seconds: turns begin for so long, two of them in any case.
        on_run: told the name of every run.
        should_stop: asked before every turn.

    Returns:
        One for each, in the order of `plans_of`, the chosen one last; None where it was stopped.

    Raises:
        RuntimeError: a text is not that of plain decoding.
    """
    plans: list[Plan | None] = [*plans_of(model, adapters), None]
    found = decode_in_turn(
        lambda: autoregressive(model),
        {str(plan or "auto"): _maker(model, plan, adapters, int8) for plan in plans},
        prompts,
        new_tokens=TOKENS,
        turns=TURNS,
        seconds=seconds,
        on_run=on_run,
        should_stop=should_stop,
    )
    if found is None:
        return None
    return [_figures(plan, decoded) for plan, decoded in zip(plans, found[1].values(), strict=True)]


def _maker(
    model: Tierable, plan: Plan | None, adapters: ExitAdapters | None, int8: bool
) -> Callable[[], Loop]:
    def make() -> Loop:
        return hispec(model, plan, max_draft=MOST, adaptive=plan is None, adapters=adapters, int8=int8)

    return make


def _figures(plan: Plan | None, decoded: Decoded) -> Found:
    drafted, rounds = sum(decoded.drafted_at), decoded.rounds
    return Found(
        plan,
        decoded.speedup,
        [median(turns) for turns in decoded.speedups],
        sum(r.tokens for r in rounds) / len(rounds),
        sum(decoded.accepted_at) / drafted if drafted else None,
    )


def best_of(found: Sequence[Found]) -> Found:
    """The fastest of those whose plan was given."""
    return max((f for f in found if f.plan is not None), key=lambda f: f.speedup)


def table_of(found: Sequence[Found]) -> Section:
    """The figures as a table."""
    header = ["tiers", "speedup", "by prompt", "tokens a round", "accepted"]
    rows = [
        [
            f.name,
            times(f.speedup),
            f"{min(f.by_prompt):.2f} to {max(f.by_prompt):.2f}",
            f"{f.tokens:.2f}",
            "no drafts" if f.accepted is None else f"{f.accepted:.0%}",
        ]
        for f in found
    ]
    return Section("Exits and lengths", (), header, rows)


def sentence(found: Sequence[Found]) -> str:
    """Which tiers to take."""
    best = best_of(found)
    auto = next(f for f in found if f.plan is None)
    also = f"; chosen for each round ({auto.name}): {times(auto.speedup)}"
    if best.speedup <= 1.0:
        return f"nothing beats plain decoding; the best, {best.name}, is {times(best.speedup)}{also}"
    return f"--tiers {best.name} is fastest, {times(best.speedup)} over plain decoding{also}"


def draw(path: Path, found: Sequence[Found], title: str) -> None:
    """Writes speedups as heat maps: two tiers, exits by lengths; three, N_d by N_i of each pair of exits.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    speeds = {f.plan: f.speedup for f in found if f.plan is not None}
    two = [plan for plan in speeds if not plan.middle]
    grids = [("two tiers", "N_d", "exit", {plan: (plan.exit, plan.length) for plan in two})]
    for pair in dict.fromkeys((p.exit, p.middle) for p in speeds if p.middle):
        of = {p: (p.length, p.tentative) for p in speeds if (p.exit, p.middle) == pair}
        grids.append((f"three tiers, exits {pair[0]} and {pair[1]}", "N_i", "N_d", of))
    figure = Figure(figsize=(1.0 + 3.6 * len(grids), 3.6), layout="constrained")
    panels = figure.subplots(1, len(grids), squeeze=False)[0]
    most = max(abs(speed - 1.0) for speed in speeds.values()) or 1.0
    norm = TwoSlopeNorm(1.0, 1.0 - most, 1.0 + most)
    for axes, (name, across, down, cells) in zip(panels, grids, strict=True):
        rows, columns = (sorted({cell[i] for cell in cells.values()}) for i in (0, 1))
        by_cell = {cell: speeds[plan] for plan, cell in cells.items()}
        values = [[by_cell[row, column] for column in columns] for row in rows]
        image = axes.imshow(values, cmap="RdBu", norm=norm, aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                color = "w" if abs(value - 1.0) > DARK * most else "k"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(len(columns)), [str(n) for n in columns])
        axes.set_yticks(range(len(rows)), [str(n) for n in rows])
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        axes.set_title(name, fontsize="small")
    figure.colorbar(image, ax=panels[-1], label="speedup over plain decoding")
    figure.supxlabel(title, fontsize=6, color="0.4")
    figure.savefig(path, dpi=130)
