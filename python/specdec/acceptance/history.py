"""What a sequence has seen: the prompt and, counted apart, the output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenHistory:
    """The tokens before a row of logits: prompt, output and, for a draft node, the tokens on its own path.

    Only `extend` changes it, and it is called with emitted tokens; drafts enter through `with_path`, which
    makes a new history, so a rejected draft leaves no trace.

    Args:
        vocab_size: V.
        prompt: tokens that the repetition penalty and the callback see.
        output: tokens that were emitted, the round's root token included; presence and frequency penalties
            count these.

    Raises:
        ValueError: a token is outside the vocabulary.
    """

    def __init__(self, vocab_size: int, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> None:
        self.vocab_size = vocab_size
        self._tokens: list[int] = []
        self._index: dict[int, int] = {}  # token -> its place in the two arrays
        self._ids = np.empty(0, np.int64)  # the arrays have room to grow
        self._counts = np.empty(0, np.float32)
        self._add(prompt, 0.0)
        self.extend(output)

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output in order. Not to be written to; it grows."""
        return self._tokens

    @property
    def index(self) -> dict[int, int]:
        """Where `seen_ids` and `output_counts` have a token. Not to be written to."""
        return self._index

    @property
    def seen_ids(self) -> NDArray[np.int64]:
        """int64 [S], every token of prompt and output once."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """float32 [S], how often the output has each of `seen_ids`; 0 for those of the prompt alone."""
        return self._counts[: len(self._index)]

    @property
    def seen(self) -> Tensor:
        """bool [V], true where a token is in prompt or output."""
        seen = torch.zeros(self.vocab_size, dtype=torch.bool)
        seen[torch.from_numpy(self.seen_ids)] = True
        return seen

    @property
    def counts(self) -> Tensor:
        """float32 [V], how often the output has a token."""
        counts = torch.zeros(self.vocab_size)
        counts[torch.from_numpy(self.seen_ids)] = torch.from_numpy(self.output_counts)
        return counts

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds emitted tokens. One outside the vocabulary is a ValueError, and then nothing is added."""
        self._add(tokens, 1.0)

    def with_path(self, tokens: Iterable[int]) -> TokenHistory:
        """The history of a draft node: this one and `tokens`, the node's path with its own token."""
        longer = TokenHistory(self.vocab_size)
        longer._tokens = self._tokens.copy()
        longer._index = self._index.copy()
        longer._ids, longer._counts = self.seen_ids.copy(), self.output_counts.copy()
        longer.extend(tokens)
        return longer

    def _add(self, tokens: Iterable[int], count: float) -> None:
        new = list(tokens)
        for token in new:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"tokens: got {token}, want tokens in [0, {self.vocab_size})")
        self._tokens += new
        for token in new:
            at = self._index.setdefault(token, len(self._index))
            if at == len(self._ids):
                room = max(64, at)
                self._ids = np.concatenate([self._ids, np.empty(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
            self._ids[at] = token
            self._counts[at] += count
