"""What a drafter with a state of its own is given to run."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec.cache import Steps


class EmittedTokens(NamedTuple):
    """Emitted tokens to run over the committed state, which continue each row's text.

    Attributes:
        tokens: int64 [B, N], 0 beyond a row's size.
        lengths: int32 [B], tokens of each row, at least 1.
        sizes: the same as a list.
        slots: int32 [B].
        features: for each row float [n, F], the target's after the token before each of these; None where the
            drafter takes no features.
    """

    tokens: Tensor
    lengths: Tensor
    sizes: list[int]
    slots: Tensor
    features: list[Tensor] | None


class DraftedNodes(NamedTuple):
    """Drafted nodes to run over the nodes that were run before them in this round.

    Attributes:
        tokens: int64 [B, N], 0 beyond a row's size.
        lengths: int32 [B], nodes of each row; 0: the row takes no part; None where every row has N.
        sizes: the same as a list.
        slots: int32 [B].
        parents: int32 [B, N], the nodes' parents among those of `prefix`, as `forward` takes them; None where
            every row goes on where the prefix ended.
        prefix: the nodes run before.
    """

    tokens: Tensor
    lengths: Tensor | None
    sizes: list[int]
    slots: Tensor
    parents: Tensor | None
    prefix: Steps
