"""A sequence while it is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.acceptance import TokenHistory
from specdec.budget import SequenceBudget
from specdec.generation import FinishReason, Request, Result, StopCondition
from specdec.tree import TokenTree


@dataclass
class ActiveSequence:
    """A sequence that occupies a slot.

    Attributes:
        index: of its request among those of the run.
        slot: its place in the cache.
        request: what is decoded.
        result: what was decoded so far; grows with every round.
        history: the tokens that penalties count and the callback gets; None without them.
        stop: the request's stop condition, or None.
        eos: tokens that end it; empty where the request ignores them.
        proposed: all drafts of this round, those included that were not thought worth verifying, of a drafter
            that states no chances: what comes out tells what they were worth. None otherwise.
        budget: how much it drafts, where that may not depend on measured times; None where the loop's own
            budget decides.
        unheard: tokens that were emitted while the drafter rested, and that it has not heard of.
    """

    index: int
    slot: int
    request: Request
    result: Result
    history: TokenHistory | None
    stop: StopCondition | None
    eos: frozenset[int]
    proposed: TokenTree | None = None
    budget: SequenceBudget | None = None
    unheard: list[int] = field(default_factory=list)

    @property
    def root(self) -> int:
        """The last emitted token, which the model has not seen; before the first, the prompt's last."""
        return self.result.tokens[-1] if self.result.tokens else self.request.prompt[-1]

    @property
    def position(self) -> int:
        """Index of the next token to emit, prompt included."""
        return len(self.request.prompt) + len(self.result.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - len(self.result.tokens)

    def emit(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends tokens up to where the sequence ends; returns them, and why it ended if it did."""
        taken: list[int] = []
        reason: FinishReason | None = None
        for token in tokens:
            taken.append(token)
            if token in self.eos:
                reason = "eos"
            elif self.stop is not None and self.stop.feed(token):
                reason = "stop"
            elif len(self.result.tokens) + len(taken) >= self.request.max_new_tokens:
                reason = "length"
            if reason is not None:
                break
        self.result.tokens.extend(taken)
        if self.history is not None:
            self.history.extend(taken)
        return tuple(taken), reason
