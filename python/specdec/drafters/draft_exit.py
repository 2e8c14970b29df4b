"""When a draft ends: how sure the drafter was of the token that it drafted last.

A confidence is the probability that the drafting model itself gave its token, before temperature, filters and
every other edit. A token below the threshold is kept and verified, only nothing is drafted below it: dropping
a token that was drawn because of what it is would bias the text (docs/lossless.md, What a drafter may do).

The adaptive threshold is that of self-speculative decoding (Zhang et al., 2023, arXiv 2309.08168, section
3.4). With its defaults, a first round that keeps 3 of 4 drafts moves the rate from 0 to 0.375, which is too
low, so the threshold rises from 0.6 by (1 - 0.9) 0.01 to 0.601.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specdec._checks import check_integer, check_number
from specdec.tree import MAX_NODES


class Threshold:
    """The threshold of one sequence.

    Attributes:
        value: nothing is drafted below a token whose confidence is less.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def observe(self, drafted: int, accepted: int, most: int) -> None:
        """Books a round with drafts.

        Args:
            drafted: tokens of the longest drafted path, at least 1.
            accepted: how many tokens of the draft were kept.
            most: tokens that a path may have had.
        """


class DraftExit(Hashable, Protocol):
    """A rule for when drafts end. Equal ones share what is learned about drafts."""

    def begin(self) -> Threshold:
        """The threshold of a new sequence."""


@dataclass(frozen=True)
class FixedLength:
    """As many tokens as are allowed, whatever the drafter thinks of them."""

    def begin(self) -> Threshold:
        """See `DraftExit`."""
        return Threshold(0.0)


@dataclass(frozen=True)
class StaticThreshold:
    """The same threshold throughout.

    Attributes:
        threshold: from 0 to 1.

    Raises:
        ValueError: it is not.
    """

    threshold: float = 0.6

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, 0.0, 1.0)

    def begin(self) -> Threshold:
        """See `DraftExit`."""
        return Threshold(self.threshold)


@dataclass(frozen=True)
class AdaptiveExit:
    """Raises a sequence's threshold while fewer of its drafts are kept than wanted, else lowers it.

    After every round with drafts, with `rate` at first 0:

        rate      <- rate_memory rate + (1 - rate_memory) accepted / drafted
        moved     =  threshold, if rate >= target and as many tokens were drafted as are allowed,
                     else threshold + step, if rate <= target, else threshold - step
        threshold <- memory threshold + (1 - memory) moved

    Attributes:
        threshold: at first, from 0 to 1.
        target: the share of drafts that shall be kept, from 0 to 1.
        step: how far the threshold moves, from 0 to 1.
        rate_memory: what stays of the rate with each round, from 0 to 1.
        memory: what stays of the threshold, from 0 to 1.

    Raises:
        ValueError: a number is out of its range.
    """

    threshold: float = 0.6
    target: float = 0.85
    step: float = 0.01
    rate_memory: float = 0.5
    memory: float = 0.9

    def __post_init__(self) -> None:
        for name in ("threshold", "target", "step", "rate_memory", "memory"):
            check_number(name, getattr(self, name), 0.0, 1.0)

    def begin(self) -> Threshold:
        """See `DraftExit`."""
        return _AdaptiveThreshold(self)


class _AdaptiveThreshold(Threshold):
    def __init__(self, settings: AdaptiveExit) -> None:
        super().__init__(settings.threshold)
        self._settings = settings
        self._rate = 0.0

    def observe(self, drafted: int, accepted: int, most: int) -> None:
        s = self._settings
        self._rate = s.rate_memory * self._rate + (1.0 - s.rate_memory) * accepted / drafted
        moved = self.value
        if self._rate < s.target or drafted < most:
            moved += s.step if self._rate <= s.target else -s.step
        self.value = s.memory * self.value + (1.0 - s.memory) * moved


class DraftEnd(NamedTuple):
    """How drafts end, as `parse_exit` reads it.

    Attributes:
        exit: when; None: where going on would not be worth its time.
        widen: most children of the node at which a chain ends by its exit.
    """

    exit: DraftExit | None
    widen: int = 1


# What the paper calls the numbers of its rule.
_ADAPTIVE = {
    "gamma0": "threshold",
    "alpha": "target",
    "eps": "step",
    "beta1": "rate_memory",
    "beta2": "memory",
}
_WANTED = (
    "priced, fixed, static:T or adaptive, the last one with gamma0, alpha, eps, beta1, beta2 (0 to 1, as T "
    f"is) and both with widen (2 to {MAX_NODES}), such as adaptive:alpha=0.9,widen=3"
)


def parse_exit(text: str) -> DraftEnd:
    """Reads "priced" (measured times and what became of earlier drafts say where a draft ends), "fixed",
    "static", "static:0.6", "adaptive", or one of the last three with settings.

    Raises:
        ValueError: it is none of these, or a number is out of its range.

    >>> parse_exit("static:0.5,widen=3")
    DraftEnd(exit=StaticThreshold(threshold=0.5), widen=3)
    >>> parse_exit("adaptive:alpha=0.9,eps=0.02").exit
    AdaptiveExit(threshold=0.6, target=0.9, step=0.02, rate_memory=0.5, memory=0.9)
    """
    kind, colon, rest = text.strip().partition(":")
    try:
        settings = _settings(rest) if colon else {}
        widen = int(settings.pop("widen", "1"))
        if "widen" in rest:
            check_integer("widen", widen, 2, MAX_NODES)
        numbers = {name: float(number) for name, number in settings.items()}
        if kind == "adaptive":
            return DraftEnd(AdaptiveExit(**{_ADAPTIVE[name]: x for name, x in numbers.items()}), widen)
        if kind == "static" and numbers.keys() <= {""}:
            return DraftEnd(StaticThreshold(*numbers.values()), widen)
        if kind in ("priced", "fixed") and not colon:
            return DraftEnd(FixedLength() if kind == "fixed" else None)
    except (KeyError, ValueError):
        pass  # one message says what is wanted, whatever is wrong
    raise ValueError(f"draft_exit: got {text!r}, want {_WANTED}")


def _settings(text: str) -> dict[str, str]:
    """By name, each once; a number without a name, the first, by ""."""
    settings: dict[str, str] = {}
    for place, part in enumerate(text.split(",")):
        name, equals, number = (piece.strip() for piece in part.rpartition("="))
        if name in settings or bool(equals) != bool(name) or (place and not name):
            raise ValueError(part)
        settings[name] = number
    return settings
