"""Any smaller model as drafter, its own recurrent state kept in step by the same factors that the target
uses.

Drafting is verification too: every step runs the drafter's new token over its frozen committed state and the
factors of the steps before (`Steps`). What the target accepts is then committed from those factors; nothing
was copied or rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.acceptance import TokenHistory, categorical, greedy_tokens, process_logits, uniform
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.rng import Stream
from specdec.cache import Steps
from specdec.drafters.base import DraftRequest
from specdec.drafters.proposal import Proposal, ProposalKind
from specdec.drafters.shape import TreeShape
from specdec.models.base import CausalLM
from specdec.tree import TokenTree

CATCH_UP = 32  # nodes a pass when a sequence went on for long without drafts


@dataclass
class _Slot:
    """A sequence's drafter-side bookkeeping.

    Attributes:
        prompt: its prompt.
        unseen: emitted tokens that are not in the drafter's state and have no factors; the last is the
            round's root.
        row: its row in the round being drafted, or -1.
        roots: emitted tokens at the start of that row, the unseen ones when it began.
        fed: draft tokens of that round that the drafter has run (all but the last one proposed).
        committed: nodes of its row to commit, once the target has decided.
        history: what penalties count and the callback gets; None without them.
    """

    prompt: Sequence[int]
    unseen: list[int] = field(default_factory=list)
    row: int = -1
    roots: int = 0
    fed: int = 0
    committed: list[int] = field(default_factory=list)
    history: TokenHistory | None = None


class ModelDrafter:
    """Drafts chains with a model of the target's vocabulary, greedily where the request is greedy, else by
    sampling.

    Args:
        model: the drafter; its vocabulary must be the target's.
        slots: sequences at a time, as in the target's loop.
    """

    name = "model"
    free_proposals = False

    def __init__(self, model: CausalLM, *, slots: int = 1) -> None:
        self.model = model
        self._cache = model.new_cache(slots)
        self._slots: dict[int, _Slot] = {}
        self._steps = Steps()

    def levels(self, max_nodes: int) -> Sequence[int]:
        """Nodes of a proposal that is 1, 2, ... tokens deep."""
        return TreeShape().levels(max_nodes)

    def step_cost(self, target: CausalLM) -> float:
        """The drafter's weights over the target's: a small batch takes as long as reading them."""
        return self.model.num_parameters / target.num_parameters

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
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
        self._slots[slot] = _Slot(prompt)

    def end(self, slot: int) -> None:
        """Forgets the sequence."""
        self._settle()
        self._slots.pop(slot, None)

    def observe(self, slot: int, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Notes what the target accepted; the next call commits it."""
        state = self._slots[slot]
        if state.history is not None:
            state.history.extend(tokens)
        if state.row < 0:
            state.unseen.extend(tokens)
            return
        kept = min(len(path), state.fed)
        width = self._width
        state.committed = [*range(state.roots), *range(width, width + kept)]
        state.unseen = list(tokens[kept:])
        state.row = -1

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Drafts a chain for each request that may have drafts, all of them in one batch."""
        rows = [r for r in requests if min(r.max_nodes, r.max_depth) > 0]
        self._settle(defer_for=[r.slot for r in rows])
        if not rows:
            return [Proposal.empty() for _ in requests]
        self._catch_up([r.slot for r in rows])
        drafts, probs = self._draft(rows)
        by_slot = {}
        for request, chain, q in zip(rows, drafts, probs, strict=True):
            sampled = not request.sampling.greedy
            by_slot[request.slot] = Proposal(
                TokenTree.from_chain(chain),
                ProposalKind.IID if sampled else ProposalKind.DETERMINISTIC,
                torch.stack(q) if sampled else None,
            )
        return [by_slot.get(r.slot) or Proposal.empty() for r in requests]

    # --- state ---

    def _settle(self, defer_for: Sequence[int] | None = None) -> None:
        """Commits the last round's accepted paths; deferred when the same rows go on drafting."""
        round = self._steps.round
        if round is None:
            return
        slots = round.slots.tolist()
        paths = [self._slots[s].committed if s in self._slots else [] for s in slots]
        longest = max(1, max(map(len, paths)))
        path = torch.tensor([[*p, *[0] * (longest - len(p))] for p in paths], dtype=torch.int32)
        lengths = torch.tensor([len(p) for p in paths], dtype=torch.int32)
        if defer_for is not None and list(defer_for) == slots:
            self._cache.defer(round, path, lengths)
        else:
            self._cache.commit(round, path, lengths)
        for s in slots:
            if s in self._slots:
                self._slots[s].committed = []
        self._steps = Steps()

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Commits emitted tokens in passes of CATCH_UP nodes until the rest fits a drafting round."""
        for slot in slots:
            unseen = self._slots[slot].unseen
            while len(unseen) > CATCH_UP:
                part = torch.tensor([unseen[:CATCH_UP]], dtype=torch.long)
                row = torch.tensor([slot], dtype=torch.int32)
                _, round = self.model.forward(part, cache=self._cache, slots=row)
                self._cache.commit(round, None, torch.tensor([CATCH_UP], dtype=torch.int32))
                del unseen[:CATCH_UP]

    # --- drafting ---

    def _draft(self, rows: Sequence[DraftRequest]) -> tuple[list[list[int]], list[list[Tensor]]]:
        """Runs the drafter token by token; returns each row's chain and the rows it was drawn from."""
        states = [self._slots[r.slot] for r in rows]
        slots = torch.tensor([r.slot for r in rows], dtype=torch.int32)
        lengths = torch.tensor([len(s.unseen) for s in states], dtype=torch.int32)
        width = self._width = int(lengths.max())
        tokens = torch.tensor([[*s.unseen, *[0] * (width - len(s.unseen))] for s in states])  # [B, width]
        for row, (state, request) in enumerate(zip(states, rows, strict=True)):
            state.row, state.roots, state.fed = row, len(state.unseen), 0
            if request.sampling.contextual and state.history is None:
                state.history = TokenHistory(self.model.vocab_size, state.prompt, request.emitted)
        self._steps = Steps()
        logits, round = self.model.forward(tokens, cache=self._cache, slots=slots, lengths=lengths)
        self._steps.extend(round)
        last = logits[torch.arange(len(rows)), lengths.long() - 1]  # [B, V]

        chains: list[list[int]] = [[] for _ in rows]
        probs: list[list[Tensor]] = [[] for _ in rows]
        open_rows = [True] * len(rows)
        while True:
            for row, request in enumerate(rows):
                if open_rows[row]:
                    self._draw(request, states[row], last[row], chains[row], probs[row])
                    full = len(chains[row]) == min(request.max_nodes, request.max_depth)
                    open_rows[row] = not full and chains[row][-1] not in self.model.eos_token_ids
            if not any(open_rows):
                return chains, probs
            # Rows that are done take no part: a length of 0.
            active = torch.tensor(open_rows, dtype=torch.int32)
            step = torch.tensor([[chain[-1]] for chain in chains])  # [B, 1]
            count = len(self._steps)
            first_step = count == width
            parents = None
            if first_step and any(len(s.unseen) != width for s in states):
                parents = (lengths - 1).unsqueeze(1)  # [B, 1]: each row continues at its own last token
            elif self._steps.round is not None and self._steps.round.parents is not None:
                parents = torch.full((len(rows), 1), count - 1, dtype=torch.int32)
            logits, round = self.model.forward(
                step, cache=self._cache, slots=slots, parents=parents, lengths=active, prefix=self._steps
            )
            self._steps.extend(round)
            for row, is_open in enumerate(open_rows):
                states[row].fed += int(is_open)
            last = logits[:, 0]

    def _draw(
        self, request: DraftRequest, state: _Slot, logits: Tensor, chain: list[int], probs: list[Tensor]
    ) -> None:
        """Appends the next draft token of one row, and for a sampled one the row it was drawn from."""
        sampling: SamplingParams = request.sampling
        before = state.history.with_path(chain) if state.history is not None else None
        if sampling.greedy:
            chain.append(int(greedy_tokens(logits, sampling, before)))
            return
        q = process_logits(logits, sampling, before)
        u = uniform(request.seed, request.position + len(chain), Stream.DRAFT)
        chain.append(categorical(np.asarray(q), u))
        probs.append(q)
