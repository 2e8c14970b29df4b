"""What a search chooses of a model's drafts: sub-layers that they leave out, and tokens that they know.

A draft reads the head whatever it leaves out, and the head is as wide as the vocabulary. One that knows only
the most frequent tokens reads a part of it, and is wrong where the model's token is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.models.base import SkippableLM, SkippingView
from specdec.models.skipping import SkipSet

PARTS = (2, 4, 8, 16)  # of the vocabulary the half, a quarter, ...


class Choice(NamedTuple):
    """How drafts are made.

    Attributes:
        skips: sub-layers that they leave out.
        vocabulary: how many of the most frequent tokens they know; None: all tokens.

    Example:
        >>> str(Choice(SkipSet.of([4], [5]), 512))
        'mixers 4; mlps 5; 512 tokens'
    """

    skips: SkipSet
    vocabulary: int | None = None

    def __str__(self) -> str:
        return f"{self.skips}" + ("" if self.vocabulary is None else f"; {self.vocabulary} tokens")


class DraftViews:
    """Views of a model by what is chosen. A reduced head is made once.

    Args:
        model: the target.
        ranked: its tokens, the most frequent first.
        int8: whether drafts are made with int8 copies of its matrices.

    Attributes:
        sizes: of vocabularies that are worth a trial, from all tokens (None) down.
    """

    def __init__(self, model: SkippableLM, ranked: Sequence[int], *, int8: bool = False) -> None:
        self.model = model
        self.int8 = int8
        ends = model.eos_token_ids
        self._order = [*sorted(ends), *(token for token in ranked if token not in ends)]
        some = dict.fromkeys(max(model.vocab_size // part, len(ends) + 1) for part in PARTS)
        self.sizes: tuple[int | None, ...] = (None, *(size for size in some if size < model.vocab_size))
        self._whole: dict[int | None, SkippingView] = {}  # views that leave nothing out

    def tokens(self, size: int | None) -> tuple[int, ...] | None:
        """A vocabulary of so many tokens, ascending, those that end a text among them; None for all."""
        return None if size is None else tuple(sorted(self._order[:size]))

    def part(self, size: int | None) -> float:
        """The part of the head that drafts of a vocabulary read."""
        return 1.0 if size is None else size / self.model.vocab_size

    def view(self, choice: Choice) -> SkippingView:
        """What drafts so."""
        size = choice.vocabulary
        if size not in self._whole:
            self._whole[size] = self.model.skipping(SkipSet(), self.tokens(size), int8=self.int8)
        return self._whole[size].skipping(choice.skips)
