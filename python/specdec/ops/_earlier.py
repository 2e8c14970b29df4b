"""The operands of rounds that came before: a pending path's, a prefix's."""

from __future__ import annotations

from torch import Tensor

from specdec.ops._operator import want_tensor, want_type
from specdec.ops.types import Factors, Pending, Prefix

PendingOperands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
PrefixOperands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

NO_PREFIX = (None, None, None, None)


def want_earlier(
    pending: Pending | None, pending_mixed: Tensor | None, prefix: Prefix | None, prefix_mixed: Tensor | None
) -> None:
    """Raises ValueError where raw projections come without the factors of their nodes."""
    if pending_mixed is not None and pending is None:
        raise ValueError("pending_mixed: got a tensor without pending, want both or none")
    if prefix_mixed is not None and prefix is None:
        raise ValueError("prefix_mixed: got a tensor without prefix, want both or none")


def pending_operands(pending: Pending, prefix: Prefix | None) -> PendingOperands:
    """k, u, g, path and path lengths of what is pending.

    Raises:
        ValueError: there is a prefix too.
        TypeError: `pending` or its factors are of another type.
    """
    want_type("pending", pending, Pending)
    want_type("pending.factors", pending.factors, Factors)
    if prefix is not None:
        raise ValueError(
            "prefix: got both pending and prefix, want one: a prefix starts at a committed state"
        )
    (k, u, g), path, path_lengths = pending
    return k, u, g, path, path_lengths


def prefix_operands(prefix: Prefix) -> PrefixOperands:
    """k, u, g and parents of a prefix.

    Raises:
        ValueError, TypeError: `prefix`, its factors or their k are missing or of another type.
    """
    want_type("prefix", prefix, Prefix)
    want_type("prefix.factors", prefix.factors, Factors)
    want_tensor("prefix.factors.k", prefix.factors.k)  # None would be no prefix to the operator
    (k, u, g), parents = prefix
    return k, u, g, parents
