"""Any smaller model as drafter, its own recurrent state kept in step by the same factors that the target
uses.

Drafting is verification too: every step runs the drafter's new token over its frozen committed state and the
factors of the steps before (`Steps`). What the target accepts is then committed from those factors; nothing
was copied or rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec._host import MAX_SERIAL_NODES
from specdec.acceptance.proposal import ProposalKind
from specdec.cache import Steps, path_tensor
from specdec.drafters.base import DraftRequest
from specdec.drafters.draws import Parent, draw_children
from specdec.drafters.proposal import Proposal
from specdec.drafters.shape import TreeShape
from specdec.models.base import CausalLM
from specdec.models.features import Feature
from specdec.tree import TokenTree

CATCH_UP = 32  # nodes a pass when a sequence went on for long without drafts


@dataclass
class _Slot:
    """A sequence's drafter-side bookkeeping.

    Attributes:
        unseen: emitted tokens that are not in the drafter's state and have no factors; the last is the
            round's root.
        row: its row in the round being drafted, or -1.
        roots: emitted tokens at the start of that row, the unseen ones when it began.
        columns: places in that row of the nodes that the drafter has run, by node of the round (0: root).
        committed: nodes of its row to commit, once the target has decided.
    """

    unseen: list[int] = field(default_factory=list)
    row: int = -1
    roots: int = 0
    columns: dict[int, int] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts chains and trees with a model of the target's vocabulary: by sampling where the request is
    sampled, else the likeliest tokens.

    Args:
        model: the drafter; its vocabulary must be the target's.
        slots: sequences at a time, as in the target's loop.
        branching: children of the last emitted token, of each of those, and so on; the last number goes on.
            (1,) drafts chains. See `TreeShape`.
        replacement: whether siblings are drawn independently; False never repeats a sibling's token.

    Raises:
        ValueError: `branching` is no such list.
    """

    name = "model"
    features: Sequence[Feature] = ()
    free_proposals = False

    def __init__(
        self, model: CausalLM, *, slots: int = 1, branching: Sequence[int] = (1,), replacement: bool = False
    ) -> None:
        self.model = model
        self.shape = TreeShape(branching)
        self.replacement = replacement
        self._cache = model.new_cache(slots)
        self._slots: dict[int, _Slot] = {}
        self._steps = Steps()

    def levels(self, max_nodes: int) -> Sequence[int]:
        """Nodes of a proposal that is 1, 2, ... tokens deep."""
        return self.shape.levels(max_nodes)

    def step_cost(self, target: CausalLM) -> float:
        """The drafter's weights over the target's: a small batch takes as long as reading them."""
        return self.model.num_parameters / target.num_parameters

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
        self.model.prefill([prompt], cache=self._cache, slots=[slot])
        self._slots[slot] = _Slot()

    def end(self, slot: int) -> None:
        """Forgets the sequence."""
        self._settle()
        self._slots.pop(slot, None)

    def observe(
        self, slot: int, path: Sequence[int], tokens: Sequence[int], features: Tensor | None = None
    ) -> None:
        """Notes what the target accepted; the next call commits it."""
        state = self._slots[slot]
        if state.row < 0:
            state.unseen.extend(tokens)
            return
        run = [state.columns[node + 1] for node in path if node + 1 in state.columns]
        state.committed = [*range(state.roots), *run]
        state.unseen = list(tokens[len(run) :])
        state.row = -1

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts for each request that may have drafts, all of them in one batch."""
        rows = [r for r in requests if min(r.max_nodes, r.max_depth) > 0]
        self._settle(defer_for=[r.slot for r in rows])
        if not rows:
            return [Proposal.empty() for _ in requests]
        self._catch_up(rows)
        by_slot = dict(zip([r.slot for r in rows], self._draft(rows), strict=True))
        return [by_slot.get(r.slot) or Proposal.empty() for r in requests]

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
        inner = [
            sum(
                len({place for place, _ in level})
                for level in self.shape.layout(r.max_nodes, r.max_depth)[1:]
            )
            for r in rows
        ]
        room = min(CATCH_UP, MAX_SERIAL_NODES - max(inner))
        for slot in [r.slot for r in rows]:
            unseen = self._slots[slot].unseen
            while len(unseen) > room:
                count = min(CATCH_UP, len(unseen) - 1)
                part = torch.tensor([unseen[:count]], dtype=torch.long)
                row = torch.tensor([slot], dtype=torch.int32)
                _, round = self.model.forward(part, cache=self._cache, slots=row)
                self._cache.commit(round, None, torch.tensor([count], dtype=torch.int32))
                del unseen[:count]

    # --- drafting ---

    def _draft(self, rows: Sequence[DraftRequest]) -> list[Proposal]:
        """Grows the trees of all rows level by level, one call of the model a level."""
        states = [self._slots[r.slot] for r in rows]
        trees = [_Growing(r, self.shape.layout(r.max_nodes, r.max_depth)) for r in rows]
        deepest = max(len(t.layout) for t in trees)
        slots = torch.tensor([r.slot for r in rows], dtype=torch.int32)
        logits = self._read(states, slots)  # [B, V]
        probs: list[Tensor] = []
        count = 0
        for level in range(deepest):
            wanted = [tree.parents_at(level, self.model.eos_token_ids) for tree in trees]
            flat = [(tree, p) for tree, parents in zip(trees, wanted, strict=True) for p in parents]
            if not flat:
                break
            if level > 0:
                logits = self._step(trees, wanted, states, slots)  # [R, V], R parents of all rows
            children = draw_children(
                logits,
                [p for _, p in flat],
                replacement=self.replacement,
            )
            for (tree, parent), tokens, row in zip(flat, children.tokens, children.rows, strict=True):
                tree.drawn[parent.node] = (tokens, row if row < 0 else row + count)
            if children.probs is not None:
                probs.append(children.probs)
                count += len(children.probs)
            for tree in trees:
                tree.grow(level)
        every = None if not probs else probs[0] if len(probs) == 1 else torch.cat(probs)
        return [tree.proposal(every, self.replacement) for tree in trees]

    def _read(self, states: Sequence[_Slot], slots: Tensor) -> Tensor:
        """Runs the tokens that the drafter has not seen; the logits after each row's last one, [B, V]."""
        sizes = [len(s.unseen) for s in states]
        width = max(sizes)
        tokens = torch.tensor([[*s.unseen, *[0] * (width - len(s.unseen))] for s in states])  # [B, width]
        lengths = torch.tensor(sizes, dtype=torch.int32)
        for row, state in enumerate(states):
            state.row, state.roots = row, len(state.unseen)
            state.columns = {0: state.roots - 1}
        self._steps = Steps()
        logits, round = self.model.forward(tokens, cache=self._cache, slots=slots, lengths=lengths)
        self._steps.extend(round)
        return logits[torch.arange(len(states)), lengths.long() - 1]

    def _step(
        self,
        trees: Sequence[_Growing],
        wanted: Sequence[Sequence[Parent]],
        states: Sequence[_Slot],
        slots: Tensor,
    ) -> Tensor:
        """Runs the nodes that get children; their logits one below the other, [R, V]."""
        sizes = [len(nodes) for nodes in wanted]
        width, first = max(sizes), len(self._steps)
        tokens = torch.zeros(len(wanted), width, dtype=torch.long)
        above = torch.full((len(wanted), width), -1, dtype=torch.int32)
        for row, (tree, nodes, state) in enumerate(zip(trees, wanted, states, strict=True)):
            for i, parent in enumerate(nodes):
                tokens[row, i] = parent.path[-1]
                above[row, i] = state.columns[tree.parents[parent.node - 1] + 1]
                state.columns[parent.node] = first + i
        round = self._steps.round
        chains = width == 1 and round is not None and round.parents is None
        if chains and all(int(above[row, 0]) == first - 1 for row, size in enumerate(sizes) if size):
            parents = None  # every row goes on where the last call ended
        else:
            parents = above
        logits, new = self.model.forward(
            tokens,
            cache=self._cache,
            slots=slots,
            parents=parents,
            lengths=torch.tensor(sizes, dtype=torch.int32),  # 0: the row takes no part
            prefix=self._steps,
        )
        self._steps.extend(new)
        return torch.cat([logits[row, :size] for row, size in enumerate(sizes)])


class _Growing:
    """A request's tree while it grows.

    Attributes:
        request: what was asked for.
        layout: its shape, see `TreeShape.layout`.
        tokens: drafts so far.
        parents: of each, -1 below the last emitted token.
        drawn: by node of the round, children and the row that they were drawn from, -1 where they were not.
    """

    def __init__(self, request: DraftRequest, layout: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.request = request
        self.layout = layout
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.drawn: dict[int, tuple[list[int], int]] = {}
        self._rows: list[int] = []
        self._paths: list[tuple[int, ...]] = [()]  # by node of the round
        self._places: list[int] = [0]  # of the last level: the node of the round, -1 where there is none

    def parents_at(self, level: int, ends: frozenset[int]) -> list[Parent]:
        """The nodes that get children in this level; none below an end token, which itself stays drafted, so
        that rules stay exact (docs/lossless.md, What a drafter may do).
        """
        if level >= len(self.layout):
            return []
        counts: dict[int, int] = {}
        for place, rank in self.layout[level]:
            counts[place] = rank + 1  # ranks ascend
        parents = []
        for place, count in counts.items():
            node = self._places[place]
            if node >= 0 and not (self._paths[node] and self._paths[node][-1] in ends):
                parents.append(Parent(self.request, node, self._paths[node], count))
        return parents

    def grow(self, level: int) -> None:
        """Adds the children that were drawn."""
        if level >= len(self.layout):
            return
        places = []
        for place, rank in self.layout[level]:
            parent = self._places[place]
            tokens, row = self.drawn.get(parent, ((), -1))
            if rank >= len(tokens):
                places.append(-1)
                continue
            self.tokens.append(tokens[rank])
            self.parents.append(parent - 1)
            self._rows.append(row)
            self._paths.append((*self._paths[parent], tokens[rank]))
            places.append(len(self.tokens))
        self._places = places

    def proposal(self, probs: Tensor | None, replacement: bool) -> Proposal:
        """The tree with what it was drawn from."""
        tree = TokenTree.unchecked(tuple(self.tokens), tuple(self.parents))
        if not self.tokens or probs is None or self.request.sampling.greedy:
            return Proposal(tree, ProposalKind.DETERMINISTIC)
        kind = ProposalKind.IID if replacement else ProposalKind.WITHOUT_REPLACEMENT
        return Proposal(tree, kind, probs, tuple(self._rows))
