"""Plain decoding: one token a round. The baseline of every speedup."""

from __future__ import annotations

from specdec.loop import Loop
from specdec.models.base import CausalLM


def autoregressive(model: CausalLM, *, slots: int = 1) -> Loop:
    """The loop without drafts.

    Args:
        model: the target.
        slots: sequences that are decoded at the same time.
    """
    return Loop(model, slots=slots)
