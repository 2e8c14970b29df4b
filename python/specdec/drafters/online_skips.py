"""Choosing what drafts leave out while a model decodes, from what it wrote just now.

The idea is SWIFT's (arXiv 2410.06916): the best set is a matter of the text, and the text that was verified
last says for free what a set would have drafted. A reading feeds a view the last tokens from the memory that
the target had before them and counts how often its likeliest token is the one that came:

    memory        the target's before a           verified   a b c d
    reading       what the view makes of a b c               b x d      2 of 3 right

A set is worth what a round with it brings, E(a, n) / (1 + NODE_COST n + c n) at the best length n, with a
the share that was right and c the weights that it reads over the target's. One challenger at a time is read
beside the set in use, on the same tokens, until the difference is beyond chance or is not worth more
readings. Challengers differ in a sub-layer or in a layer; where drafting with the whole model would do as
well, they come from the similarity of the residual stream (`specdec.tuning.similarity`).

Which set drafts changes no text: it is verified as ever. The time of all this is a share of the decoding time
and no more: a reading waits until it is affordable.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec._checks import check_number
from specdec.budget import NODE_COST, expected_tokens
from specdec.cache import DecodingCache
from specdec.drafters.base import DraftRequest
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.proposal import Proposal
from specdec.models.base import SkippableLM, SkippingView
from specdec.models.features import NodeFeatures
from specdec.models.skipping import SkipSet
from specdec.tuning.similarity import whole_layers

SHARE = 0.03
WINDOW = 16  # tokens of a reading, which starts from the memory before the first of them
LONGEST = 12  # draft whose worth is looked at
SURE = 1.5  # standard deviations of the difference that count as beyond chance
FIRST_PRICE = 3.0  # of a round, for a reading, before there was one
MOST_READ = 192  # tokens that a challenger is read on; what is not better by then is not much better
SIMILAR_TOKENS = 8  # of the residual stream that similarity is measured on
SIMILAR_SIZES = (0.3, 0.45, 0.6)  # of the layers, of the sets that similarity proposes


@dataclass
class Refinement:
    """What was done for the set.

    Attributes:
        seconds: that it took.
        decode_seconds: of decoding meanwhile, without it.
        readings: passes over verified tokens.
        challengers: sets that were tried.
        switches: how often one of them was better.
    """

    seconds: float = 0.0
    decode_seconds: float = 0.0
    readings: int = 0
    challengers: int = 0
    switches: int = 0

    @property
    def share(self) -> float:
        """Of the decoding time."""
        return self.seconds / self.decode_seconds if self.decode_seconds > 0.0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """As the command line prints it with --json."""
        return {**asdict(self), "share": self.share}


@dataclass
class _Window:
    """Verified tokens of a slot and the target's memory before the first of them."""

    slot: int
    memory: DecodingCache
    tokens: list[int]

    @property
    def whole(self) -> bool:
        """Whether there is a token after each that is read."""
        return len(self.tokens) > WINDOW


@dataclass
class _Trial:
    """A challenger beside the set in use, on the same tokens."""

    view: SkippingView
    skips: SkipSet
    read: int = 0
    right: int = 0  # of the set in use
    ahead: int = 0  # tokens that the challenger alone had right, less those that it alone had wrong
    apart: int = 0  # tokens where just one was right


def worth(chance: float, cost: float) -> float:
    """Tokens in the time of a plain round, of rounds that draft the best number of tokens, at least one.

    Args:
        chance: of a drafted token, given that those before it were right.
        cost: of drafting one, in plain rounds.
    """
    chance = min(max(chance, 0.0), 1.0)
    return max(expected_tokens(chance, n) / (1.0 + (NODE_COST + cost) * n) for n in range(1, LONGEST + 1))


class OnlineSkipDrafter(LayerSkipDrafter):
    """A `LayerSkipDrafter` that changes its set while it drafts.

    It proposes the likeliest tokens to sampled requests too: which set drafts depends on the clock, so a
    drawn draft would not repeat with its seed, while the text of a seed is that of plain sampling so.

    Args:
        model: the target.
        skips: the set to begin with.
        cache: the target's, that of the loop.
        vocabulary: the only tokens that are drafted, ascending; None: all.
        int8: whether it drafts with int8 copies of the target's matrices.
        share: of the decoding time, for choosing.
        options: further arguments of `LayerSkipDrafter`; `draw` is False.

    Attributes:
        skips: the set in use.
        view: the target without it.
        refinement: what was done for it.

    Raises:
        ValueError: `share` is negative, or as `LayerSkipDrafter`.
    """

    name = "layer-skip online"

    def __init__(
        self,
        model: SkippableLM,
        skips: SkipSet,
        cache: DecodingCache,
        *,
        vocabulary: Sequence[int] | None = None,
        int8: bool = False,
        share: float = SHARE,
        **options: Any,
    ) -> None:
        self.view = model.skipping(skips, vocabulary, int8=int8)
        super().__init__(self.view, cache, draw=False, **options)
        check_number("share", share, 0.0, math.inf)
        self.skips = skips
        self.refinement = Refinement()
        self._target = model
        self._share = share
        self._random = random.Random(0)
        self._last = 0.0  # when decoding was last looked at
        self._second_price = 0.0  # seconds of a reading for each weight of its view
        self._window: _Window | None = None
        self._trial: _Trial | None = None
        self._queue: list[SkipSet] = []
        self._rounds = 0
        self._poor = self._cost(self.view) >= 1.0
        self._asked = False  # whether similarity was

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """See `LayerSkipDrafter`."""
        super().begin(slot, prompt, features)
        self._last = perf_counter()

    def end(self, slot: int) -> None:
        """See `LayerSkipDrafter`."""
        super().end(slot)
        if self._window is not None and self._window.slot == slot:
            self._window = None  # its keys and values are overwritten by the next sequence

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """See `LayerSkipDrafter`; nothing from a view that reads as much as the target, so drafts as dearly
        as it decodes.
        """
        if self._cost(self.view) >= 1.0:
            return [Proposal.empty()] * len(requests)
        return super().propose(requests)

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """Learns what the target accepted, and refines the set where there is time for it."""
        super().observe(slot, path, tokens, features)
        now = perf_counter()
        self.refinement.decode_seconds += now - self._last
        self._rounds += 1
        self._refine(slot, tokens)
        self._last = perf_counter()
        self.refinement.seconds += self._last - now

    # --- refining ---

    def _refine(self, slot: int, tokens: Sequence[int]) -> None:
        window = self._window
        if window is None:
            if self._affords(self._price(self.view)):
                # The last emitted token is not in the memory yet: it is the first that a view is fed.
                self._window = _Window(slot, self.cache.frozen(slot), [tokens[-1]])
            return
        if window.slot == slot and not window.whole:
            window.tokens += tokens[: WINDOW + 1 - len(window.tokens)]
        if not window.whole:
            return
        if self._poor and not self._asked:
            # A pass of so many tokens through half of the layers for each layer.
            passes = 0.5 * self._target.num_layers * SIMILAR_TOKENS / WINDOW
            if self._affords(passes * self._price(self._target)):
                self._ask_similarity(window)
                self._window = None
            return
        trial = self._trial
        if trial is None:
            trial = self._trial = self._challenge()
        if self._affords(self._price(self.view) + self._price(trial.view)):
            self._read_both(window, trial)
            self._window = None

    def _affords(self, seconds: float) -> bool:
        """Whether so much more time is within the share."""
        told = self.refinement
        return told.seconds + seconds <= self._share * told.decode_seconds

    def _price(self, view: SkippingView | SkippableLM) -> float:
        """Seconds of a reading, about: they go with the weights that it reads."""
        rate = self._second_price
        if rate == 0.0:
            told = self.refinement.decode_seconds / max(self._rounds, 1)
            rate = FIRST_PRICE * told / self._target.num_parameters
        return rate * view.num_parameters

    def _read_both(self, window: _Window, trial: _Trial) -> None:
        """Reads a window with both sets; ends the trial where it is decided."""
        start = perf_counter()
        mine, other = self._right(window, self.view), self._right(window, trial.view)
        weights = self.view.num_parameters + trial.view.num_parameters
        self._second_price = max(perf_counter() - start, 1e-9) / weights
        trial.read += len(mine)
        trial.right += sum(mine)
        trial.ahead += sum(other) - sum(mine)
        trial.apart += sum(a != b for a, b in zip(mine, other, strict=True))
        chance, deviation = trial.right / trial.read, SURE * math.sqrt(trial.apart + 1)
        now = worth(chance, self._cost(self.view))
        least, most = (
            worth(chance + (trial.ahead + sign * deviation) / trial.read, self._cost(trial.view))
            for sign in (-1.0, 1.0)
        )
        if least > now:
            self._switch(trial)
        elif most <= now or trial.read >= MOST_READ:
            self._trial = None
        self._poor = now <= worth(1.0, 1.0)  # drafting with the whole model would do as well

    def _right(self, window: _Window, view: SkippingView) -> list[bool]:
        """Of the tokens after each of the window's first ones, which a view has as its likeliest."""
        read = torch.tensor([window.tokens[:WINDOW]])
        logits, _ = view.forward(read, cache=window.memory, slots=torch.zeros(1, dtype=torch.int32))
        found = logits[0].argmax(-1)  # [WINDOW]
        if view.vocabulary is not None:
            found = view.vocabulary[found]
        self.refinement.readings += 1
        return [a == b for a, b in zip(found.tolist(), window.tokens[1:], strict=True)]

    def _cost(self, view: SkippingView) -> float:
        return view.num_parameters / self._target.num_parameters

    def _challenge(self) -> _Trial:
        """The next challenger: what similarity proposed, then neighbours of the set in use, in any order."""
        if not self._queue:
            self._queue = neighbours(self.skips, self._target.num_layers)
            self._random.shuffle(self._queue)
        skips = self._queue.pop()
        self.refinement.challengers += 1
        return _Trial(self.view.skipping(skips), skips)

    def _switch(self, trial: _Trial) -> None:
        """Drafts with the challenger from now on. What is known of drafts stays: it is learned on."""
        self.skips, self._trial, self._queue = trial.skips, None, []
        self.view = self.model = self.stepped = trial.view
        self._num_parameters = trial.view.num_parameters
        self.refinement.switches += 1

    def _ask_similarity(self, window: _Window) -> None:
        """Puts sets of whole layers that hardly change the residual stream in the queue."""
        tokens, slots = torch.tensor([window.tokens[:SIMILAR_TOKENS]]), torch.zeros(1, dtype=torch.int32)
        parts = self._target.sub_layers(SIMILAR_TOKENS, cache=window.memory, slots=slots)
        layers = self._target.num_layers
        sizes = [max(1, round(size * layers)) for size in SIMILAR_SIZES]
        found = whole_layers(parts, self._target.embeddings[tokens], 2 * max(sizes))
        self._queue = [found[size].skips for size in dict.fromkeys(sizes) if found[size].skips != self.skips]
        self._trial, self._asked = None, True


def neighbours(skips: SkipSet, layers: int) -> list[SkipSet]:
    """The sets that differ in one sub-layer, or in one layer whose two sub-layers are both in or both out."""
    found = []
    for i in range(layers):
        mixers, mlps = skips.mixers ^ {i}, skips.mlps ^ {i}
        found += [SkipSet(mixers, skips.mlps), SkipSet(skips.mixers, mlps)]
        if (i in skips.mixers) == (i in skips.mlps):
            found.append(SkipSet(mixers, mlps))
    return found
