"""The adapted drafter: one recurrent block that reads the target's features and keeps a state of its own.

Its state holds emitted tokens alone, each run with the target's true features. Drafted tokens have no such
features yet and run on the drafter's own outputs, over the frozen state; what the target accepts of them is
run again once it has shown its features. So the state is a function of the text, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec._rows import last_rows
from specdec.cache import Round
from specdec.drafters.passes import DraftedNodes, EmittedTokens
from specdec.drafters.shape import TreeShape
from specdec.drafters.stepping import SteppingDrafter
from specdec.models.recurrent_drafter import RecurrentDrafterModel
from specdec.ops import DraftSampling, GrownTrees, TreeRequest, TreeRules


class RecurrentDrafter(SteppingDrafter):
    """Drafts chains and trees from the target's features.

    Args:
        model: the drafter, made for the target of the loop.
        slots: sequences at a time, as in the target's loop.
        branching: children of the last emitted token, of each of those, and so on; the last number goes on.
            (1,) drafts chains. Or a `TreeShape`, such as `TreeShape.pruned()`.
        drawn: the shape of drafts that are drawn at random; None: that of all others.
        replacement: whether siblings are drawn independently; False never repeats a sibling's token.
        draw: whether drafts of sampled requests are drawn at random; False proposes the likeliest tokens.

    Raises:
        ValueError: `branching` is no such list.
    """

    name = "adapted"
    rereads_accepted = True

    def __init__(
        self,
        model: RecurrentDrafterModel,
        *,
        slots: int = 1,
        branching: Sequence[int] | TreeShape = (1,),
        drawn: TreeShape | None = None,
        replacement: bool = False,
        draw: bool = True,
    ) -> None:
        super().__init__(
            model,
            slots=slots,
            branching=branching,
            drawn=drawn,
            replacement=replacement,
            draw=draw,
            vocabulary=None if model.vocabulary is None else model.vocabulary.numpy(),
        )
        self.model = model
        self.features = model.features
        self._outputs = torch.empty(0)  # [B, N, D] of the round's nodes so far

    @torch.inference_mode()
    def run_prompt(self, slot: int, prompt: Sequence[int], features: Tensor | None) -> None:
        """Prefills with every token but the first, before which the target has shown nothing."""
        self.model.prefill(
            torch.tensor([prompt[1:]], dtype=torch.int64),
            None if features is None else features[None, :-1],
            cache=self._cache,
            slots=[slot],
            lengths=[len(prompt) - 1],
        )

    @torch.inference_mode()
    def run_emitted(self, emitted: EmittedTokens) -> tuple[Tensor, Round]:
        """One pass with the target's features."""
        h, round = self.model.forward(
            emitted.tokens,
            features=None if emitted.features is None else _padded(emitted.features),
            cache=self._cache,
            slots=emitted.slots,
            lengths=emitted.lengths,
        )
        self._outputs = h
        last = h[:, -1] if len(emitted.sizes) == 1 else last_rows(h, emitted.lengths)
        return self.model.logits(last), round

    @torch.inference_mode()
    def run_drafted(self, nodes: DraftedNodes) -> Tensor:
        """One pass with the drafter's own outputs at the nodes' parents."""
        logits, self._outputs = self.model.step(
            nodes.tokens,
            self._outputs,
            cache=self._cache,
            slots=nodes.slots,
            parents=nodes.parents,
            lengths=nodes.lengths,
            prefix=nodes.prefix,
        )
        return logits

    @torch.inference_mode()
    def run_trees(
        self,
        logits: Tensor,
        requests: Sequence[TreeRequest],
        rules: TreeRules,
        sampling: DraftSampling | None,
    ) -> GrownTrees:
        """One call for all levels."""
        round = self._steps.round
        assert round is not None
        return self.model.grow(
            logits,
            self._outputs,
            requests,
            rules,
            cache=self._cache,
            slots=round.slots,
            prefix=self._steps,
            sampling=sampling,
        )


def _padded(features: list[Tensor]) -> Tensor:
    """[n, F] of each row as one tensor [B, N, F], zero beyond a row's size."""
    if len(features) == 1:
        return features[0][None]
    return torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
