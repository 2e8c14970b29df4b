"""Drafting with the target itself, some of its sub-layers skipped (self-speculative decoding).

The view drafts from the target's own memory: what it makes of a draft is a prefix of its next passes and is
dropped when the draft ends, as skipping in the middle changes all that comes after it. So there is nothing to
prefill, to commit or to bring up to date, and the target's memory is the same bits before and after a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdec._checks import check_integer
from specdec.cache import DecodingCache, Steps
from specdec.drafters.base import DraftRequest
from specdec.drafters.draft_exit import DraftExit, Threshold
from specdec.drafters.draws import Children, Parent, probabilities_of
from specdec.drafters.experience import experience_of
from specdec.drafters.model import ModelDrafter
from specdec.drafters.proposal import Proposal
from specdec.drafters.shape import TreeShape
from specdec.drafters.tree import GrowingTree
from specdec.models.base import SkippingView
from specdec.models.features import NodeFeatures
from specdec.ops import DraftSampling, GrownTrees, TreeRequest, TreeRules
from specdec.tree import MAX_NODES


class LayerSkipDrafter(ModelDrafter):
    """Drafts chains and trees with a view of the target.

    Args:
        view: the target with sub-layers left out, `model.skipping(...)`.
        cache: the target's, that of the loop.
        exit: when a draft ends; None: where going on would not be worth its time. A node of a tree gets no
            children where a chain would end. The loop verifies all that is drafted by an exit
            (`DraftBudget(whole=True)`).
        branching: children of the last emitted token, of each of those, and so on; the last number goes on.
            (1,) drafts chains. Or a `TreeShape`, such as `TreeShape.pruned()`.
        widen: most children of the node at which a chain ends by its exit: where the drafter is not sure, its
            next guesses come along. Needs an `exit` and a chain; drawn drafts are widened only without
            replacement, as a rule for independent siblings knows of their number.
        drawn: the shape of drafts that are drawn at random; None: that of all others.
        replacement: whether siblings are drawn independently; False never repeats a sibling's token.
        draw: whether drafts of sampled requests are drawn at random; False proposes the likeliest tokens.

    Attributes:
        view: as given; it may be exchanged between rounds.

    Raises:
        ValueError: `branching` is no such list, or `widen` not up to this.
    """

    name = "layer-skip"

    def __init__(
        self,
        view: SkippingView,
        cache: DecodingCache,
        *,
        exit: DraftExit | None = None,
        branching: Sequence[int] | TreeShape = (1,),
        widen: int = 1,
        drawn: TreeShape | None = None,
        replacement: bool = False,
        draw: bool = True,
    ) -> None:
        super().__init__(
            view,
            branching=branching,
            drawn=drawn,
            replacement=replacement,
            draw=draw,
            vocabulary=None if view.vocabulary is None else view.vocabulary.numpy(),
            cache=cache,
        )
        check_integer("widen", widen, 1, MAX_NODES)
        if widen > 1 and (exit is None or not self.shape.is_chain):
            raise ValueError(f"widen: got {widen}, want 1 for a draft without an exit and for trees")
        learned = experience_of(view, self.shape, exit, widen)  # what pays is another matter with each exit
        self._learned, self.calibration, self._worth = learned, learned.calibration, learned.worth
        # What rounds bring is kept by this name, and is another matter with each view, shape and exit.
        told = [f"{view.num_parameters} weights", str(self.shape), str(exit), f"widen {widen}"]
        self.name = f"{self.name} ({', '.join(told)})"
        self.exit = exit
        self.view = view
        self._widen = widen
        self._thresholds: dict[int, Threshold] = {}
        self._drafted: dict[int, tuple[int, int]] = {}  # by slot, until decided: longest path, most allowed
        self._confidences: list[list[float]] = []  # of the last level, by parent

    @property
    def cache(self) -> DecodingCache:
        """The target's memory, which the loop must have."""
        return self._cache

    @property
    def ends_drafts(self) -> bool:
        """Whether it says itself where a draft ends, so that prices do not."""
        return self.exit is not None

    def threshold(self, slot: int) -> float:
        """Below a token whose confidence is less, this sequence drafts nothing more; 0 without an exit."""
        return self._thresholds[slot].value if slot in self._thresholds else 0.0

    # --- what the loop asks ---

    def levels(self, max_nodes: int) -> Sequence[int]:
        """Nodes of a proposal that is 1, 2, ... tokens deep."""
        return [min(n + self._widen - 1, max_nodes) for n in self.shape.levels(max_nodes)]

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """The target has read the prompt: nothing is left to do.

        Raises:
            ValueError: the cache was made for fewer slots.
        """
        super().begin(slot, prompt, features)
        if self.exit is not None:
            self._thresholds[slot] = self.exit.begin()

    def run_prompt(self, slot: int, prompt: Sequence[int], features: Tensor | None) -> None:
        """Nothing: it is in the target's memory."""

    def end(self, slot: int) -> None:
        """Forgets the sequence."""
        super().end(slot)
        self._thresholds.pop(slot, None)
        self._drafted.pop(slot, None)

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """Learns from what the target accepted. All tokens but the last are in its memory."""
        drafted, most = self._drafted.pop(slot, (0, 0))
        if drafted and self.exit is not None:
            self._thresholds[slot].observe(drafted, len(path), most)
        super().observe(slot, path, tokens, features)
        state = self._slots[slot]
        state.unseen, state.committed = [tokens[-1]], []

    def draft(self, rows: Sequence[DraftRequest]) -> tuple[list[Proposal], float]:
        """See `SteppingDrafter.draft`."""
        proposals, seconds = super().draft(rows)
        for row, proposal in zip(rows, proposals, strict=True):
            depth = 1 + max(proposal.tree.depths, default=-1)
            self._drafted[row.slot] = depth, min(row.max_depth, row.max_nodes)
        return proposals, seconds

    # --- state ---

    def _settle(self, defer_for: Sequence[int] | None = None) -> None:
        """Drops what the last draft made."""
        self._steps = Steps()

    def _catch_up(self, rows: Sequence[DraftRequest]) -> None:
        """Nothing: the last emitted token alone is not in the target's memory."""

    # --- drafting ---

    @torch.inference_mode()
    def run_trees(
        self,
        logits: Tensor,
        requests: Sequence[TreeRequest],
        rules: TreeRules,
        sampling: DraftSampling | None,
    ) -> GrownTrees | None:
        """One call for all levels, where the view can and no chain is widened."""
        if self._widen > 1:
            return None
        view = self.view
        return view.grow(
            logits,
            requests,
            rules,
            # Their values mean nothing: a token enters by its embedding alone.
            outputs=view.embeddings.new_zeros(len(requests), len(self._steps), view.embeddings.shape[1]),
            layers=range(view.num_layers),
            cache=self._cache,
            prefix=self._steps,
            sampling=sampling,
        )

    # --- exits ---

    def _at_once(self, tree: GrowingTree, root: int) -> TreeRequest:
        asked = super()._at_once(tree, root)
        if self.exit is None:
            return asked
        return asked._replace(node_price=None, threshold=self.threshold(tree.request.slot))

    def _children(self, logits: Tensor, parents: Sequence[Parent]) -> Children:
        if self.exit is None:
            return super()._children(logits, parents)
        asked = [self._widened(p) for p in parents] if self._widen > 1 else parents
        # Logits are edited in place; without edits a greedy request's probabilities are the confidences.
        edited = any(p.request.sampling.edited or not p.request.sampling.greedy for p in parents)
        raw = logits.clone() if edited else None
        children = super()._children(logits, asked)
        self._confidences = children.probabilities
        if raw is not None:
            self._confidences = probabilities_of(raw, children.tokens, self._vocabulary)
        if self._widen > 1:
            for i, parent in enumerate(parents):
                first = self._confidences[i][:1]
                if first and first[0] >= self.threshold(parent.request.slot):  # it comes without siblings
                    for found in (children.tokens, children.probabilities, self._confidences):
                        del found[i][1:]
        return children

    def _widened(self, parent: Parent) -> Parent:
        """The parent with as many children as a chain can end with; its number is its depth."""
        request = parent.request
        if self.replacement and self._draws_for(request):
            return parent
        return parent._replace(children=min(self._widen, request.max_nodes - parent.node))

    def _paying(self, trees: Sequence[GrowingTree], seconds: float) -> list[list[int]]:
        if self.exit is None:
            return super()._paying(trees, seconds)
        confidences = self._level_confidences()
        for tree in trees:
            if tree.depth == 0:
                continue  # the last emitted token is no draft
            threshold = self.threshold(tree.request.slot)
            sure = {node: next(confidences) >= threshold for node in tree.level}
            if self._widen > 1 and len(sure) > 1:  # the siblings that a chain ends with
                sure = dict.fromkeys(sure, False)
            tree.close([node for node, good in sure.items() if not good])
        return [tree.expandable() for tree in trees]

    def _level_confidences(self) -> Iterator[float]:
        """Of the last level's nodes, one tree's after the other's, as they were grown."""
        return (confidence for found in self._confidences for confidence in found)

    def _gain(self, proposal: Proposal, price: float) -> float:
        if self.exit is None:
            return super()._gain(proposal, price)
        return sum(proposal.chances or ()) - price * len(proposal.tree)  # all of it will be verified
