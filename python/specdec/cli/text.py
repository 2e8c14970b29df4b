"""From tokens to text while they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from specdec.models.tokenizer import StopMatcher, Tokenizer


class TextWriter:
    """The stop condition of a sequence that also keeps, and may write, its text.

    Never half a character, never the beginning of what may become a stop string.

    Args:
        tokenizer: decodes the tokens.
        stops: texts that end the sequence; they are not part of it.
        out: where `flush` writes; None keeps the text only.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), out: TextIO | None = None) -> None:
        self._decoder = tokenizer.stream()
        self._matcher = StopMatcher(list(stops))
        self._out = out
        self._pieces: list[str] = []
        self._written = 0

    @property
    def text(self) -> str:
        """What is certain so far."""
        return "".join(self._pieces)

    def feed(self, token: int) -> bool:
        """Takes the next emitted token; True when a stop string is complete."""
        self._pieces.append(self._matcher.push(self._decoder.push(token)))
        return self._matcher.stopped

    def flush(self) -> None:
        """Writes what came since the last call."""
        new = "".join(self._pieces[self._written :])
        self._written = len(self._pieces)
        if self._out is not None and new:
            self._out.write(new)
            self._out.flush()

    def finish(self) -> None:
        """Adds what was held back, where no stop string came, and writes it."""
        if not self._matcher.stopped:
            self._pieces += [self._matcher.push(self._decoder.finish()), self._matcher.finish()]
        self.flush()
