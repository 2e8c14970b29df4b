"""The loop of a drafter that reads the target's own memory."""

from __future__ import annotations

from typing import Literal

from specdec.budget import DraftBudget
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.loop import Loop
from specdec.models.base import CausalLM


def loop_of(
    model: CausalLM,
    drafter: LayerSkipDrafter | EarlyExitDrafter,
    *,
    max_draft: int,
    commit: Literal["deferred", "eager"] = "deferred",
    adaptive: bool = True,
    acceptance: str = "auto",
) -> Loop:
    """The loop over the memory that a drafter reads.

    Args:
        model: the target, whose cache `drafter` has.
        drafter: a drafter that no other loop has.
        max_draft, commit, adaptive, acceptance: as of `self_speculative` and `hispec`.
    """
    return Loop(
        model,
        drafter,
        slots=drafter.cache.slots,
        commit=commit,
        budget=DraftBudget(
            max_draft,
            adaptive=adaptive,
            whole=drafter.ends_drafts,
            planned=drafter.planner if isinstance(drafter, EarlyExitDrafter) else None,
        ),
        acceptance=acceptance,
        cache=drafter.cache,
    )
