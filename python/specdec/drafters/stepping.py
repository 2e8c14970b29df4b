"""Drafting with a model that has a recurrent state of its own: what all such drafters share.

Drafting is verification too: every step runs the drafter's new nodes over its frozen committed state and the
factors of the steps before (`Steps`). What the target accepts is then committed from those factors; nothing
was copied or rolled back. A drafter says how prompts, emitted tokens and drafted nodes are run; the levels,
the trees and what happens to the state are here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec._host import MAX_SERIAL_NODES
from specdec.cache import DecodingCache, Round, Steps, path_tensor
from specdec.drafters.base import DraftRequest
from specdec.drafters.calibration import outcomes
from specdec.drafters.draws import Children, Parent, draw_children, joined_rows
from specdec.drafters.experience import experience_of
from specdec.drafters.passes import DraftedNodes, EmittedTokens
from specdec.drafters.proposal import Proposal
from specdec.drafters.shape import TreeShape
from specdec.drafters.tree import GrowingTree, as_said, at_once, drawing_of
from specdec.models.base import CausalLM, DraftModel
from specdec.models.features import Feature, NodeFeatures
from specdec.ops import DraftSampling, GrownTrees, TreeRequest, TreeRules
from specdec.tree import TokenTree

CATCH_UP = 32  # nodes a pass when a sequence went on for long without drafts
KEPT = 1024  # emitted tokens that wait for a draft at most; some kilobytes each, where they have features
PASSES = 64  # whose features a slot keeps as they are: each holds on to the features of its whole batch


@dataclass
class _Slot:
    """A sequence's drafter-side bookkeeping.

    Attributes:
        unseen: emitted tokens that are not in the drafter's state and have no factors; the last is the
            round's root.
        features: of each unseen token, in parts; empty where the drafter takes none.
        greedy: whether it last drafted for a greedy request.
        row: its row in the round being drafted, or -1.
        roots: emitted tokens at the start of that row, the unseen ones when it began.
        columns: places in that row of the nodes that the drafter has run: by node of the growing tree (0: the
            last emitted token), and once that is finished by node of the proposal.
        committed: nodes of its row to commit, once the target has decided.
        tree: what it proposed, until the round is decided.
        said: (probability, rank) of the tree's nodes.
    """

    unseen: list[int] = field(default_factory=list)
    features: list[NodeFeatures] = field(default_factory=list)
    greedy: bool = True
    row: int = -1
    roots: int = 0
    columns: dict[int, int] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)
    tree: TokenTree | None = None
    said: list[tuple[float, int]] = field(default_factory=list)


class SteppingDrafter(ABC):
    """Drafts trees level by level.

    Args:
        model: what it drafts with.
        slots: sequences at a time, as in the target's loop.
        branching: children of the last emitted token, of each of those, and so on; the last number goes on.
            (1,) drafts chains. Or a `TreeShape`, such as `TreeShape.pruned()`.
        drawn: the shape of drafts that are drawn at random; None: that of all others.
        replacement: whether siblings are drawn independently; False never repeats a sibling's token.
        draw: whether drafts of sampled requests are drawn at random; False proposes the likeliest tokens.
        vocabulary: [V'] the tokens that the columns of the drafter's logits stand for, ascending; None: all.
        cache: what it steps over; None: an own one.

    Attributes:
        stepped: the model.
        shape: of the trees, where they are not drawn.
        calibration: by whether a request is greedy, what its drafts' chances are learned to be.

    Raises:
        ValueError: `branching` is no such list, or `slots` no number from 1 on.
    """

    name = "stepping"
    features: Sequence[Feature] = ()
    rereads_accepted = False
    """Whether accepted drafts are run again with the target's features, instead of committing the factors of
    the pass that drafted them."""

    def __init__(
        self,
        model: DraftModel,
        *,
        slots: int = 1,
        branching: Sequence[int] | TreeShape = (1,),
        drawn: TreeShape | None = None,
        replacement: bool = False,
        draw: bool = True,
        vocabulary: NDArray[np.integer] | None = None,
        cache: DecodingCache | None = None,
    ) -> None:
        self.shape = branching if isinstance(branching, TreeShape) else TreeShape(branching)
        self._drawn_shape = self.shape if drawn is None else drawn
        self.replacement = replacement
        self.draws = draw
        self._learned = experience_of(model, self.shape, self._drawn_shape)
        self.calibration = self._learned.calibration
        self._worth = self._learned.worth
        self.stepped = model
        self._cache = model.new_cache(slots) if cache is None else cache
        self._vocab_size = model.vocab_size
        self._num_parameters = model.num_parameters
        self._ends = model.eos_token_ids
        self._end_tensor = torch.tensor(sorted(self._ends), dtype=torch.int64)
        self._vocabulary = vocabulary
        self._vocabulary_tensor = (
            None if vocabulary is None else torch.from_numpy(vocabulary.astype(np.int64))
        )
        self._slots: dict[int, _Slot] = {}
        self._steps = Steps()

    # --- what a drafter says ---

    @abstractmethod
    def run_prompt(self, slot: int, prompt: Sequence[int], features: Tensor | None) -> None:
        """Prefills the slot, which may hold an old sequence, with a prompt; `features` [T, F] of its tokens.

        Raises:
            ValueError: a token is outside the vocabulary.
        """

    @abstractmethod
    def run_emitted(self, emitted: EmittedTokens) -> tuple[Tensor, Round]:
        """Runs emitted tokens over the committed state.

        Returns:
            Logits float32 [B, V'] after each row's last token, which may be written to, and the round.
        """

    @abstractmethod
    def run_drafted(self, nodes: DraftedNodes) -> Tensor:
        """Runs drafted nodes and appends them to their prefix.

        Returns:
            Logits float32 [R, V'] after the nodes of all rows, one row's after the other's and nothing for
            places beyond a row's size, which may be written to.
        """

    def run_trees(
        self,
        logits: Tensor,
        requests: Sequence[TreeRequest],
        rules: TreeRules,
        sampling: DraftSampling | None,
    ) -> GrownTrees | None:
        """Grows trees of the likeliest tokens, or drawn chains, after the emitted tokens that were just run,
        where the drafter can do that in one call; None: it is done level by level.

        Args:
            logits: float32 [B, V'] after each row's last emitted token.
            requests: a row's each.
            rules: of all of them.
            sampling: how chains are drawn; None: the likeliest tokens.
        """
        return None

    # --- what the loop asks ---

    def levels(self, max_nodes: int) -> Sequence[int]:
        """Nodes of a proposal that is 1, 2, ... tokens deep."""
        return self.shape.levels(max_nodes)

    def step_cost(self, target: CausalLM) -> float:
        """The drafter's weights over the target's: a small batch takes as long as reading them."""
        return self._num_parameters / target.num_parameters

    def begin(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Prefills the drafter's own state with the prompt.

        Raises:
            ValueError: the drafter was made for fewer slots, or a token is outside its vocabulary.
        """
        if slot >= self._cache.slots:
            raise ValueError(
                f"slot: got {slot}, but this drafter was made with slots={self._cache.slots}, "
                "want as many as the loop has"
            )
        self._settle()
        self.run_prompt(slot, prompt, features)
        self._slots[slot] = _Slot()

    def end(self, slot: int) -> None:
        """Forgets the sequence."""
        self._settle()
        self._slots.pop(slot, None)

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: NodeFeatures | None = None
    ) -> None:
        """Notes what the target accepted; the next call commits it."""
        state = self._slots[slot]
        if state.tree is not None:
            calibration = self.calibration[state.greedy]
            for node, kept in outcomes(state.tree, tokens):
                calibration.observe(*state.said[node], kept)
            state.tree = None
        if state.row < 0:
            state.unseen.extend(tokens)
            if features is not None:
                state.features.append(features)
                if len(state.features) >= PASSES:
                    state.features = [NodeFeatures.of(_joined(state.features).clone())]
            if len(state.unseen) > KEPT:
                self._bring_up([slot], CATCH_UP)
            return
        run: list[int] = []
        if not self.rereads_accepted:
            run = [state.columns[node] for node in path if node in state.columns]
        state.committed = [*range(state.roots), *run]
        state.unseen = list(tokens[len(run) :])
        state.features = [] if features is None else [features.after(len(run))]
        state.row = -1

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts where it pays."""
        rows = self._worthwhile([r for r in requests if min(r.max_nodes, r.max_depth) > 0])
        if not rows:
            return [Proposal.empty() for _ in requests]
        proposals, seconds = self.draft(rows)
        by_slot = dict(zip([r.slot for r in rows], proposals, strict=True))
        priced = [r for r in rows if r.prices.second > 0.0]
        if priced:
            gains = [(0, self._gain(by_slot[r.slot], r.prices.node)) for r in priced]
            self._worth.observe(gains, seconds)
        return [by_slot.get(r.slot) or Proposal.empty() for r in requests]

    def draft(self, rows: Sequence[DraftRequest]) -> tuple[list[Proposal], float]:
        """Drafts for these requests, each of which may have drafts, all of them in one batch.

        Returns:
            A proposal for each, and the seconds that it took: without reading what was emitted in many rounds
            without drafts, which no other round has to do.
        """
        self._settle(defer_for=[r.slot for r in rows])
        self._catch_up(rows)
        start = perf_counter()
        return self._draft(rows), perf_counter() - start

    def _gain(self, proposal: Proposal, price: float) -> float:
        """Tokens that a proposal is expected to bring above a price a node."""
        return proposal.gain(price)

    def _draws_for(self, request: DraftRequest) -> bool:
        return self.draws and not request.sampling.greedy

    def _tree(self, request: DraftRequest) -> GrowingTree:
        """An empty tree for a request."""
        drawn = self._draws_for(request)
        return GrowingTree(request, self._drawn_shape if drawn else self.shape, self._ends, drawn)

    def _worthwhile(self, rows: list[DraftRequest]) -> list[DraftRequest]:
        """The requests that drafting is expected to pay for; those without a price always."""
        priced = [r for r in rows if r.prices.second > 0.0]
        if not priced:
            return rows
        chosen = self._worth.choose([0] * len(priced), [r.prices.second for r in priced])
        dropped = {r.slot for r, good in zip(priced, chosen, strict=True) if not good}
        return [r for r in rows if r.slot not in dropped]

    # --- state ---

    def _settle(self, defer_for: Sequence[int] | None = None) -> None:
        """Commits the last round's accepted paths; deferred when the same rows go on drafting."""
        round = self._steps.round
        if round is None:
            return
        slots = round.slots.tolist()
        paths = [self._slots[s].committed if s in self._slots else [] for s in slots]
        path = path_tensor(paths)
        lengths = torch.tensor([len(p) for p in paths], dtype=torch.int32)
        if defer_for is not None and list(defer_for) == slots:
            self._cache.defer(round, path, lengths)
        else:
            self._cache.commit(round, path, lengths)
        for s in slots:
            if s in self._slots:
                self._slots[s].committed = []
        self._steps = Steps()

    def _catch_up(self, rows: Sequence[DraftRequest]) -> None:
        """Commits emitted tokens in passes of CATCH_UP nodes until the rest fits a drafting round."""
        most = max(self._tree(row).most_run for row in rows)
        room = min(CATCH_UP, MAX_SERIAL_NODES - most)
        self._bring_up([r.slot for r in rows], room)

    def _bring_up(self, slots: Sequence[int], room: int) -> None:
        """Commits emitted tokens of these slots, all in the same passes, until at most `room` of each are
        left.
        """
        states = self._slots
        if any(states[slot].committed for slot in slots):
            self._settle()  # they come first; every row of that round was decided, as these went on since
        long = [slot for slot in slots if len(states[slot].unseen) > room]
        behind = long
        while behind:
            counts = [min(CATCH_UP, len(states[slot].unseen) - 1) for slot in behind]
            _, round = self.run_emitted(self._emitted(behind, counts))
            self._cache.commit(round, None, torch.tensor(counts, dtype=torch.int32))
            for slot, count in zip(behind, counts, strict=True):
                state = states[slot]
                del state.unseen[:count]
                if state.features:
                    state.features = [NodeFeatures.of(_joined(state.features)[count:])]
            behind = [slot for slot in behind if len(states[slot].unseen) > room]
        for slot in long:  # a copy: what is left is a view, which would keep all that was read
            states[slot].features = [NodeFeatures.of(part.rows().clone()) for part in states[slot].features]

    def _emitted(self, slots: Sequence[int], counts: Sequence[int] | None = None) -> EmittedTokens:
        """The first `counts` unseen tokens of these slots; all by default."""
        states = [self._slots[slot] for slot in slots]
        rows = [s.unseen for s in states]
        if counts is not None:
            rows = [row[:count] for row, count in zip(rows, counts, strict=True)]
        sizes = [len(row) for row in rows]
        width = max(sizes)
        features = None
        if states[0].features:
            parts = [_joined(s.features) for s in states]
            features = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return EmittedTokens(
            torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]),
            torch.tensor(sizes, dtype=torch.int32),
            sizes,
            torch.tensor(list(slots), dtype=torch.int32),
            features,
        )

    # --- drafting ---

    def _draft(self, rows: Sequence[DraftRequest]) -> list[Proposal]:
        """Grows the trees of all rows level by level, one call of the model a level."""
        states = [self._slots[r.slot] for r in rows]
        trees = [self._tree(row) for row in rows]
        probs: list[Tensor] = []
        count = 0
        start = perf_counter()
        logits = self._read([r.slot for r in rows])  # [B, V']
        if at_once(trees) and (grown := self._grown(logits, trees, states)) is not None:
            every = grown.probs
            return [self._finished(tree, state, every) for tree, state in zip(trees, states, strict=True)]
        while True:
            wanted = self._fitting(trees, self._paying(trees, perf_counter() - start))
            if not any(wanted):
                break
            if trees[0].depth > 0:
                start = perf_counter()
                logits = self._step(trees, wanted, states)  # [R, V'], R parents of all rows
            parents = [tree.asked(nodes) for tree, nodes in zip(trees, wanted, strict=True)]
            flat = [p for asked in parents for p in asked]
            children = self._children(logits, flat)
            found = zip(children.tokens, children.probabilities, children.rows, strict=True)
            for tree, asked in zip(trees, parents, strict=True):
                chance = as_said if tree.drawn else self.calibration[tree.request.sampling.greedy]
                tree.next_level()
                for parent in asked:
                    tokens, probabilities, row = next(found)
                    tree.grow(parent.node, tokens, probabilities, chance, row if row < 0 else row + count)
                    if probabilities and not tree.drawn:
                        self._learned.see_child(chance(probabilities[0], 0))
            if children.probs is not None:
                probs.append(children.probs)
                count += len(children.probs)
        every = joined_rows(probs)
        return [self._finished(tree, state, every) for tree, state in zip(trees, states, strict=True)]

    def _grown(
        self, logits: Tensor, trees: Sequence[GrowingTree], states: Sequence[_Slot]
    ) -> GrownTrees | None:
        """Grows all trees in one call, as `_draft` does level by level, if the drafter can."""
        learned = self._learned
        level = learned.level_seconds(len(trees))
        requests = [self._at_once(tree, state.columns[0]) for tree, state in zip(trees, states, strict=True)]
        second = max(tree.request.prices.second for tree in trees)
        rules = learned.rules(trees[0].shape, second * level(), self._end_tensor, self._vocabulary_tensor)
        start = perf_counter()
        grown = self.run_trees(logits, requests, rules, drawing_of(trees))
        if grown is None:
            return None
        if grown.levels > 1:  # the first only reads the logits that are there
            level.observe((perf_counter() - start) / (grown.levels - 1))
        for tree, nodes in zip(trees, grown.trees, strict=True):
            tree.take(nodes)
            if not tree.drawn:
                learned.see_children(tree)
        return grown

    def _at_once(self, tree: GrowingTree, root: int) -> TreeRequest:
        """What `run_trees` is asked for a tree; `root` is the place of its row's last emitted token."""
        return tree.at_once(root)

    def _children(self, logits: Tensor, parents: Sequence[Parent]) -> Children:
        """Children of each parent, from `logits` [R, V'] after them, which may be written to."""
        return draw_children(
            logits,
            parents,
            replacement=self.replacement,
            draw=self.draws,
            vocabulary=self._vocabulary,
            vocab_size=self._vocab_size,
        )

    def _paying(self, trees: Sequence[GrowingTree], seconds: float) -> list[list[int]]:
        """The nodes of each tree to expand in the next level, where this one took `seconds`: the pass and the
        choice of its children.

        A child is hoped to be as likely as the best child of a node usually is. Nodes whose child would not
        be worth verifying are left out, and trees with prices stop where a level brings less than its time.
        """
        wanted = [tree.expandable() for tree in trees]
        if trees[0].depth == 0:
            return wanted  # that it pays was decided before
        level = self._learned.level_seconds(len(trees))
        if trees[0].depth > 1 or level.cold:
            # The first level, which reads what was emitted, stands for the others until a few were measured.
            level.observe(seconds)
        gain = second = 0.0
        for i, tree in enumerate(trees):
            prices = tree.request.prices
            if prices.second == 0.0:
                continue
            second = max(second, prices.second)
            nodes = [
                (node, tree.chances[node] * self._learned.best_child - prices.node) for node in wanted[i]
            ]
            wanted[i] = [node for node, hope in nodes if hope > 0.0]
            gain += sum(hope for _, hope in nodes if hope > 0.0)
        if gain < second * level():
            return [[] if t.request.prices.second > 0.0 else w for t, w in zip(trees, wanted, strict=True)]
        return wanted

    def _fitting(self, trees: Sequence[GrowingTree], wanted: list[list[int]]) -> list[list[int]]:
        """Of these nodes those that one round has room for, the best of each tree.

        A level is as wide as its widest row. Trees that would be others if they were cut, fixed and drawn
        ones, fit anyway (`GrowingTree.most_run`), if the others leave them what they may still need.
        """
        if all(tree.shape.tau is None for tree in trees):
            return wanted
        kept = max([tree.reserved for tree, nodes in zip(trees, wanted, strict=True) if nodes], default=0)
        room = max(MAX_SERIAL_NODES - len(self._steps) - kept, 0)
        return [
            nodes if t.drawn or t.shape.tau is None else nodes[:room]
            for t, nodes in zip(trees, wanted, strict=True)
        ]

    def _finished(self, tree: GrowingTree, state: _Slot, probs: Tensor | None) -> Proposal:
        """The tree as it is proposed; notes what `observe` needs."""
        proposal, order = tree.proposal(probs, self.replacement)
        columns = state.columns
        state.columns = {i: columns[node] for i, node in enumerate(order) if node in columns}
        if not tree.drawn:
            state.greedy = tree.request.sampling.greedy
            state.tree, state.said = proposal.tree, [tree.said[node] for node in order]
        return proposal

    def _read(self, slots: Sequence[int]) -> Tensor:
        """Runs the tokens that the drafter has not seen; the logits after each row's last one, [B, V']."""
        emitted = self._emitted(slots)
        for row, (slot, size) in enumerate(zip(slots, emitted.sizes, strict=True)):
            state = self._slots[slot]
            state.row, state.roots = row, size
            state.columns = {0: size - 1}
        self._steps = Steps()
        logits, round = self.run_emitted(emitted)
        self._steps.extend(round)
        return logits

    def _step(
        self, trees: Sequence[GrowingTree], wanted: Sequence[Sequence[int]], states: Sequence[_Slot]
    ) -> Tensor:
        """Runs the nodes that get children; their logits one below the other, [R, V']."""
        sizes = [len(nodes) for nodes in wanted]
        width, first = max(sizes), len(self._steps)
        tokens, above = [], []
        for tree, nodes, state in zip(trees, wanted, states, strict=True):
            columns = state.columns
            above.append([columns[tree.parents[node]] for node in nodes])
            tokens.append([tree.tokens[node] for node in nodes] + [0] * (width - len(nodes)))
            tree.run += len(nodes)
            for i, node in enumerate(nodes):
                columns[node] = first + i
        round = self._steps.round
        assert round is not None
        parents = None
        if width > 1 or round.parents is not None or any(a and a[0] != first - 1 for a in above):
            parents = torch.tensor([[*a, *[-1] * (width - len(a))] for a in above], dtype=torch.int32)
        # Otherwise every row goes on where the last call ended.
        drafted = DraftedNodes(
            torch.from_numpy(np.array(tokens)),
            None if min(sizes) == width else torch.tensor(sizes, dtype=torch.int32),
            sizes,
            round.slots,
            parents,
            self._steps,
        )
        return self.run_drafted(drafted)


def _joined(parts: Sequence[NodeFeatures]) -> Tensor:
    """[n, F] of all parts, one below the other."""
    return NodeFeatures.of_all(parts).rows()
