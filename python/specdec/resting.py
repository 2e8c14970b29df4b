"""When drafting is left out altogether.

Prices weigh one draft against another. What they do not see is the time of asking: a drafter follows every
token and is called every round, also in the rounds in which it then proposes nothing. In a batch, or beside
a fast target, that alone can make decoding slower than without a drafter. So rounds with the drafter are
compared with rounds without it, by the clock, and while those are faster it rests: it is neither asked nor
told, and hears what was emitted once it is asked again.
"""

from __future__ import annotations

from specdec.drafters.worth import SecondsOfLate

WINDOW = 64  # rounds with the drafter from which its rate is judged
TRIAL = 16  # of them, where it did not pay before
FIRST_REST = 64  # rounds; doubled each time that a trial does not pay
LONGEST_REST = 2048
MEASURED = 4  # rounds without the drafter that are made to know what they take
EVERY = 512  # rounds with the drafter after which that is measured again


class Rest:
    """Whether the drafter rests, of batches of one size."""

    def __init__(self) -> None:
        self._plain = SecondsOfLate()
        self._left = 0  # rounds to rest from now on
        self._next = FIRST_REST
        self._window = WINDOW
        self._since = EVERY - WINDOW // 2  # rounds since resting ones were measured
        self._begin()

    def _begin(self) -> None:
        self._rounds, self._tokens, self._seconds = 0, 0.0, 0.0

    def due(self) -> bool:
        """Whether the drafter rests in this round; call it once a round."""
        if self._left == 0 and self._since >= EVERY:
            self._left, self._since = MEASURED, 0
        return self._left > 0

    def observe(self, rested: bool, sequences: int, tokens: int, seconds: float) -> None:
        """Books a round.

        Args:
            rested: what `due` said of it.
            sequences: in it.
            tokens: emitted by all of them.
            seconds: of the whole round.
        """
        if rested:
            self._plain.observe(seconds)
            self._left -= 1
            if self._left == 0:
                self._since = 0
            return
        self._since += 1
        self._rounds += 1
        self._tokens += tokens
        self._seconds += seconds
        plain = self._plain()
        if self._rounds < self._window or plain == 0.0:
            return
        if self._tokens / self._seconds >= sequences / plain:
            self._next, self._window = FIRST_REST, WINDOW
        else:
            self._left, self._next = self._next, min(2 * self._next, LONGEST_REST)
            self._window = TRIAL
        self._begin()
