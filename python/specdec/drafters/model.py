"""Any smaller model as drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec._rows import last_rows
from specdec.cache import DecodingCache, Round
from specdec.drafters.passes import DraftedNodes, EmittedTokens
from specdec.drafters.shape import TreeShape
from specdec.drafters.stepping import SteppingDrafter
from specdec.models.base import CausalLM


class ModelDrafter(SteppingDrafter):
    """Drafts chains and trees with a model of the target's vocabulary: by sampling where the request is
    sampled, else the likeliest tokens.

    Args:
        model: the drafter; its vocabulary must be the target's.
        slots: sequences at a time, as in the target's loop.
        branching: children of the last emitted token, of each of those, and so on; the last number goes on.
            (1,) drafts chains. Or a `TreeShape`, such as `TreeShape.pruned()`.
        drawn: the shape of drafts that are drawn at random; None: that of all others.
        replacement: whether siblings are drawn independently; False never repeats a sibling's token.
        draw: whether drafts of sampled requests are drawn at random; False proposes the likeliest tokens.
        vocabulary: [V'] the tokens that the columns of the model's logits stand for, ascending; None: all.
        cache: what it steps over; None: an own one.

    Raises:
        ValueError: `branching` is no such list.
    """

    name = "model"

    def __init__(
        self,
        model: CausalLM,
        *,
        slots: int = 1,
        branching: Sequence[int] | TreeShape = (1,),
        drawn: TreeShape | None = None,
        replacement: bool = False,
        draw: bool = True,
        vocabulary: NDArray[np.integer] | None = None,
        cache: DecodingCache | None = None,
    ) -> None:
        super().__init__(
            model,
            slots=slots,
            branching=branching,
            drawn=drawn,
            replacement=replacement,
            draw=draw,
            vocabulary=vocabulary,
            cache=cache,
        )
        self.model = model

    def run_prompt(self, slot: int, prompt: Sequence[int], features: Tensor | None) -> None:
        """Prefills the model's own state."""
        self.model.prefill([prompt], cache=self._cache, slots=[slot])

    def run_emitted(self, emitted: EmittedTokens) -> tuple[Tensor, Round]:
        """One forward pass over the committed state."""
        logits, round = self.model.forward(
            emitted.tokens, cache=self._cache, slots=emitted.slots, lengths=emitted.lengths
        )
        if emitted.tokens.shape[1] == 1:
            return logits[:, 0], round  # [B, V]
        return last_rows(logits, emitted.lengths), round

    def run_drafted(self, nodes: DraftedNodes) -> Tensor:
        """One forward pass over the nodes before."""
        logits, round = self.model.forward(
            nodes.tokens,
            cache=self._cache,
            slots=nodes.slots,
            parents=nodes.parents,
            lengths=nodes.lengths,
            prefix=nodes.prefix,
        )
        nodes.prefix.extend(round)
        if len(nodes.sizes) == 1:
            return logits[0]  # [R, V]
        return torch.cat([logits[row, :size] for row, size in enumerate(nodes.sizes)])
