"""Checks a running loop against plain decoding: after every round the cache must be what the emitted text
alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch

from specdec.cache import DecodingCache
from specdec.loop import RoundObserver
from specdec.models.base import CausalLM
from specdec.sequence import ActiveSequence


class CacheAuditor(RoundObserver):
    """Compares every slot, after every round, with a shadow cache that decodes the emitted tokens one at a
    time.

    The comparison is bit for bit: state and convolution window, or keys and values, of every layer. It costs
    a second decoding, so it is for tests and for debugging a model or a drafter. What is pending is committed
    in a copy, so that the audited loop goes on taking it up in its next verification, whose result is checked
    then.

    Args:
        model: the target of the loop under audit.
        slots: its number of slots.

    Raises:
        AssertionError: from the loop, naming the slot, the layer and the largest difference.
    """

    def __init__(self, model: CausalLM, slots: int) -> None:
        self._model = model
        self._shadow = model.new_cache(slots)
        self._seen: dict[int, tuple[ActiveSequence, int]] = {}  # by slot: whose, tokens in the shadow
        self.rounds = 0

    def after_round(self, cache: DecodingCache, sequences: Sequence[ActiveSequence]) -> None:
        """Brings the shadow up to every emitted token but the last of each sequence, and compares."""
        self.rounds += 1
        cache = deepcopy(cache)
        for sequence in sequences:
            slot, tokens = sequence.slot, sequence.result.tokens
            seen, done = self._seen.get(slot, (None, 0))
            if seen is not sequence:
                self._model.prefill([sequence.request.prompt], cache=self._shadow, slots=[slot])
                done = 0
            row = torch.tensor([slot], dtype=torch.int32)
            for token in tokens[done:-1]:
                _, factors = self._model.forward(torch.tensor([[token]]), cache=self._shadow, slots=row)
                self._shadow.commit(factors, None, torch.ones(1, dtype=torch.int32))
            self._seen[slot] = (sequence, len(tokens) - 1)
            self._compare(slot, cache)

    def _compare(self, slot: int, cache: DecodingCache) -> None:
        pairs = zip(cache.snapshot(slot), self._shadow.snapshot(slot), strict=True)
        for layer, (memory, wanted) in enumerate(pairs):
            for name, want in wanted.items():
                got = memory[name]
                if torch.equal(got, want):
                    continue
                if got.shape != want.shape:
                    problem = f"got shape {list(got.shape)}, want {list(want.shape)} of plain decoding"
                else:
                    difference = float((got.float() - want.float()).abs().max())
                    problem = f"differs from plain decoding by up to {difference:.3g}"
                raise AssertionError(f"slot {slot}, layer {layer}: {name}: {problem}")
