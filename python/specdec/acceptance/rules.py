"""Which rule decides a round: the one asked for, if it is exact for how the drafts came about."""

from __future__ import annotations

from specdec._checks import shown
from specdec._rules import RULES
from specdec.acceptance.proposal import ProposalKind, ProposalLike
from specdec.acceptance.typical import Typical
from specdec.acceptance.walking import children_of
from specdec.ops.acceptance import AcceptRule


def check_rule(rule: str | Typical) -> str | Typical:
    """The rule asked for: the name of a lossless one, or the thresholds of the lossy one.

    Args:
        rule: a name in `RULES`, or `Typical` with thresholds of your own.

    Raises:
        ValueError: there is no such rule.

    >>> check_rule("block"), check_rule("typical")
    ('block', Typical(epsilon=0.09, delta=0.3))
    """
    if isinstance(rule, Typical):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"acceptance: got {shown(rule)}, want one of {', '.join(RULES)}")
    return rule if RULES[rule].lossless else Typical()


def follows(rule: str | Typical, kind: ProposalKind) -> bool:
    """Whether drafts of this kind are followed and not tested.

    Drafts that were not drawn are, under every lossless rule: with a one-hot q no rule accepts more, and
    following keeps the text of a seed that of plain decoding.

    Raises:
        ValueError: there is no such rule.
    """
    return kind is ProposalKind.DETERMINISTIC and not isinstance(check_rule(rule), Typical)


def resolve_rule(
    rule: str | Typical, kind: ProposalKind, *, chain: bool, shared: bool = True
) -> AcceptRule | Typical:
    """The rule that decides a proposal.

    Args:
        rule: as in `check_rule`.
        kind: of the proposal.
        chain: whether every draft follows the one before it, the first the root token.
        shared: whether siblings were drawn from one row.

    Raises:
        ValueError: no such rule, or it is not exact for such a proposal.

    >>> resolve_rule("auto", ProposalKind.IID, chain=True)
    <AcceptRule.TRAVERSAL: 4>
    >>> resolve_rule("block", ProposalKind.DETERMINISTIC, chain=False)
    <AcceptRule.FOLLOW: 0>
    """
    rule = check_rule(rule)
    if isinstance(rule, Typical):
        return rule
    if follows(rule, kind):
        return AcceptRule.FOLLOW
    if chain:
        # Nothing is drawn beside anything else, so that both kinds are one.
        of_chains = {"speculative": AcceptRule.RECURSIVE, "k-seq": AcceptRule.K_SEQ}
        return of_chains.get(rule, AcceptRule.TRAVERSAL)
    iid = kind is ProposalKind.IID
    if rule == "block":
        raise _inexact(rule, kind, "a chain; its rule on trees is traversal")
    if not iid and not shared:
        raise _inexact(rule, kind, "siblings that name one row, the one before any token was taken out of it")
    if rule == "k-seq":
        if not iid:
            raise _inexact(rule, kind, "siblings drawn independently")
        if not shared:
            raise _inexact(rule, kind, "siblings drawn from one row")
        return AcceptRule.K_SEQ
    if rule == "speculative":
        return AcceptRule.RECURSIVE if iid else AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT
    return AcceptRule.TRAVERSAL if iid else AcceptRule.TRAVERSAL_WITHOUT_REPLACEMENT


def _inexact(rule: str, kind: ProposalKind, want: str) -> ValueError:
    drawn = "drawn independently" if kind is ProposalKind.IID else "drawn without replacement"
    return ValueError(f"acceptance: {rule} is not exact for a tree {drawn}, want {want}")


def rule_for(rule: str | Typical, proposal: ProposalLike, greedy: bool = False) -> AcceptRule | Typical:
    """`resolve_rule` for a proposal.

    At temperature 0 (`greedy`) the target's row is one-hot and following is exact for all drafts under every
    lossless rule; of repeated siblings it takes those that lead deepest.

    Raises:
        ValueError: see `resolve_rule`.
    """
    rule = check_rule(rule)
    if follows(rule, proposal.kind) or (greedy and not isinstance(rule, Typical)):
        return AcceptRule.FOLLOW
    parents = [-1, *(int(p) + 1 for p in proposal.tree.parents)]
    chain = parents == list(range(-1, len(parents) - 1))
    rows = proposal.rows
    shared = chain or all(
        len(below) < 2 or (rows is not None and len({rows[c - 1] for c in below}) == 1)
        for below in children_of(parents)
    )
    return resolve_rule(rule, proposal.kind, chain=chain, shared=shared)
