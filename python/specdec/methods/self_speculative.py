"""Self-speculative decoding: the target drafts for itself, some of its sub-layers skipped.

No second model and no training (Zhang et al., 2023, arXiv 2309.08168). The draft reads the target's own
memory and leaves it as it is; where drafting does not pay, a round is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specdec._rules import RULES
from specdec.drafters.draft_exit import DraftExit
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.shape import TreeShape
from specdec.loop import Loop
from specdec.methods.own_memory import loop_of
from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet


def self_speculative(
    model: SkippableLM,
    skips: SkipSet,
    *,
    slots: int = 1,
    commit: Literal["deferred", "eager"] = "deferred",
    max_draft: int = 12,
    adaptive: bool = True,
    acceptance: str = "auto",
    exit: DraftExit | None = None,
    branching: Sequence[int] | TreeShape = (1,),
    widen: int = 1,
    vocabulary: Sequence[int] | None = None,
    int8: bool = False,
    draw: bool = True,
) -> Loop:
    """The loop with a view of the model as drafter.

    Args:
        model: the target.
        skips: the sub-layers that its drafts leave out.
        slots: sequences that are decoded at the same time.
        commit: "deferred" folds an accepted path in with the next verification, or before the next draft;
            "eager" at once.
        max_draft: most draft tokens a sequence gets in one round.
        adaptive: draft only where measured costs and acceptance make it worthwhile; False always drafts.
        acceptance: the rule that decides sampled rounds, see `specdec.acceptance.RULES`.
        exit: when a draft ends, such as `AdaptiveExit()`; None: where going on would not be worth its time.
        branching: shape of the drafts, see `LayerSkipDrafter`.
        widen: most children of the node at which a chain ends, see `LayerSkipDrafter`.
        vocabulary: the only tokens that are drafted, ascending; None: all.
        int8: draft with int8 copies of the model's matrices, which pays where memory is the bottleneck.
        draw: whether drafts of sampled requests are drawn at random; False proposes the likeliest tokens, and
            a seed's text is that of plain sampling.

    Raises:
        ValueError: an argument is not one of the above.
    """
    drafter = LayerSkipDrafter(
        model.skipping(skips, vocabulary, int8=int8),
        model.new_cache(slots),
        exit=exit,
        branching=branching,
        widen=widen,
        draw=draw,
        replacement=acceptance in RULES and RULES[acceptance].independent,
    )
    return loop_of(
        model, drafter, commit=commit, max_draft=max_draft, adaptive=adaptive, acceptance=acceptance
    )
