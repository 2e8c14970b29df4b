"""SpecLA: speculative decoding on a recurrent state.

Drafts are verified over the frozen state, which leaves factors behind; only the factors of the accepted path
are folded in, by default while the next round reads the state anyway. Nothing is copied or rolled back.
"""

from __future__ import annotations

from typing import Literal

from specdec.budget import DraftBudget
from specdec.drafters.base import Drafter
from specdec.loop import Loop
from specdec.models.base import CausalLM


def specla(
    model: CausalLM,
    drafter: Drafter,
    *,
    slots: int = 1,
    commit: Literal["deferred", "eager"] = "deferred",
    max_draft: int = 16,
    adaptive: bool = True,
    acceptance: str = "auto",
) -> Loop:
    """The loop with a drafter.

    Args:
        model: the target.
        drafter: proposes tokens.
        slots: sequences that are decoded at the same time.
        commit: "deferred" folds an accepted path in during the next verification, "eager" in its own pass.
        max_draft: most draft tokens a sequence gets in one round.
        adaptive: draft only as much as measured costs and acceptance make worthwhile; False always drafts
            `max_draft`.
        acceptance: the rule that decides sampled rounds, see `specdec.acceptance.RULES`.

    Raises:
        ValueError: `commit`, `max_draft` or `acceptance` is not one of the above.
    """
    budget = DraftBudget(max_draft, adaptive=adaptive)
    return Loop(model, drafter, slots=slots, commit=commit, budget=budget, acceptance=acceptance)
