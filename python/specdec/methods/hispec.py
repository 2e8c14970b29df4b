"""HiSpec: the target's own early exits draft and check, in two or three tiers (arXiv 2510.01336).

No second model: layers up to one exit draft, layers up to a later one check the drafts, and the target
decides about what came through. What a tier computed is what the next one goes on from. Which tiers, and how
many tokens, is chosen for every round; where drafting does not pay, a round is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specdec._rules import RULES
from specdec.drafters.adaptive import AdaptivePlanner, likely_plans
from specdec.drafters.hierarchical import HierarchicalDrafter
from specdec.drafters.plan import Plan
from specdec.loop import Loop
from specdec.methods.own_memory import loop_of
from specdec.methods.spec import NOTHING
from specdec.models.base import LayeredLM, SkippableLM
from specdec.models.exit_adapter import ExitAdapters, shipped_exit_adapters


def exits_of(model: LayeredLM, adapters: ExitAdapters | None = None) -> tuple[int, ...]:
    """The exits of a model, ascending: those that have adapters, without adapters those that it was trained
    with, and without these an eighth and a quarter of its layers.

    Raises:
        ValueError: the model has a single layer.
    """
    if adapters:
        return tuple(adapters)
    layers = model.num_layers
    if layers < 2:
        raise ValueError("tiers: got a model of one layer, want at least 2")
    return model.early_exit_layers or tuple(sorted({max(1, round(layers / part)) for part in (8, 4)}))


def exit_adapters(model: SkippableLM, directory: str = "") -> ExitAdapters:
    """The exit adapters in a directory; of "" those that come for these weights, if there are any, of "none"
    no adapters: exits are read as they are.

    Raises:
        ValueError: the directory has no adapters, or those of another model.
    """
    folder = None if directory == NOTHING else directory or shipped_exit_adapters(model)
    try:
        return ExitAdapters() if folder is None else ExitAdapters.from_directory(folder, model)
    except ValueError as error:
        raise ValueError(f"exit_adapters: {error}") from None


def hispec(
    model: LayeredLM,
    plan: Plan | None = None,
    *,
    slots: int = 1,
    commit: Literal["deferred", "eager"] = "deferred",
    max_draft: int = 16,
    adaptive: bool = True,
    acceptance: str = "auto",
    branching: Sequence[int] = (1,),
    adapters: ExitAdapters | None = None,
    int8: bool = False,
    draw: bool = True,
) -> Loop:
    """The loop with the target's early exits as drafter.

    Args:
        model: the target.
        plan: the tiers of every round; None: chosen for each from what rounds take and bring.
        slots: sequences that are decoded at the same time.
        commit: "deferred" folds an accepted path in with each layer's next pass; "eager" at once.
        max_draft: most draft tokens the target gets in one round.
        adaptive: draft only where it pays; False drafts in every round, where no plan is given by the first.
        acceptance: the rule that decides sampled rounds, see `specdec.acceptance.RULES`.
        branching: of what the draft exit drafts, see `EarlyExitDrafter`.
        adapters: of the exits.
        int8: exits are read through a copy of the head in int8.
        draw: whether drafts of sampled requests are drawn at random; False proposes the likeliest tokens, and
            a seed's text is that of plain sampling.

    Raises:
        ValueError: an argument is not one of the above, or the model has no such exits.
    """
    drafter = tiered_drafter(
        model,
        plan,
        slots=slots,
        adaptive=adaptive,
        acceptance=acceptance,
        branching=branching,
        adapters=adapters,
        int8=int8,
        draw=draw,
    )
    return loop_of(
        model, drafter, commit=commit, max_draft=max_draft, adaptive=adaptive, acceptance=acceptance
    )


def tiered_drafter(
    model: LayeredLM,
    plan: Plan | None = None,
    *,
    slots: int = 1,
    adaptive: bool = True,
    acceptance: str = "auto",
    branching: Sequence[int] = (1,),
    adapters: ExitAdapters | None = None,
    int8: bool = False,
    draw: bool = True,
) -> HierarchicalDrafter:
    """The drafter of `hispec`, with a cache of its own; arguments as there."""
    plans = likely_plans(exits_of(model, adapters)) if plan is None else [plan]
    planner: Plan | AdaptivePlanner = plans[0]
    if adaptive:
        planner = AdaptivePlanner(model, plans, int8=int8, adapted=tuple(adapters or ()))
    rule = acceptance if acceptance in RULES and RULES[acceptance].lossless else "auto"
    return HierarchicalDrafter(
        model,
        model.new_cache(slots),
        planner,
        branching=branching,
        adapters=adapters,
        int8=int8,
        draw=draw,
        replacement=RULES[rule].independent,
        acceptance=rule,
    )
