"""Drafts that have passed a second, later exit before the target sees them (HiSpec, arXiv 2510.01336).

A round has rounds of its own. Layers [0, E) draft; layers [E, M) check the drafts, keep an accepted prefix
and add a token of their own; what came through is tentative, and drafting goes on below it. When there is
enough, the target runs the layers from M on over the hidden states that are there. Every tier takes up where
the one below ended, and the token that a tier added last, which none of its layers has seen, is run by the
next.

    layers 0-1   42 -> 8;  8 -> 9                                       N_d = 2 drafts
    layers 0-4   after 42 it says 8, after 8 it says 5: 8 and 5 are tentative, 9 is dropped everywhere
    layers 0-1   5 -> 3;  3 -> 3                                        the next inner round begins with 5
    layers 0-4   after 5 it says 3, after 3 it says 3, after 3 it says 7: 8 5 3 3 7 are tentative
    target       7 by layers 0-4, then 42 8 5 3 3 7 by layers 5-9

Where tokens are drawn, the exits are exact among themselves: what is tentative has the law p_i of the middle
exit, whatever the draft exit is, as a loop's tokens have the target's, and the target tests it against rows
of p_i (docs/lossless.md). Whether a further token is drafted depends on what came before it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer
from specdec._host import MAX_SERIAL_NODES
from specdec._rows import take_rows
from specdec._rules import RULES
from specdec.acceptance import ProposalKind, SequenceRows, edit_logits, rule_for
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.rng import round_seed
from specdec.acceptance.tensors import SamplingTensors, seed_bits
from specdec.cache import DecodingCache
from specdec.drafters.base import DraftRequest
from specdec.drafters.draws import joined_rows
from specdec.drafters.early_exit import EarlyExitDrafter, Row
from specdec.drafters.plan import Plan, Planner
from specdec.drafters.proposal import Proposal, ProposalBatch, batch_proposals
from specdec.drafters.shape import TreeShape
from specdec.drafters.stage import StageNodes, complete
from specdec.models.base import LayeredLM
from specdec.models.exit_adapter import ExitAdapters
from specdec.ops.acceptance import AcceptRule
from specdec.tree import TokenTree


class Checked(NamedTuple):
    """What the middle exit made of one row's drafts.

    Attributes:
        path: accepted nodes, the root's included.
        next_token: its own token after them; -1 where its logits are no numbers.
    """

    path: list[int]
    next_token: int


@dataclass
class _Tokens:
    """A row's tentative tokens.

    Attributes:
        limit: most of them.
        seed: of all that the row draws in this round.
        sampling: how the middle exit chooses.
        open: whether it drafts on.
        rows: of the middle exit's rows that each token was drawn from.
        unchecked: the drafts of a row of two tiers beside others of three.
    """

    limit: int
    seed: int
    sampling: SamplingParams
    open: bool = True
    rows: list[int] = field(default_factory=list)
    unchecked: Proposal | None = None


class HierarchicalDrafter(EarlyExitDrafter):
    """Drafts chains that have passed a middle exit of the target.

    Args:
        plan: how far to draft and to check; a plan without a middle exit drafts as `EarlyExitDrafter`.
        branching: of what the draft exit drafts between two checks; what comes out is a chain.
        acceptance: the rule by which the middle exit decides about drafts that were drawn, a name in
            `specdec.acceptance.RULES`; exact in any case.

    Other arguments and attributes are those of `EarlyExitDrafter`.

    Raises:
        ValueError: as there, or the rule is lossy.
    """

    name = "hierarchical"

    def __init__(
        self,
        model: LayeredLM,
        cache: DecodingCache,
        plan: Plan | Planner,
        *,
        branching: Sequence[int] | TreeShape = (1,),
        replacement: bool = False,
        draw: bool = True,
        adapters: ExitAdapters | None = None,
        int8: bool = False,
        acceptance: str = "auto",
    ) -> None:
        if acceptance not in RULES or not RULES[acceptance].lossless:
            raise ValueError(f"acceptance: got {acceptance!r}, want a lossless rule")
        self._rule = acceptance
        shape = branching if isinstance(branching, TreeShape) else TreeShape(branching)
        self._sizes = shape.levels(MAX_SERIAL_NODES)
        super().__init__(
            model,
            cache,
            plan,
            branching=shape,
            replacement=replacement,
            draw=draw,
            adapters=adapters,
            int8=int8,
        )

    def _check_plan(self, plan: Plan) -> None:
        check_integer("plan", plan.tentative + self._nodes(plan.length), 1, MAX_SERIAL_NODES - 2)

    @torch.inference_mode()
    def _draft(self, rows: Sequence[Row], plan: Plan) -> list[Proposal]:
        if not plan.middle:
            return super()._draft(rows, plan)
        begun = self._begun
        assert begun is not None
        told = [self._tokens(row) for row in rows]
        probs: list[Tensor] = []  # rows of the middle exit
        while any(t.open for t in told):
            requests = [self._inner(row, t) if t.open else None for row, t in zip(rows, told, strict=True)]
            drawn = self._grow(rows, requests, begun.stages[0], plan)
            self._check(rows, told, drawn, plan, probs)
            self.work.checks += 1
        every = joined_rows(probs)
        begun.nodes = [[*range(row.kept), *[-1] * (1 + len(row.before) - row.kept)] for row in rows]
        return [self._proposal(row, t, every) for row, t in zip(rows, told, strict=True)]

    def _tokens(self, row: Row) -> _Tokens:
        request, sampling = row.request, row.request.sampling
        return _Tokens(
            min(request.max_nodes, request.max_depth),
            round_seed(request.seed, request.position) if row.drawn else 0,
            sampling if row.drawn or sampling.greedy else replace(sampling, temperature=0.0),
        )

    def _nodes(self, length: int) -> int:
        """Nodes that the draft exit drafts to this depth."""
        return self._sizes[:length][-1] if length else 0

    def _inner(self, row: Row, told: _Tokens) -> DraftRequest:
        """What is asked of the draft exit. A check brings one token more than it accepts."""
        if not row.checked:
            return self._limited(row.request, row.length)
        taken = len(row.before)
        depth = max(min(row.length, told.limit - taken - 1), 0)
        return replace(
            row.request,
            max_nodes=self._nodes(depth),
            max_depth=depth,
            seed=told.seed,
            position=row.request.position + taken,
        )

    def _check(
        self,
        rows: Sequence[Row],
        told: Sequence[_Tokens],
        drawn: Tensor | None,
        plan: Plan,
        probs: list[Tensor],
    ) -> None:
        """Runs the middle exit over the trees of the rows that are open, and keeps what passes; all of rows
        of two tiers, for which the target's layers up to there have run then.
        """
        begun = self._begun
        assert begun is not None
        proposals, nodes = [], []
        for row in rows:
            if row.tree is None:
                proposals.append(Proposal.empty())
                nodes.append(StageNodes(row.kept, (), ()))
                continue
            proposal, order = row.tree.proposal(drawn, self.replacement)
            proposals.append(proposal)
            columns = [row.columns.get(node, -1) for node in (0, *order)]
            nodes.append(StageNodes(row.kept, columns, (-1, *(p + 1 for p in proposal.tree.parents))))
        batch = batch_proposals([row.root for row in rows], proposals)
        for place, row in enumerate(rows):
            if row.tree is None or not row.checked:
                batch.lengths[place] = 0
        low, middle = begun.stages
        x = complete(low, take_rows(self.model.embeddings, batch.tokens), nodes)  # [B, N, D]
        x = complete(middle, x, [row._replace(columns=[-1] * len(row.columns)) for row in nodes])
        logits = self._read(plan.middle, x)  # [B, N, V]
        checked = [
            found if row.checked else Checked(list(range(len(mine.columns))), -1)
            for found, row, mine in zip(
                self._decide(rows, told, proposals, batch, logits), rows, nodes, strict=True
            )
        ]
        kept = [
            [*range(row.kept), *(row.kept + node for node in found.path)]
            for row, found in zip(rows, checked, strict=True)
        ]
        for stage in begun.stages:
            stage.arrange(kept)
        self._take(rows, told, proposals, checked, logits, probs)

    def _decide(
        self,
        rows: Sequence[Row],
        told: Sequence[_Tokens],
        proposals: Sequence[Proposal],
        batch: ProposalBatch,
        logits: Tensor,
    ) -> list[Checked]:
        """Which drafts pass and which token follows them; logits [B, N, V] are edited in place."""
        if any(row.tree is not None and row.request.sampling.edited for row in rows):
            edit_logits(logits, [self._rows(row, p) for row, p in zip(rows, proposals, strict=True)])
        if not any(row.drawn for row in rows):
            found = ops.accept_greedy(logits, batch.tokens, parents=batch.parents, lengths=batch.lengths)
        else:
            rules = [AcceptRule.FOLLOW] * len(rows)
            for place, (row, proposal) in enumerate(zip(rows, proposals, strict=True)):
                if row.drawn and len(proposal.tree):
                    rule = rule_for(self._rule, proposal)
                    assert isinstance(rule, AcceptRule)
                    rules[place] = rule
            found = ops.accept_sampled(
                logits,
                batch.tokens,
                parents=batch.parents,
                lengths=batch.lengths,
                draft_probs=batch.draft_probs,
                draft_rows=batch.draft_rows,
                rules=torch.from_numpy(np.array(rules, np.int32)),
                seeds=seed_bits([t.seed for t in told]),
                positions=torch.tensor([row.request.position + len(row.before) for row in rows]),
                **SamplingTensors.of([t.sampling for t in told])._asdict(),
            )
        lengths, tokens = found.path_lengths.tolist(), found.next_token.tolist()
        return [
            Checked(path[:length], token)
            for path, length, token in zip(found.path.tolist(), lengths, tokens, strict=True)
        ]

    def _rows(self, row: Row, proposal: Proposal) -> SequenceRows | None:
        """What the edits of a row's logits depend on."""
        params = row.request.sampling
        if row.tree is None or not params.edited:
            return None
        paths = [tuple(row.before)]
        for token, parent in zip(proposal.tree.tokens, proposal.tree.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return SequenceRows(params, row.request.history, paths, self._ends)

    def _take(
        self,
        rows: Sequence[Row],
        told: Sequence[_Tokens],
        proposals: Sequence[Proposal],
        checked: Sequence[Checked],
        logits: Tensor,
        probs: list[Tensor],
    ) -> None:
        """Adds what passed to the rows' tokens, with the middle exit's rows where tokens are drawn."""
        known = sum(len(part) for part in probs)
        sources: list[Tensor] = []
        params: list[SamplingParams] = []
        for place, (row, t, proposal, found) in enumerate(zip(rows, told, proposals, checked, strict=True)):
            if row.tree is None:
                continue
            row.kept += len(found.path)
            if row.plan is None or not row.checked:
                t.open, t.unchecked = False, proposal
                continue
            tokens = [proposal.tree.tokens[node - 1] for node in found.path[1:]]
            ended = bool(tokens) and tokens[-1] in self._ends
            if not ended and found.next_token >= 0:
                tokens.append(found.next_token)
            else:
                t.open = False
            depth = 1 + max(proposal.tree.depths, default=-1)
            if depth:
                row.planner.accepted(
                    row.plan.exit, row.plan.middle, len(found.path) - 1, min(len(found.path), depth)
                )
            if len(row.before) + len(tokens) > t.limit:  # a row that may have no drafts at all
                del tokens[t.limit - len(row.before) :]
            for node in found.path[: len(tokens)] if row.drawn else ():
                t.rows.append(known + len(sources))
                sources.append(logits[place, node])
                params.append(t.sampling)
            row.before += tokens
            taken = len(row.before)
            if tokens:
                row.root = tokens[-1]
            enough = taken >= row.plan.tentative or taken + 2 > t.limit
            t.open = t.open and not enough and row.root not in self._ends
        if sources:
            probs.append(ops.sampling_probs(torch.stack(sources), **SamplingTensors.of(params)._asdict()))

    def _proposal(self, row: Row, told: _Tokens, probs: Tensor | None) -> Proposal:
        if told.unchecked is not None:
            return told.unchecked
        if not row.before:
            return Proposal.empty()
        tree = TokenTree.unchecked(tuple(row.before), None)
        if not row.drawn:
            return Proposal(tree, ProposalKind.DETERMINISTIC)
        kind = ProposalKind.IID if self.replacement else ProposalKind.WITHOUT_REPLACEMENT
        return Proposal(tree, kind, probs, tuple(told.rows))
