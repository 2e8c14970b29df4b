"""Whether a drafter's own work pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec.costs import FASTER, SLOWER

LEARNING = 0.1
GUESS = 1.2  # tokens a call, before any was made
GUESS_CALLS = 3.0  # that what is known of all classes counts for beside a class's own
COLD_CALLS = 4  # the first ones are made whatever they bring, with cold caches: the fastest of them counts
TRYING = 0.3  # of a gain, where it did not seem to pay
EXPLORE_EVERY = 16  # drafting takes a part of a decode step: the first try costs 2% or so, then ever less


class SecondsOfLate:
    """What calls of one kind take. An interruption makes a call slower and nothing makes it faster, so slow
    calls count for less, and of the first ones the fastest counts.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._calls = 0

    def __call__(self) -> float:
        """The estimate; 0 before any call."""
        return self._seconds

    @property
    def cold(self) -> bool:
        """Whether the next call is one of the first."""
        return self._calls < COLD_CALLS

    def observe(self, seconds: float) -> None:
        """Books a call."""
        if self.cold:
            self._seconds = min(seconds, self._seconds) if self._calls else seconds
        else:
            new = min(seconds, 3.0 * self._seconds)
            self._seconds += (FASTER if new < self._seconds else SLOWER) * (new - self._seconds)
        self._calls += 1


class Exploration:
    """Tries once in a while what does not seem to pay, ever more rarely while that is so.

    Args:
        every: tries after this many rounds; doubled with every try.
    """

    def __init__(self, every: int) -> None:
        self._every = self._after = every
        self._idle = 0

    def due(self, pays: bool) -> bool:
        """Whether this round tries, where it does not seem to pay; call it once a round."""
        if pays:
            self._idle, self._after = 0, self._every
            return False
        self._idle += 1
        if self._idle < self._after:
            return False
        self._idle = 0
        self._after *= 2
        return True


@dataclass
class _Gain:
    """What drafts brought to sequences of one class: tokens above what their nodes cost."""

    factor: float
    tokens: float = 0.0
    calls: int = 0
    trying: bool = False
    exploration: Exploration = field(default_factory=lambda: Exploration(EXPLORE_EVERY))


class Worth:
    """Compares what drafts bring with the time that drafting takes, both learned.

    Sequences may be told apart by a class, such as what another drafter has for them already. A class for
    which drafting does not pay is tried again once in a while, ever more rarely; what is learned then counts
    for more.

    Args:
        factors: by class, what drafting is thought to bring in proportion to the first class, until more is
            known.
    """

    def __init__(self, factors: Sequence[float] = (1.0,)) -> None:
        self._gains = [_Gain(factor) for factor in factors]
        self._tokens = GUESS  # of a class with factor 1, from all classes
        self._told = GUESS_CALLS
        self._seconds = SecondsOfLate()

    def choose(self, classes: Sequence[int], second_prices: Sequence[float]) -> list[bool]:
        """For which sequences to draft; call it once a round.

        Args:
            classes: of each sequence.
            second_prices: tokens that a second of drafting must bring, if it were for sequences like this one
                alone.
        """
        seconds = self._seconds()
        # What a second is worth differs between them: gains are compared in parts of it.
        hopes = [self._hope(self._gains[c]) / price for c, price in zip(classes, second_prices, strict=True)]
        # A further row costs less than the first: half of its share.
        chosen = [hope >= 0.5 * seconds / len(classes) for hope in hopes]
        if self._seconds.cold:
            chosen = [True] * len(classes)
        elif sum(hope for hope, good in zip(hopes, chosen, strict=True) if good) < seconds:
            chosen = [False] * len(classes)
        seen = set()
        for i, c in enumerate(classes):
            if c in seen:
                continue
            seen.add(c)
            gain = self._gains[c]
            pays = any(good for other, good in zip(classes, chosen, strict=True) if other == c)
            gain.trying = gain.exploration.due(pays)
            chosen[i] = chosen[i] or gain.trying
        return chosen

    def observe(self, gains: Iterable[tuple[int, float]], seconds: float) -> None:
        """Books a call.

        Args:
            gains: (class, expected tokens less the price of their nodes) of each sequence drafted for.
            seconds: that it took.
        """
        self._seconds.observe(seconds)
        for c, tokens in gains:
            gain = self._gains[c]
            gain.calls += 1
            rate = TRYING if gain.trying else max(LEARNING, 1.0 / gain.calls)
            gain.tokens += rate * (tokens - gain.tokens)
            # A class of small factor would say too loudly what little it knows of the others.
            self._told += gain.factor**2
            weight = gain.factor**2 * max(LEARNING, 1.0 / self._told)
            self._tokens += weight * (tokens / gain.factor - self._tokens)

    def _hope(self, gain: _Gain) -> float:
        """What drafting is expected to bring to a sequence of a class."""
        own = gain.calls / (gain.calls + GUESS_CALLS)
        return own * gain.tokens + (1.0 - own) * gain.factor * self._tokens
