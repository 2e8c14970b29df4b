"""Drafting with the first layers of the target, which verification then takes up where they ended.

The drafter runs layers [0, E) over the target's own cache and reads tokens off behind them. What these layers
make of a token is bit for bit what the target needs, so nothing is thrown away but what was drafted wrongly:
`verify` runs the layers from E on over the hidden states that are there, and the first E for those nodes
alone that were proposed and not run yet, the ends of the drafts. There is no state to prefill, to commit or
to bring up to date (LayerSkip, arXiv 2404.16710, section 4.3).

A round of one sequence with E = 2 of 10 layers, drafts of two tokens:

    layers 0-1   42 -> says 8;  8 -> says 9             two passes
    verify       layers 0-1 of 9; layers 2-9 of 42 8 9  one pass of every layer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from specdec import ops
from specdec._checks import check_integer
from specdec._host import MAX_SERIAL_NODES
from specdec._rows import take_rows
from specdec.cache import DecodingCache, PendingRound, Round
from specdec.drafters.base import DraftRequest
from specdec.drafters.calibration import RANKS
from specdec.drafters.draws import Parent, draw_children, joined_rows
from specdec.drafters.plan import FixedPlan, Plan, Planner, SequencePlanner
from specdec.drafters.proposal import Proposal, ProposalBatch
from specdec.drafters.shape import TreeShape
from specdec.drafters.stage import Stage, StageNodes, Work, complete
from specdec.drafters.tree import GrowingTree, as_said, at_once, drawing_of
from specdec.models.base import CausalLM, LayeredLM
from specdec.models.exit_adapter import ExitAdapters
from specdec.models.features import Feature, NodeFeatures
from specdec.ops import GrownTrees, TreeRequest, TreeRules

_NOTHING = TreeRequest(0, 0, 0)  # of a row that takes no part


@dataclass
class Row:
    """One sequence's part of a round.

    Attributes:
        request: what was asked for.
        drawn: whether its tokens are drawn at random.
        plan: its tiers; None: it drafts nothing.
        planner: is told what became of its drafts.
        root: the token below which the next drafts hang, which no layer has seen.
        before: what was drafted before it, `root` its last, and has passed the middle exit.
        kept: columns of the stages that stay: those of the nodes above `root`.
        tree: the drafts.
        columns: where the first stage has the tree's nodes that it has run.
        depth: levels of its proposal.
    """

    request: DraftRequest
    drawn: bool
    plan: Plan | None
    planner: Planner | SequencePlanner
    root: int
    before: list[int] = field(default_factory=list)
    kept: int = 0
    tree: GrowingTree | None = None
    columns: dict[int, int] = field(default_factory=dict)
    depth: int = 0

    @property
    def length(self) -> int:
        """Tokens that its draft exit drafts before they are checked."""
        return 0 if self.plan is None else self.plan.length

    @property
    def checked(self) -> bool:
        """Whether a middle exit checks its drafts."""
        return self.plan is not None and self.plan.middle > 0


@dataclass
class Begun:
    """A round that was drafted and not verified yet.

    Attributes:
        slots: int32 [B].
        pending: what every layer's first pass of the round folds in.
        stages: the layers that have run, from the first layer on.
        nodes: of each row, of the last emitted token and of each draft, the columns in all stages.
    """

    slots: Tensor
    pending: PendingRound | None
    stages: list[Stage]
    nodes: list[list[int]] = field(default_factory=list)


class EarlyExitDrafter:
    """Drafts chains and trees with the target's first layers.

    Args:
        model: the target.
        cache: its memory, that of the loop.
        plan: how far to draft: a `Plan`, or who makes one for every round.
        branching: children of the last emitted token, of each of those, and so on; the last number goes on.
        replacement: whether siblings are drawn independently; False never repeats a sibling's token.
        draw: whether drafts of sampled requests are drawn at random; False proposes the likeliest tokens.
        adapters: of the exits; None: hidden states are read as they are.
        int8: exits are read through a copy of the head in int8, which is read twice as fast. Which tokens are
            drafted changes by that, and never the text.

    Attributes:
        model, replacement: as given.
        shape: of what is drafted, by `branching`.
        planner: makes the plans.
        draws: as `draw`.
        work: what the layers had to do so far.

    Raises:
        ValueError: `branching` is no such list or prunes, or `plan` goes beyond the model or what one round
            has room for.
    """

    name = "early-exit"
    features: Sequence[Feature] = ()

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
    ) -> None:
        self.shape = branching if isinstance(branching, TreeShape) else TreeShape(branching)
        if self.shape.tau is not None:
            raise ValueError("branching: got a pruned shape, want numbers of children by depth")
        self.model = model
        self.planner: Planner = FixedPlan(plan) if isinstance(plan, Plan) else plan
        for each in self.planner.plans:
            each.check_layers(model.num_layers)
            self._check_plan(each)
        self.replacement = replacement
        self.draws = draw
        self.work = Work()
        self._cache = cache
        self._adapters = ExitAdapters() if adapters is None else adapters
        self._head = _int8_head(model) if int8 else model.head
        self._ends = model.eos_token_ids
        self._rules = TreeRules(
            branching=self.shape.branching,
            tau=None,
            ratios=torch.ones(2, RANKS, 1, dtype=torch.float64),  # chances are what the exit says
            edges=torch.empty(0, dtype=torch.float64),
            most_chance=1.0,
            child_chance=1.0,
            level_price=0.0,
            most_run=0,
            most_nodes=MAX_SERIAL_NODES,
            ends=torch.tensor(sorted(self._ends), dtype=torch.int64),
        )
        self._roots: dict[int, int] = {}  # by slot: the last emitted token
        self._sequences: dict[int, SequencePlanner] = {}  # by slot
        self._begun: Begun | None = None
        self._running: dict[int, Row] = {}  # by slot, until it is known what became of a round's drafts
        self._slots = torch.zeros(0, dtype=torch.int32)

    def _check_plan(self, plan: Plan) -> None:
        if plan.middle:
            raise ValueError(f"plan: got {plan}, want one without a middle exit")

    @property
    def cache(self) -> DecodingCache:
        """The target's memory, which the loop must have."""
        return self._cache

    @property
    def ends_drafts(self) -> bool:
        """Its plan says where a draft ends, so that prices do not."""
        return True

    # --- what the loop asks ---

    def levels(self, max_nodes: int) -> Sequence[int]:
        """As deep as `max_nodes` go: its plans say how deep it drafts."""
        return range(1, max_nodes + 1)

    def step_cost(self, target: CausalLM) -> None:
        """Its plans say whether it drafts."""

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """The target has read the prompt: nothing is known of the sequence.

        Raises:
            ValueError: the cache was made for fewer slots.
        """
        check_integer("slot", slot, 0, self._cache.slots - 1)
        self.planner.begin(self._cache.slots)
        self._sequences[slot] = self.planner.for_sequence()

    def end(self, slot: int) -> None:
        """Forgets the sequence, and a round that was cut short: the next one may begin without a proposal."""
        self._roots.pop(slot, None)
        self._sequences.pop(slot, None)
        self._begun, self._running = None, {}

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """Notes the last token: all others are in the target's memory, or will be with its next pass."""
        self._roots[slot] = tokens[-1]
        row = self._running.pop(slot, None)
        if row is not None and row.plan is not None and row.depth:
            last = row.plan.middle or row.plan.exit
            said = min(len(path) + 1, row.depth)
            row.planner.accepted(last, self.model.num_layers, len(path), said)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts for all sequences at once. Where one of them drafts, the last emitted token of every one is
        run, as the target's next pass wants it.
        """
        self._begun = None
        rows = self._planned(requests)
        allowed = any(min(r.max_nodes, r.max_depth) > 0 for r in requests)
        self._running = {row.request.slot: row for row in rows}
        plan = max((row.plan for row in rows if row.plan), key=lambda plan: plan.middle, default=None)
        if plan is None or not allowed:
            return [Proposal.empty()] * len(requests)
        slots = self._slot_tensor([r.slot for r in requests])
        pending = self._cache.take_pending(slots)
        stages = [Stage(self.model, self._cache, span, slots, pending, self.work) for span in plan.spans]
        self._begun = Begun(slots, pending, stages)
        proposals = self._draft(rows, plan)
        for row, proposal in zip(rows, proposals, strict=True):
            row.depth = 1 + max(proposal.tree.depths, default=-1)
        return proposals

    def _planned(self, requests: Sequence[DraftRequest]) -> list[Row]:
        """The rows of a round with their plans. A sequence whose drafts are drawn has one of its own, as no
        neighbour and no clock has a say in its text; beside such, others have that of the most of them, to
        share their passes.
        """
        drawn = [self.draws and not r.sampling.greedy for r in requests]
        own = {r.slot: self._sequences[r.slot] for r, of_row in zip(requests, drawn, strict=True) if of_row}
        plans = {slot: planner.choose() for slot, planner in own.items()}
        shared = Counter(plans.values()).most_common(1)[0][0] if plans else self.planner.choose(len(drawn))
        rows = []
        for r in requests:
            planner = own.get(r.slot, self.planner)
            rows.append(Row(r, r.slot in own, plans.get(r.slot, shared), planner, self._roots[r.slot]))
        return rows

    @torch.inference_mode()
    def verify(self, batch: ProposalBatch, slots: Tensor) -> tuple[Tensor, Round]:
        """The target's verification of what was proposed last, as `CausalLM.forward` with what is there.

        Args:
            batch: the proposals, as they were made or cut.
            slots: int32 [B], those of the requests.

        Returns:
            float32 [B, N, V] logits and the factors to commit.
        """
        tokens, parents, lengths = batch.tokens, batch.parents, batch.lengths
        begun, self._begun = self._begun, None
        sizes = lengths.tolist()
        if begun is None:
            self.work.book(self.model.num_layers, sum(sizes))
            return self.model.forward(
                tokens, cache=self._cache, slots=slots, parents=parents, lengths=lengths
            )
        above = None if parents is None else parents.tolist()
        nodes = [
            StageNodes(0, columns[:size], range(-1, size - 1) if above is None else above[row][:size])
            for row, (columns, size) in enumerate(zip(begun.nodes, sizes, strict=True))
        ]
        x = take_rows(self.model.embeddings, tokens)  # [B, N, D]
        for stage in begun.stages:
            x = complete(stage, x, nodes)
        layers = range(begun.stages[-1].layers.stop, self.model.num_layers)
        x, round = self.model.run_layers(
            x,
            layers,
            cache=self._cache,
            slots=slots,
            parents=parents,
            lengths=lengths,
            pending=begun.pending,
        )
        self.work.book(len(layers), sum(sizes))
        for stage in begun.stages:
            round = stage.round.joined(round)
        return self.model.readout(x), round

    def _slot_tensor(self, slots: list[int]) -> Tensor:
        """int32 [B]; the same tensor as long as the slots are the same."""
        if self._slots.tolist() != slots:
            self._slots = torch.tensor(slots, dtype=torch.int32)
        return self._slots

    # --- drafting ---

    @torch.inference_mode()
    def _draft(self, rows: Sequence[Row], plan: Plan) -> list[Proposal]:
        """Drafts for rows that have plans of two tiers or none; `plan` has their exit."""
        begun = self._begun
        assert begun is not None
        requests = [self._limited(row.request, row.length) for row in rows]
        probs = self._grow(rows, requests, begun.stages[0], plan)
        proposals = []
        for row in rows:
            assert row.tree is not None
            proposal, order = row.tree.proposal(probs, self.replacement)
            begun.nodes.append([row.columns.get(node, -1) for node in (0, *order)])
            proposals.append(proposal)
        return proposals

    def _limited(self, request: DraftRequest, length: int) -> DraftRequest:
        """What is asked of the draft exit: at most `length` tokens deep."""
        sizes = self.shape.levels(request.max_nodes)[: min(length, request.max_depth)]
        return replace(request, max_nodes=sizes[-1] if sizes else 0, max_depth=len(sizes))

    def _grow(
        self, rows: Sequence[Row], requests: Sequence[DraftRequest | None], stage: Stage, plan: Plan
    ) -> Tensor | None:
        """Grows each row's tree below its root, which is run with it; None asks for no part in it.

        Returns:
            float32 [R, V] what the trees' drawn tokens were drawn from; None where none was.
        """
        probs: list[Tensor] = []
        count = 0
        for row, request in zip(rows, requests, strict=True):
            row.tree = None if request is None else GrowingTree(request, self.shape, self._ends, row.drawn)
            row.columns = {}
        new = [[] if row.tree is None else [0] for row in rows]
        hidden = self._run(rows, new, stage)  # [B, N, D]
        if at_once([row.tree for row in rows if row.tree is not None]):
            grown = self._grow_at_once(rows, hidden[:, 0], stage, plan)
            if grown is not None:
                return grown.probs
        wanted = [self._expandable(row) for row in rows]
        while any(wanted):
            asked = [self._asked(row, nodes) for row, nodes in zip(rows, wanted, strict=True)]
            logits = self._read(plan.exit, _flat(hidden, wanted))  # [R, V] of the parents of all rows
            parents = [p for of_row in asked for p in of_row]
            children = draw_children(logits, parents, replacement=self.replacement, draw=self.draws)
            found = zip(children.tokens, children.probabilities, children.rows, strict=True)
            for row, of_row in zip(rows, asked, strict=True):
                if row.tree is not None:
                    row.tree.next_level()
                    for parent in of_row:
                        tokens, chances, place = next(found)
                        row.tree.grow(
                            parent.node, tokens, chances, as_said, place if place < 0 else place + count
                        )
            if children.probs is not None:
                probs.append(children.probs)
                count += len(children.probs)
            wanted = [self._expandable(row) for row in rows]
            if any(wanted):
                hidden = self._run(rows, wanted, stage)
        return joined_rows(probs)

    def _grow_at_once(
        self, rows: Sequence[Row], hidden: Tensor, stage: Stage, plan: Plan
    ) -> GrownTrees | None:
        """Grows all trees in one call, as `_grow` does level by level, if the model can.

        Args:
            hidden: [B, D] of the roots behind the first stage.
        """
        trees = [row.tree for row in rows if row.tree is not None]
        adapter = self._adapters.get(plan.exit)
        grown = self.model.grow(
            self._read(plan.exit, hidden),
            [_NOTHING if row.tree is None else row.tree.at_once(row.columns[0]) for row in rows],
            self._rules,
            outputs=stage.hidden.contiguous(),
            layers=stage.layers,
            cache=self._cache,
            prefix=stage.steps,
            head=self._head,
            adapter=None if adapter is None else adapter.operands,
            sampling=drawing_of([row.tree or trees[0] for row in rows]),
        )
        if grown is None:
            return None
        stage.take(grown)
        for row, nodes in zip(rows, grown.trees, strict=True):
            if row.tree is not None:
                row.tree.take(nodes)
                row.columns.update((i, c) for i, c in enumerate(nodes.columns, 1) if c >= 0)
        return grown

    def _run(self, rows: Sequence[Row], nodes: Sequence[Sequence[int]], stage: Stage) -> Tensor:
        """Runs nodes of the rows' trees: their hidden states [B, N, D] behind the first stage."""
        first, width = stage.columns, max(map(len, nodes))
        tokens, above = [], []
        for row, wanted in zip(rows, nodes, strict=True):
            tree, columns = row.tree, row.columns
            mine, parents = [], []
            for place, node in enumerate(wanted):
                assert tree is not None
                mine.append(tree.tokens[node] if node else row.root)
                parents.append(columns[tree.parents[node]] if node else row.kept - 1)
                columns[node] = first + place
            tokens.append([*mine, *[0] * (width - len(mine))])
            above.append(parents)
        return stage.run(take_rows(self.model.embeddings, torch.from_numpy(np.array(tokens))), above)

    @staticmethod
    def _expandable(row: Row) -> list[int]:
        return [] if row.tree is None else row.tree.expandable()

    @staticmethod
    def _asked(row: Row, nodes: Sequence[int]) -> list[Parent]:
        """Asks for these nodes' children."""
        if row.tree is None:
            return []
        asked = row.tree.asked(nodes)
        if not row.before or not row.request.sampling.edited:
            return asked
        return [parent._replace(path=(*row.before, *parent.path)) for parent in asked]

    def _read(self, exit: int, hidden: Tensor) -> Tensor:
        """Logits float32 [..., V] of hidden states [..., D] behind the first `exit` layers."""
        return self.model.readout(self._adapters.apply(exit, hidden), self._head)


_INT8_HEADS: WeakKeyDictionary[LayeredLM, ops.PackedWeight] = WeakKeyDictionary()


def _int8_head(model: LayeredLM) -> ops.PackedWeight:
    """The model's head in int8; all drafters of a model share it."""
    if model not in _INT8_HEADS:
        _INT8_HEADS[model] = model.head.to_int8()
    return _INT8_HEADS[model]


def _flat(hidden: Tensor, nodes: Sequence[Sequence[int]]) -> Tensor:
    """[R, D] of [B, N, D]: the first of each row, as many as it has nodes."""
    if len(nodes) == 1:
        return hidden[0, : len(nodes[0])]
    return torch.cat([row[: len(mine)] for row, mine in zip(hidden, nodes, strict=True)])
