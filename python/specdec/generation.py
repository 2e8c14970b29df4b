"""What goes into the loop and what comes out: requests, events, results and statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specdec._checks import check_integer, is_integer, shown
from specdec.acceptance.logprobs import TokenLogprob
from specdec.acceptance.params import SamplingParams

FinishReason = Literal["eos", "stop", "length", "cancelled"]


class StopCondition(Protocol):
    """Watches one sequence's tokens for a stop string."""

    def feed(self, token: int) -> bool:
        """Takes the next emitted token; True when the text up to it contains a stop string."""


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: upper bound on emitted tokens, at least 1; never exceeded.
        sampling: temperature and filters; greedy by default.
        stop: makes a fresh stop condition for this sequence, or None.
        ignore_eos: emit end tokens like any other (for measurements of a fixed length).
        logprobs: tell the log-probability of every emitted token, and of this many of the most likely ones
            (0 or more); None tells nothing. They are those of the target's logits as the model gives them,
            before temperature, penalties and all other processing.

    Raises:
        ValueError: an argument is not what is said above.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Callable[[], StopCondition] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.prompt, "__len__"):
            raise ValueError(f"prompt: got {shown(self.prompt)}, want a sequence of int token ids")
        if len(self.prompt) < 1:
            raise ValueError("prompt: got no tokens, want at least one (the beginning-of-text token will do)")
        for token in self.prompt:
            if not is_integer(token):
                raise ValueError(f"prompt: got {shown(token)}, want a sequence of int token ids")
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling: got {shown(self.sampling)}, want SamplingParams")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0)
        if self.stop is not None and not callable(self.stop):
            raise ValueError(
                f"stop: got {shown(self.stop)}, want a function that makes a stop condition, or None"
            )


@dataclass(frozen=True)
class TokenEvent:
    """Tokens that one sequence emitted in one round.

    Attributes:
        index: the request's place in the list that was given.
        tokens: emitted token ids, in order; the end token itself is included.
        finish_reason: set with the sequence's last event.
        logprobs: of `tokens`, where the request asks for them.
    """

    index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass
class Result:
    """One generated sequence.

    Attributes:
        tokens: every emitted token, the end token included.
        finish_reason: why it ended.
        seed: the seed that its draws used, so that a run without one can be repeated.
        rounds: verification rounds that it took part in.
        drafted: draft tokens that were verified for it.
        accepted: draft tokens that the target accepted.
        logprobs: one for each of `tokens`, where the request asks for them.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "cancelled"
    seed: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Seconds:
    """Wall time of a run by part, in seconds."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def decode(self) -> float:
        """Everything after the prefill."""
        return self.draft + self.verify + self.accept + self.commit


@dataclass
class Statistics:
    """Counts of a whole run. A round of a batch of B sequences counts as B rounds.

    Attributes:
        rounds: verification rounds, counted per sequence.
        emitted: tokens emitted by those rounds (the first token of a sequence comes from its prefill and is
            not counted).
        drafting_rounds: those of the rounds that had drafts to verify.
        complete_rounds: those whose accepted path went as deep as their drafts.
        levels: depth of the drafts, summed over rounds; of chains it is `drafted`.
        drafted: draft tokens verified.
        accepted: draft tokens accepted.
        drafted_at: verified draft tokens by depth below the last emitted token, from 1.
        accepted_at: accepted draft tokens by depth.
        seconds: wall time by part.
    """

    rounds: int = 0
    emitted: int = 0
    drafting_rounds: int = 0
    complete_rounds: int = 0
    levels: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a sequence emits per round, the bonus token counted; 1 is plain decoding."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over decoding time; the prefill and its first token are left out."""
        return self.emitted / self.seconds.decode if self.seconds.decode > 0 else 0.0

    @property
    def rounds_per_second(self) -> float:
        """Rounds over decoding time."""
        return self.rounds / self.seconds.decode if self.seconds.decode > 0 else 0.0

    def count_path(self, drafted_depths: Sequence[int], accepted: int) -> None:
        """Books one sequence's round: the depth of every verified draft token, and how deep the accepted path
        went.
        """
        deepest = max(drafted_depths, default=0)
        for counts in (self.drafted_at, self.accepted_at):
            counts.extend([0] * (deepest - len(counts)))
        for depth in drafted_depths:
            self.drafted_at[depth - 1] += 1
        for depth in range(accepted):
            self.accepted_at[depth] += 1
        self.rounds += 1
        self.drafting_rounds += deepest > 0
        self.complete_rounds += 0 < deepest == accepted
        self.levels += deepest
        self.drafted += len(drafted_depths)
        self.accepted += accepted

    def as_dict(self) -> dict[str, object]:
        """The statistics as the command line prints them with --json."""
        s = self.seconds
        return {
            "rounds": self.rounds,
            "drafting_rounds": self.drafting_rounds,
            "complete_rounds": self.complete_rounds,
            "levels": self.levels,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": [
                a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)
            ],
            "tokens_per_second": self.tokens_per_second,
            "rounds_per_second": self.rounds_per_second,
            "seconds": {
                "prefill": s.prefill,
                "draft": s.draft,
                "verify": s.verify,
                "accept": s.accept,
                "commit": s.commit,
            },
        }
