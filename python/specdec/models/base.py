"""What the loop asks of a model. Anything with these members can be a target or a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from specdec.cache import DecodingCache, PendingRound, Round, Steps
from specdec.models.features import Feature, FeatureTap
from specdec.models.skipping import SkipSet
from specdec.ops import DraftAdapter, DraftSampling, GrownTrees, PackedWeight, TreeRequest, TreeRules


class DraftModel(Protocol):
    """What a drafter steps: a `CausalLM`, or a model that reads another one's features."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens V of the target."""

    @property
    def num_parameters(self) -> int:
        """Number of weights that a decode step reads, so that models can be compared without a clock."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""

    def new_cache(self, slots: int) -> DecodingCache:
        """An empty cache for `slots` sequences."""


class CausalLM(DraftModel, Protocol):
    """A causal language model whose memory is a `DecodingCache`."""

    def feature_size(self, feature: Feature) -> int:
        """Numbers that a feature has for each token.

        Raises:
            ValueError: the model has no such layer, or it has no such feature.
        """

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        cache: DecodingCache,
        slots: Sequence[int],
        tap: FeatureTap | None = None,
    ) -> Tensor:
        """Reads whole prompts into empty slots.

        Args:
            prompts: token ids of each sequence; none may be empty.
            cache: written at `slots`.
            slots: one distinct slot a prompt.
            tap: collects features of all tokens, [B, T, F] with T the longest prompt; what it has beyond a
                shorter one means nothing.

        Returns:
            float32 [B, V]: the logits after each prompt's last token.
        """

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        prefix: Steps | None = None,
        tap: FeatureTap | None = None,
    ) -> tuple[Tensor, Round]:
        """Verifies a chain or a tree of tokens a sequence; the state changes only by what was pending.

        Args:
            tokens: int64 [B, N].
            cache: read at `slots`; a pending round is folded in.
            slots: int32 [B], negative for padding rows.
            parents: int32 [B, N], -1 for a root; None for chains.
            lengths: int32 [B] valid nodes a row; None for N.
            prefix: uncommitted nodes that these continue, with parents counted over both.
            tap: collects features of all nodes, [B, N, F].

        Returns:
            float32 [B, N, V] logits and the factors to commit.
        """


class GrowingLM(CausalLM, Protocol):
    """A model whose layers may draft in one call."""

    @property
    def num_layers(self) -> int:
        """Blocks, each of a token mixer and an MLP."""

    @property
    def embeddings(self) -> Tensor:
        """[V, D] the rows that tokens enter as."""

    def grow(
        self,
        logits: Tensor,
        requests: Sequence[TreeRequest],
        rules: TreeRules,
        *,
        outputs: Tensor,
        layers: range,
        cache: DecodingCache,
        prefix: Steps,
        head: PackedWeight | None = None,
        adapter: DraftAdapter | None = None,
        sampling: DraftSampling | None = None,
    ) -> GrownTrees | None:
        """Drafts with the first layers in one call, where the model has an operator for that; None: it is
        done level by level. The prefix stays as it is.

        Args:
            logits: float32 [B, V'] contiguous, after each row's last emitted token.
            requests: a row's each.
            rules: of all of them.
            outputs: [B, NP, D] contiguous, hidden states of the prefix's nodes after the last of the layers.
            layers: which ones; they begin with the first.
            cache: read at the slots of the prefix.
            prefix: uncommitted nodes that drafts continue, at least one.
            head: as for `readout`.
            adapter: of the exit behind these layers.
            sampling: how chains are drawn; None: the likeliest tokens.
        """


class LayeredLM(GrowingLM, Protocol):
    """A model whose layers can be run a few at a time."""

    @property
    def early_exit_layers(self) -> tuple[int, ...]:
        """Numbers of layers, ascending, after which norm and head were trained to predict too."""

    @property
    def head(self) -> PackedWeight:
        """[V, D] the output head."""

    def run_layers(
        self,
        x: Tensor,
        layers: range,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        lengths: Tensor | None = None,
        pending: PendingRound | None = None,
        prefix: Steps | None = None,
        tap: FeatureTap | None = None,
    ) -> tuple[Tensor, Round]:
        """Runs nodes through some consecutive layers. Run through all of them, in whatever spans and passes,
        a node has the bits that `forward` gives it.

        Args:
            x: [B, N, D] the nodes' hidden states after the layer before, or their embeddings.
            layers: which ones.
            cache: read at `slots`.
            slots, parents, lengths, tap: as for `forward`.
            pending: what `cache.take_pending(slots)` handed out, in the first pass of a round through these
                layers, whose states fold it in. None later, and where nothing was.
            prefix: uncommitted nodes that these continue, which have been through these layers.

        Returns:
            The hidden states after the last of the layers, [B, N, D], and a round with None for all others.
        """

    def readout(self, x: Tensor, head: PackedWeight | None = None) -> Tensor:
        """Logits float32 [..., V] of hidden states [..., D], through the final norm and the head.

        Args:
            x: of any layer.
            head: instead of the model's, such as a copy of it that is read faster.
        """


class SkippingView(GrowingLM, Protocol):
    """A model that steps over another one's cache, some of that one's sub-layers left out."""

    @property
    def vocabulary(self) -> Tensor | None:
        """int64 [V'] the tokens that the columns of its logits stand for, ascending; None: all."""

    def skipping(self, skips: SkipSet) -> SkippingView:
        """The view that leaves out these sub-layers instead, of the same vocabulary."""


class SkippableLM(CausalLM, Protocol):
    """A model that can draft for itself."""

    @property
    def source(self) -> Path | None:
        """Where the weights came from, for `checkpoint.weights_sha256`; None where from no file."""

    @property
    def num_layers(self) -> int:
        """Blocks, each of a token mixer and an MLP."""

    def skipping(
        self, skips: SkipSet, vocabulary: Sequence[int] | None = None, *, int8: bool = False
    ) -> SkippingView:
        """A view of this model that leaves sub-layers out. The weights are shared, unless they are `int8`.

        It reads this model's caches: layers have the numbers that they have here, and a skipped mixer leaves
        nothing in a `Round`, so what the view makes can be a prefix of its own next passes but is not for
        committing. What is pending in the layers that it reads is committed before it runs, and waits in the
        others. Prompts are read by all sub-layers: the view drafts from the memory of the whole model.

        Args:
            skips: what is left out, of this model's layers.
            vocabulary: the only tokens that it has logits for, ascending; None: all.
            int8: whether its matrices are int8 copies, which are made with the first such view and kept; a
                view of a view with such matrices has them too.

        Raises:
            ValueError: `skips` names a layer that is not there, `vocabulary` is none, or is given to a view
                that has one already.
        """

    @property
    def embeddings(self) -> Tensor:
        """[V, D] the rows that tokens enter as."""

    def sub_layers(
        self,
        nodes: int,
        *,
        cache: DecodingCache,
        slots: Tensor,
        parents: Tensor | None = None,
        prefix: Steps | None = None,
    ) -> list[Callable[[Tensor], Tensor]]:
        """Each sub-layer as a function of the residual stream [B, N, D], which it returns with its own part
        added: the mixer of layer 0, its MLP, the mixer of layer 1, and so on.

        Args:
            nodes: N.
            cache: read at `slots`, nothing is written but what was pending.
            slots: int32 [B].
            parents, prefix: as of `forward`; tokens before these are those of the whole model.
        """
