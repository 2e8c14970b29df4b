"""When drafting is left out altogether.

Prices weigh one draft against another. What they do not see is the time of asking: a drafter follows every
token and is called every round, also in the rounds in which it then proposes nothing. In a batch, or beside
a fast target, that alone can make decoding slower than without a drafter. So rounds with the drafter are
compared with rounds without it, by the clock, and while those are faster it rests: it is not asked, and what
is emitted meanwhile it hears of many rounds at once.

Text comes in stretches. A drafter with nothing to say for a while costs little then and brings much later, so
what counts is a long run of windows, and one window only where it brings much.
"""

from __future__ import annotations

# A window is so many rounds with the drafter times sequences in them: a large batch tells sooner.
WINDOW = 48
TRIAL = 24  # a window after a rest: what did not pay gets less time to show that it does
FEWEST = 4  # rounds of a window at least
ENOUGH = 160  # in all windows before the first rest
KEPT = 0.9  # weight of all windows before, at each new one

# Tokens times those of plain decoding in the same time.
GAIN = 1.02  # that a drafter has to bring over all windows: what it costs beside time is not measured
MUCH = 1.15  # in one window, which keeps it going whatever was before

FIRST_REST = 128  # rounds; doubled each time that a trial does not pay
LONGEST_REST = 2048

MEASURED = 4  # rounds in a row without the drafter that are made to know what plain rounds take
EVERY = 256  # rounds with the drafter after which that is measured again
LATE = 0.2  # weight of the latest plain round in what they take: machines change their pace


class Rest:
    """Whether the drafter rests, of batches of about one size: ask `due` before a round, tell `observe` after
    it.
    """

    def __init__(self) -> None:
        self._plain = 0.0  # seconds of a round without the drafter, in units; 0 where none is known
        self._left = 0  # rounds to rest from now on
        self._next = FIRST_REST
        self._window = WINDOW
        # Rounds since plain ones were measured; at the start that is due after the first two.
        self._since = EVERY - 2
        self._all_seen = self._all_tokens = self._all_plain = 0.0  # of all windows, the last ones most
        self._begin()

    def _begin(self) -> None:
        """A new window: rounds, rounds times sequences, tokens, and those of plain decoding meanwhile."""
        self._rounds = self._seen = self._tokens = 0
        self._plain_tokens = 0.0

    def wake(self) -> None:
        """A new text has come, of which nothing is known: tries the drafter, if it rests."""
        if self._left > 0:
            self._left, self._window = 0, TRIAL
            self._begin()

    def due(self) -> bool:
        """Whether the drafter rests in this round; call it once a round."""
        if self._left <= 0 and self._since >= EVERY:
            self._left, self._since = MEASURED, 0
        return self._left > 0

    def observe(self, rested: bool, sequences: int, tokens: int, seconds: float, unit: float) -> None:
        """Books a round.

        Args:
            rested: what `due` said of it.
            sequences: in it.
            tokens: emitted by all of them.
            seconds: of the whole round.
            unit: seconds that a verification of so many sequences takes without drafts, roughly. Batches of
                sizes near to each other are compared by it.
        """
        if rested:
            took = seconds / unit
            if self._plain == 0.0:
                self._plain = took
            self._plain += LATE * (min(took, 2.0 * self._plain) - self._plain)
            self._left -= 1
            if self._left <= 0:
                self._since = 0
            return
        self._since += 1
        plain = self._plain * unit
        if plain == 0.0:
            return
        self._rounds += 1
        self._seen += sequences
        self._tokens += tokens
        self._plain_tokens += sequences * seconds / plain
        if self._seen < self._window or self._rounds < FEWEST:
            return
        self._all_seen = KEPT * self._all_seen + self._seen
        self._all_tokens = KEPT * self._all_tokens + self._tokens
        self._all_plain = KEPT * self._all_plain + self._plain_tokens
        if self._tokens >= MUCH * self._plain_tokens or self._all_tokens >= GAIN * self._all_plain:
            # What did not pay for long has to pay for long before it is trusted again.
            self._next, self._window = max(self._next // 2, FIRST_REST), WINDOW
        elif self._all_seen >= ENOUGH:
            self._left, self._next = self._next, min(2 * self._next, LONGEST_REST)
            self._window = TRIAL
        self._begin()
