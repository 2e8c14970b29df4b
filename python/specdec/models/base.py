"""What the loop asks of a model. Anything with these members can be a target or a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.cache import DecodingCache, Round, Steps
from specdec.models.features import Feature, FeatureTap


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
