"""Text to tokens and back, while a text is being written: streaming decode and stop strings.

A thin layer over the `tokenizers` package, which reads a model's `tokenizer.json`.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from specdec._checks import shown

TOKENIZER_NAME = "tokenizer.json"


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 as it is, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(moved)})
    return alphabet


_ALPHABET = _byte_alphabet()


class Tokenizer:
    """A model's tokenizer.

    Args:
        backend: the tokenizer itself.
        bos_token_id: token that every prompt starts with; None for none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None) -> None:
        self.backend = backend
        self.bos_token_id = bos_token_id
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str], bos_token_id: int | None) -> Tokenizer:
        """The tokenizer in `directory/tokenizer.json`. Raises ValueError where it is missing or damaged."""
        return cls(_read_backend(directory), bos_token_id)

    @classmethod
    def with_own_start(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """Like `from_directory`, with the token that the tokenizer itself puts before a text, if it does."""
        backend = _read_backend(directory)
        start = backend.encode("", add_special_tokens=True).ids
        return cls(backend, start[0] if start else None)

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens: the beginning-of-text token, where the model has one, and those of `text`."""
        prefix = [] if self.bos_token_id is None else [self.bos_token_id]
        return prefix + self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    def stream(self) -> StreamDecoder:
        """A decoder for tokens that arrive one at a time."""
        return StreamDecoder(self)

    def is_special(self, token: int) -> bool:
        """True for a token that marks structure and has no text."""
        return token in self._special

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of `token`, empty for a special one; None where the tokenizer is not byte-level."""
        if not self._byte_level:
            return None
        cached = self._bytes.get(token)
        if cached is None:
            piece = None if token in self._special else self.backend.id_to_token(token)
            cached = b"" if piece is None else _piece_bytes(piece)
            self._bytes[token] = cached
        return cached


def _read_backend(directory: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    path = Path(directory) / TOKENIZER_NAME
    if not path.is_file():
        raise ValueError(f"{directory}: has no {TOKENIZER_NAME}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{path}: not a readable tokenizer ({str(error).splitlines()[0]})") from None


def _piece_bytes(piece: str) -> bytes:
    """Bytes of a byte-level vocabulary entry; an added entry outside the byte alphabet is plain text."""
    mapped = [_ALPHABET.get(char) for char in piece]
    if None in mapped:
        return piece.encode("utf-8")
    return bytes(byte for byte in mapped if byte is not None)


class StreamDecoder:
    """Decodes a growing token sequence in time linear in its length and never emits half a character.

    With a byte-level tokenizer the emitted pieces and `finish()` concatenate to `Tokenizer.decode` of all
    tokens, for any bytes. Other tokenizers are decoded in a short sliding window; there the same holds for
    valid UTF-8.

    Example:
        >>> decoder = tokenizer.stream()
        >>> "".join([*map(decoder.push, tokens), decoder.finish()]) == tokenizer.decode(tokens)
        True
    """

    # A window this long without a clean end is not a text; it is emitted as it is, which keeps the time
    # linear.
    _MAX_WINDOW = 32

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._window: list[int] = []
        self._context = 0  # tokens at the window's start that were shown already
        self._emitted = 0  # characters of the window's text that were returned already

    def push(self, token: int) -> str:
        """The text that is certain after `token`: often one word, sometimes empty."""
        piece = self._tokenizer.token_bytes(token)
        if piece is not None:
            return self._utf8.decode(piece)
        if self._tokenizer.is_special(token):
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        # U+FFFD at the end may be the first bytes of a character whose rest is still to come.
        clean = not text.endswith("\ufffd") or len(self._window) - self._context >= self._MAX_WINDOW
        stable = len(text) if clean else len(text.rstrip("\ufffd"))
        new = text[self._emitted : stable]
        if clean and new:
            # The tokens of this piece stay as context, because decoders strip or add a space at the
            # start of a text. They begin where a character does: half of one would spoil its neighbours.
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = len(self._tokenizer.decode(self._window))
        else:
            self._emitted = max(self._emitted, stable)
        return new

    def finish(self) -> str:
        """What was held back at the end of the sequence: U+FFFD for a character that never became whole."""
        if self._window:
            text = self._tokenizer.decode(self._window)[self._emitted :]
            self._window, self._context, self._emitted = [], 0, 0
            return text
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, and says how much of it can be shown.

    Every stop string is followed by its Knuth-Morris-Pratt automaton, so the time is linear in the text and
    the result does not depend on how the text is cut into pieces. The stop string that is complete first
    wins; of several complete at the same character the longest. The stop string itself is not part of the
    text.

    Args:
        stops: the stop strings, none of them empty.

    Attributes:
        matched: the stop string that was found, or None.

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("a E"), matcher.push("Nd E"), matcher.push("ND b"), matcher.matched
        ('a ', 'ENd ', '', 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise ValueError(f"stops: got {shown(stops)}, want a list of non-empty strings")
        # Longest first: the first automaton that completes is then the longest match ending there.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._state = [0] * len(self._stops)  # length of the longest prefix of a stop that ends the text
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """A stop string was found: the text has ended."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """Take the next piece; return what can be shown now. Empty once a stop string was found."""
        if self.stopped:
            return ""
        for position, char in enumerate(text):
            for i, stop in enumerate(self._stops):
                state, failure = self._state[i], self._failure[i]
                while state and stop[state] != char:
                    state = failure[state - 1]
                self._state[i] = state + (stop[state] == char)
                if self._state[i] == len(stop):
                    self.matched = stop
                    seen = self._held + text[: position + 1]
                    self._held = ""
                    return seen[: -len(stop)]
        seen = self._held + text
        safe = len(seen) - max(self._state, default=0)
        self._held = seen[safe:]
        return seen[:safe]

    def finish(self) -> str:
        """The text held back at the end because it might have begun a stop string."""
        held, self._held = self._held, ""
        return held


def _failure_table(stop: str) -> list[int]:
    """For every prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table
