"""What a view of a model would draft at every place of texts that the model wrote, in one pass.

A draft is worth what the target accepts of it: the tokens up to the first that is not the target's own. Up to
there a drafter has been fed the text itself. So the pass feeds it the text from every place on, a chain of
`depth` tokens each, and compares what comes out with how the text goes on:

    text            the target's own, greedy        ... a  b  c  d  e
    chain at a      what the view runs                  a  b  c
                    what it would draft                 b  c  x        two accepted, as e is not x

Each chain starts from the whole model's memory of what comes before it and steps on the view's own entries,
as drafting does, so the drafts are, bit for bit, those of the loop (`tests/tuning/test_reading.py`). What
comes after a chain's first wrong token is not: a drafter goes on from its own token there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec._checks import check_integer
from specdec._host import MAX_SERIAL_NODES
from specdec._rows import take_rows
from specdec.cache import Steps
from specdec.models.base import SkippableLM, SkippingView
from specdec.tuning.similarity import Similar, most_similar, whole_layers


class Outcomes(NamedTuple):
    """What a view would draft at every place.

    Attributes:
        right: bool [T, W, K]: of T texts, W places each, whether draft 1, 2, ..., K is the target's token,
            were those before it right.
        confidence: float32 [T, W, K], the probability that the view gives the token that it would draft.
    """

    right: Tensor
    confidence: Tensor

    @staticmethod
    def joined(parts: Sequence[Outcomes]) -> Outcomes:
        """Those of all texts of several readings of the same number of places."""
        return Outcomes(torch.cat([p.right for p in parts]), torch.cat([p.confidence for p in parts]))


def places_of(continuation: int, depth: int) -> int:
    """How many places of a text's continuation of so many tokens a reading of this depth looks at."""
    block = _block(depth)
    return max(continuation - depth, 0) // block * block


class Reading:
    """Texts of a model, ready for passes of its views.

    Args:
        model: the target.
        texts: prompts and how the model goes on, greedily; all continuations are equally long.
        depth: drafts K at each place.

    Attributes:
        places: W of each text, the first `W` tokens of its continuation.
        texts: T, their number.

    Raises:
        ValueError: `depth` is not 1 to 31, or the continuations are not equally long or too short for it.
    """

    def __init__(
        self, model: SkippableLM, texts: Sequence[tuple[Sequence[int], Sequence[int]]], depth: int
    ) -> None:
        check_integer("depth", depth, 1, MAX_SERIAL_NODES // 2 - 1)
        lengths = {len(continuation) for _, continuation in texts}
        if len(lengths) != 1 or places_of(min(lengths), depth) < 1:
            wanted = _block(depth) + depth
            raise ValueError(
                f"texts: got continuations of {sorted(lengths)}, want one length from {wanted} on"
            )
        self.places = places_of(lengths.pop(), depth)
        self.depth = depth
        self._model = model
        self.texts = len(texts)
        # A row is a block of places: the tokens at all of them but the last are a prefix of the whole model.
        block = self._block = _block(depth)
        starts = [(p, c, at) for p, c in texts for at in range(0, self.places, block)]
        self._tokens = torch.tensor([list(c[at : at + block + depth]) for _, c, at in starts])
        self._slots = torch.arange(len(starts), dtype=torch.int32)
        self._cache = model.new_cache(len(starts))
        model.prefill([[*p, *c[:at]] for p, c, at in starts], cache=self._cache, slots=range(len(starts)))
        self._prefix: Steps | None = None
        if block > 1:
            _, round = model.forward(self._tokens[:, : block - 1], cache=self._cache, slots=self._slots)
            self._prefix = Steps()
            self._prefix.extend(round)

    @torch.inference_mode()
    def outcomes(self, view: SkippingView) -> Outcomes:
        """What a view of the model would draft."""
        block, depth = self._block, self.depth
        windows = self._tokens.unfold(1, depth + 1, 1)  # [R, block, depth + 1]
        chains, wanted = windows[..., :-1], windows[..., 1:]
        rows = len(self._tokens)
        logits, _ = view.forward(
            chains.reshape(rows, block * depth),
            cache=self._cache,
            slots=self._slots,
            parents=self._parents(depth),
            prefix=self._prefix,
        )
        best, token = logits.max(-1)  # [R, block * depth]
        confidence = (best - logits.logsumexp(-1)).exp()
        if view.vocabulary is not None:
            token = view.vocabulary[token]
        right = token.view_as(wanted) == wanted
        shape = (self.texts, self.places, depth)
        return Outcomes(right.reshape(shape), confidence.reshape(shape))

    def similar(self, most: int) -> list[Similar]:
        """The sets of up to `most` sub-layers that change the residual stream of these places least, by
        sub-layers and by whole layers.
        """
        functions = self._model.sub_layers(
            self._block,
            cache=self._cache,
            slots=self._slots,
            parents=self._parents(1),
            prefix=self._prefix,
        )
        x = take_rows(self._model.embeddings, self._tokens[:, : self._block])  # [R, block, D]
        return [*most_similar(functions, x, most)[1:], *whole_layers(functions, x, most)[1:]]

    def _parents(self, depth: int) -> Tensor:
        """int32 [R, block * depth]: a chain of `depth` nodes below each place of the prefix."""
        first = self._block - 1
        rows: list[int] = []
        for place in range(self._block):
            own = first + place * depth
            rows += [place - 1, *range(own, own + depth - 1)]
        return torch.tensor([rows] * len(self._tokens), dtype=torch.int32)


def _block(depth: int) -> int:
    """Places of a row: the most b for which b - 1 tokens of the text and b chains fit a round's nodes."""
    return int((MAX_SERIAL_NODES + 1) // (depth + 1))
