"""One round of one sequence in Python: what the operators decide for a batch, on rows of any precision.

The proofs run it in float64; the loop runs it for `typical`, which has no operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specdec.acceptance.decisions import Decisions, Row
from specdec.acceptance.follow import walk_follow
from specdec.acceptance.history import TokenHistory
from specdec.acceptance.k_seq import walk_k_seq
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.processing import distribution, edited
from specdec.acceptance.proposal import ProposalLike
from specdec.acceptance.recursive import walk_recursive
from specdec.acceptance.rules import rule_for
from specdec.acceptance.traversal import walk_traversal
from specdec.acceptance.typical import Typical, walk_typical
from specdec.acceptance.walking import Rows, Verdict, path_to
from specdec.ops.acceptance import AcceptRule


class NoFiniteMaximumError(ValueError):
    """A row that a decision needs has a NaN or no finite maximum.

    Attributes:
        largest: the maximum that it has after its edits.
    """

    def __init__(self, node: int, largest: float) -> None:
        super().__init__(f"logits: the largest of node {node} is {largest} after edits, want a finite one")
        self.largest = largest


def decide_round(
    logits: Tensor,
    tokens: Sequence[int],
    proposal: ProposalLike,
    params: SamplingParams,
    history: TokenHistory | None,
    decide: Decisions,
    rule: str | Typical = "auto",
) -> Verdict:
    """Decide one sequence's round: which drafts are kept and which token follows.

    Args:
        logits: [N, V], any float dtype, the target's logits after each node; node 0 is the root token.
        tokens: [N] token of each node.
        proposal: the drafts that make up nodes 1..N-1 (its node j is node j + 1 here).
        params: the sequence's parameters, those its drafts were drawn with.
        history: what the sequence has seen, the root token included; needed where `params.contextual`.
        decide: the random outcomes.
        rule: a name in `rules.RULES`, or `Typical`.

    Raises:
        ValueError: shapes disagree, a token is outside the vocabulary, the rule is not exact for the
            proposal, or the history is missing.
        NoFiniteMaximumError: a row that the decision needs is no row of logits, or is none after its edits.
    """
    nodes = [int(t) for t in tokens]
    if logits.ndim != 2 or logits.shape[0] != len(nodes) or not nodes:
        raise ValueError(f"logits: got {tuple(logits.shape)}, want [N, V] for N = {len(nodes)} >= 1 tokens")
    vocab = logits.shape[1]
    for i, token in enumerate(nodes[1:]):
        if not 0 <= token < vocab:
            raise ValueError(f"draft {i}: got token {token}, want a token in [0, {vocab})")
    parents = [-1, *(int(j) + 1 for j in proposal.tree.parents)]
    if len(parents) != len(nodes):
        raise ValueError(f"tokens: got {len(nodes)}, want the root token and {len(parents) - 1} drafts")
    found = rule_for(rule, proposal, params.greedy)
    p_target = _target_rows(logits, nodes, parents, params, history)
    if isinstance(found, Typical):
        return walk_typical(p_target, nodes, parents, decide, found)
    if found is AcceptRule.FOLLOW:
        return walk_follow(p_target, nodes, parents, decide)
    return walk(found, p_target, _draft_rows(proposal, vocab), nodes, parents, decide)


def walk(
    rule: AcceptRule,
    p_target: Rows,
    p_draft: Rows,
    tokens: Sequence[int],
    parents: Sequence[int],
    decide: Decisions,
) -> Verdict:
    """The walk of a rule; arguments as the rules have them (`p_draft` is not asked by `FOLLOW`)."""
    if rule is AcceptRule.FOLLOW:
        return walk_follow(p_target, tokens, parents, decide)
    if rule is AcceptRule.K_SEQ:
        return walk_k_seq(p_target, p_draft, tokens, parents, decide)
    recursive = rule in (AcceptRule.RECURSIVE, AcceptRule.RECURSIVE_WITHOUT_REPLACEMENT)
    independent = rule in (AcceptRule.RECURSIVE, AcceptRule.TRAVERSAL)
    of_drawn = walk_recursive if recursive else walk_traversal
    return of_drawn(p_target, p_draft, tokens, parents, decide, replacement=independent)


def _target_rows(
    logits: Tensor,
    tokens: Sequence[int],
    parents: Sequence[int],
    params: SamplingParams,
    history: TokenHistory | None,
) -> Rows:
    """Target rows on demand: most walks end early. A row has the same bits made alone or with others."""
    made: dict[int, Row] = {}

    def row(node: int) -> Row:
        if node not in made:
            before = None
            if params.contextual and history is not None:  # which has the root token
                before = history.with_path([tokens[j] for j in path_to(node, parents)[1:]])
            row_logits = edited(logits[node], params, before)
            largest = float(row_logits.max())  # NaN where one of them is; an argmax would be some token
            if not math.isfinite(largest):
                raise NoFiniteMaximumError(node, largest)
            made[node] = np.asarray(distribution(row_logits, params).numpy())
        return made[node]

    return row


def _draft_rows(proposal: ProposalLike, vocab: int) -> Rows:
    drafts = len(proposal.tree.parents)
    rows = range(drafts) if proposal.rows is None else proposal.rows
    if proposal.draft_probs is None:
        raise ValueError(f"draft_probs: got None, want [R, {vocab}] for kind {proposal.kind.name}")
    p_draft = proposal.draft_probs.numpy()
    most = max(rows, default=-1)
    if p_draft.ndim != 2 or p_draft.shape[1] != vocab or len(rows) != drafts or most >= len(p_draft):
        raise ValueError(
            f"draft_probs: got {list(p_draft.shape)} and rows {list(rows)}, want [R, {vocab}] with "
            f"R > {most} and a row for each of {drafts} drafts"
        )
    return lambda node: np.asarray(p_draft[rows[node - 1]])
