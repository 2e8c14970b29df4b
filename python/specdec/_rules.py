"""The names of the rules of acceptance, for options and their help. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """An entry of `RULES`.

    Attributes:
        description: one line for help texts.
        lossless: whether the text keeps the target's law.
        independent: whether it wants the children of a node drawn independently of each other.
    """

    description: str
    lossless: bool = True
    independent: bool = False


RULES: Mapping[str, Rule] = {
    "auto": Rule("traversal, which is block on a chain and keeps no less than speculative"),
    "speculative": Rule("drafts one by one, siblings by recursive rejection"),
    "k-seq": Rule("SpecTr's, siblings drawn independently from one row and tested alike", independent=True),
    "block": Rule("block verification, a chain by its joint probabilities"),
    "traversal": Rule("traversal verification, a tree from its leaves up"),
    "typical": Rule("LOSSY, drafts that the target finds typical (Medusa)", lossless=False),
}
"""By the name that `acceptance` options and arguments take; docs/lossless.md states them."""

FOLLOW = "follow"
"""What decides about drafts that were not drawn: every lossless rule comes to this."""


def is_lossless(decided: str | None) -> bool:
    """Whether the text keeps the target's law where this decides: a name in `RULES`, `FOLLOW`, or None."""
    return decided is None or decided not in RULES or RULES[decided].lossless
