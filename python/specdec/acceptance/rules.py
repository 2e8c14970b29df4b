"""Which rule decides a round: the one asked for, if it is exact for how the drafts came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from specdec._checks import shown
from specdec.acceptance.decisions import children_of
from specdec.acceptance.typical import Typical
from specdec.ops.acceptance import AcceptRule


@dataclass(frozen=True)
class Rule:
    """An entry of `RULES`.

    Attributes:
        description: one line for a help text.
        lossless: whether the text keeps the target's law.
    """

    description: str
    lossless: bool = True


RULES: dict[str, Rule] = {
    "auto": Rule("traversal, on a chain block: keeps no less than speculative"),
    "speculative": Rule("drafts one by one, siblings by recursive rejection"),
    "k-seq": Rule("SpecTr: siblings drawn independently from one row, tested alike"),
    "block": Rule("block verification: a chain by its joint probabilities"),
    "traversal": Rule("traversal verification: a tree from its leaves up, a chain as block does"),
    "typical": Rule("LOSSY: drafts that the target finds typical (Medusa)", lossless=False),
}
"""The names that `resolve` takes."""

_KINDS = ("DETERMINISTIC", "IID", "WITHOUT_REPLACEMENT")


def resolve(rule: str | Typical, kind: str, chain: bool, shared: bool = True) -> AcceptRule | Typical:
    """The rule that decides a proposal.

    Deterministic proposals are followed whatever lossless rule is asked for: with a one-hot q no rule accepts
    more, and following keeps the text of a seed that of plain decoding.

    Args:
        rule: a name in `RULES`, or `Typical` with thresholds of your own.
        kind: name of the proposal's `ProposalKind`.
        chain: whether every draft follows the one before it, the first the root token.
        shared: whether siblings were drawn from one row.

    Raises:
        ValueError: no such rule or kind, or the rule is not exact for such a proposal.

    >>> resolve("auto", "IID", chain=True), resolve("block", "DETERMINISTIC", chain=False)
    (<AcceptRule.TRAVERSAL: 4>, <AcceptRule.FOLLOW: 0>)
    """
    if isinstance(rule, Typical):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"acceptance: got {shown(rule)}, want one of {', '.join(RULES)}")
    if kind not in _KINDS:
        raise ValueError(f"proposal.kind: got {shown(kind)}, want one of {', '.join(_KINDS)}")
    if rule == "typical":
        return Typical()
    if kind == "DETERMINISTIC":
        return AcceptRule.FOLLOW
    if chain:
        # Nothing is drawn beside anything else, so that both kinds are one.
        return {"speculative": AcceptRule.RECURSIVE, "k-seq": AcceptRule.K_SEQ}.get(
            rule, AcceptRule.TRAVERSAL
        )
    iid = kind == "IID"
    if rule == "block":
        raise _inexact(rule, kind, "a chain; its rule on trees is traversal")
    if not iid and not shared:
        raise _inexact(rule, kind, "siblings that name one row, the one before any token was taken out of it")
    if rule == "k-seq":
        if not iid:
            raise _inexact(rule, kind, "kind IID")
        if not shared:
            raise _inexact(rule, kind, "siblings drawn from one row")
        return AcceptRule.K_SEQ
    if rule == "speculative":
        return AcceptRule.RECURSIVE if iid else AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT
    return AcceptRule.TRAVERSAL if iid else AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT


def _inexact(rule: str, kind: str, want: str) -> ValueError:
    return ValueError(f"acceptance: {rule} is not exact for a tree of kind {kind}, want {want}")


class TreeLike(Protocol):
    """Drafts without the round's root token."""

    @property
    def parents(self) -> Any:
        """n ints, -1 for a child of the root token."""


class KindLike(Protocol):
    """A `ProposalKind`."""

    @property
    def name(self) -> str:
        """DETERMINISTIC, IID or WITHOUT_REPLACEMENT."""


class ProposalLike(Protocol):
    """What acceptance reads of a drafter's proposal."""

    @property
    def tree(self) -> TreeLike:
        """The drafts."""

    @property
    def kind(self) -> KindLike:
        """How their tokens came about."""

    @property
    def draft_probs(self) -> Tensor | None:
        """[R, V] processed rows that tokens were drawn from; None if DETERMINISTIC."""

    @property
    def rows(self) -> Sequence[int] | None:
        """[n] row of `draft_probs` that each draft was drawn from; None: draft i from row i."""


def rule_for(
    rule: str | Typical, proposal: ProposalLike | None, greedy: bool = False
) -> AcceptRule | Typical:
    """`resolve` for a proposal; None is a round without drafts.

    At temperature 0 (`greedy`) the target's row is one-hot and following is exact for all drafts; of repeated
    siblings it takes those that lead deepest.

    Raises:
        ValueError: see `resolve`.
    """
    if proposal is None:
        return resolve(rule, "DETERMINISTIC", chain=True)
    parents = [-1, *(int(p) + 1 for p in proposal.tree.parents)]
    chain = parents == list(range(-1, len(parents) - 1))
    rows = proposal.rows
    shared = chain or all(
        len(below) < 2 or (rows is not None and len({rows[c - 1] for c in below}) == 1)
        for below in children_of(parents)
    )
    found = resolve(rule, proposal.kind.name, chain, shared)
    return AcceptRule.FOLLOW if greedy and not isinstance(found, Typical) else found
