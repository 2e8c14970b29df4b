"""The loop: propose -> verify -> accept -> commit, for a batch of sequences in slots.

One round of one sequence, with a chain of two drafts:

    emitted so far   ... 17 42           42 is not in the state yet: it is the round's root token
    proposed         8 9                 nodes: 42 -> 8 -> 9
    target's tokens  8 5 7               after 42 the target says 8, after 8 it says 5
    accepted         8                   emitted this round: 8 and the target's own 5
    committed        42 8                5 is the next round's root token

Requests beyond the slots wait; a finished sequence's slot goes to the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from time import perf_counter
from typing import Literal, cast

import torch
from torch import Tensor

from specdec._checks import shown
from specdec._host import MAX_SERIAL_NODES
from specdec.acceptance import ProposalKind, TokenHistory, Typical, check_rule, resolve_seed, token_logprobs
from specdec.acceptance.params import SamplingParams
from specdec.batch_decision import BatchSettings, Decided, decide_batch
from specdec.budget import DraftBudget, SequenceBudget, rates_of
from specdec.cache import DecodingCache, Round, path_tensor
from specdec.costs import costs_of
from specdec.drafters.base import FREE, Drafter, DraftRequest, DrawingDrafter, Prices
from specdec.drafters.checking import check_proposals
from specdec.drafters.early_exit import EarlyExitDrafter
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.drafters.proposal import Proposal, ProposalBatch, batch_proposals
from specdec.generation import FinishReason, Request, Result, Statistics, TokenEvent
from specdec.models.base import CausalLM
from specdec.models.features import FeatureTap, NodeFeatures, PassFeatures
from specdec.ops.paths import check_branch
from specdec.sequence import ActiveSequence

# Rounds of a resting drafter that wait until it hears of them: each holds on to what the target showed in it.
UNHEARD = 64


class RoundObserver:
    """Called after every round, before finished sequences leave their slots. For tests and studies."""

    def after_round(self, cache: DecodingCache, sequences: Sequence[ActiveSequence]) -> None:
        """Every emitted token of every sequence but its last is committed or pending in `cache`."""


class Loop:
    """Decodes requests with a target model and a drafter.

    Args:
        model: the target.
        drafter: proposes tokens; None decodes one token a round.
        slots: sequences that are decoded at the same time.
        commit: "deferred" folds an accepted path in during the next verification, "eager" in a pass of its
            own.
        budget: how many drafts a round is worth; the default adapts up to 16. The loop makes its own of it.
        acceptance: which rule decides about drafts that were drawn at random, a name in
            `specdec.acceptance.RULES`: "auto" takes the exact one that accepts most; "typical" (or `Typical`
            with thresholds) is lossy.
        observer: called after every round.
        cache: the model's memory, with as many slots, for a drafter that reads it too; None: a new one.

    Raises:
        TypeError: `model`, `drafter`, `budget` or `observer` is something else: a name, a class instead of an
            instance, or a drafter that lacks a member of `Drafter`.
        ValueError: `commit` is neither of the two, there is no such rule of acceptance, or `cache` does not
            have `slots` slots or is not the one that `drafter` reads.
    """

    def __init__(
        self,
        model: CausalLM,
        drafter: Drafter | None = None,
        *,
        slots: int = 1,
        commit: Literal["deferred", "eager"] = "deferred",
        budget: DraftBudget | None = None,
        acceptance: str | Typical = "auto",
        observer: RoundObserver | None = None,
        cache: DecodingCache | None = None,
    ) -> None:
        if commit not in ("deferred", "eager"):
            raise ValueError(f"commit: got {commit!r}, want 'deferred' or 'eager'")
        rule = check_rule(acceptance)
        if isinstance(model, type) or not hasattr(model, "new_cache"):
            raise TypeError(f"model: got {shown(model)}, want a CausalLM (specdec.load_model gives one)")
        if drafter is not None and (isinstance(drafter, type) or not hasattr(drafter, "propose")):
            raise TypeError(f"drafter: got {shown(drafter)}, want a Drafter such as NGramDrafter(), or None")
        for member in ("draws", "features"):
            if drafter is not None and not hasattr(drafter, member):
                raise TypeError(f"drafter: got {shown(drafter)} without {member}, want a Drafter")
        if budget is not None and not isinstance(budget, DraftBudget):
            raise TypeError(
                f"budget: got {shown(budget)}, want a DraftBudget such as DraftBudget(16), or None"
            )
        if observer is not None and (isinstance(observer, type) or not hasattr(observer, "after_round")):
            raise TypeError(f"observer: got {shown(observer)}, want a RoundObserver, or None")
        if cache is not None and cache.slots != slots:
            raise ValueError(f"cache: got one of {cache.slots} slots, want {slots}")
        if isinstance(drafter, (LayerSkipDrafter, EarlyExitDrafter)) and drafter.cache is not cache:
            raise ValueError("cache: got another one than the drafter reads, want drafter.cache")
        self.model = model
        self.drafter = drafter
        self._tap = FeatureTap(drafter.features) if drafter is not None and drafter.features else None
        # Its drafts are a part of the verification, which it finishes.
        self._begins = drafter if isinstance(drafter, EarlyExitDrafter) else None
        self._deferred = commit == "deferred"
        self.budget = (budget or DraftBudget()).for_loop(
            costs_of(model, deferred=self._deferred, begun=self._begins is not None),
            rates_of(model, "" if drafter is None else drafter.name, deferred=self._deferred),
        )
        self.statistics = Statistics()
        self.cache = model.new_cache(slots) if cache is None else cache
        self.acceptance = rule
        self._observer = observer
        self._free = list(range(slots))[::-1]  # the lowest is taken first
        self._unheard: list[PassFeatures | None] = []  # of each round that a resting drafter has not heard of
        self._running = False
        self._waiting = False  # whether requests wait for a slot
        self._settle([])
        self._most_drafts = min(self.budget.max_draft, MAX_SERIAL_NODES - 1)  # the root token is a node too

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Decodes all requests; results are in their order.

        Raises:
            ValueError: a request is none, or a token of its prompt or its sampling parameters is outside the
                vocabulary (then nothing was decoded); the model gives logits that are not finite, the drafter
                breaks its limits or gives rows that are no distributions, or `acceptance` is not exact for
                its proposals.
            RuntimeError: the loop is decoding other requests.
        """
        results: list[Result] = []
        for _ in self.stream(requests, results):
            pass
        return results

    def stream(
        self, requests: Sequence[Request], results: list[Result] | None = None
    ) -> Generator[TokenEvent, None, None]:
        """Decodes all requests and yields their tokens as they come.

        Args:
            requests: what to decode.
            results: if given, filled with one `Result` a request, which grow while the events come; a
                consumer that stops early finds there what was emitted, with finish reason "cancelled".

        Returns:
            A generator. Closing it, or an error or Ctrl-C in it, ends every sequence and leaves the loop
            ready for the next run. Until then the loop takes no other requests.

        Raises:
            ValueError, RuntimeError: as `run`, and then `results` is as it was.
        """
        self._check_idle()
        checked = self._checked(requests)
        filled = [] if results is None else results
        filled.clear()
        filled.extend(Result(logprobs=None if r.logprobs is None else []) for r in checked)
        return self._events(checked, filled)

    def _check_idle(self) -> None:
        if self._running:
            raise RuntimeError("this loop is decoding other requests; finish or close their stream first")

    def _checked(self, requests: Iterable[Request]) -> list[Request]:
        """The requests, once: an iterator would be empty at the second pass."""
        if not isinstance(requests, Iterable):
            raise ValueError(f"requests: got {shown(requests)}, want a sequence of Request")
        checked = list(requests)
        last = self.model.vocab_size - 1
        for index, request in enumerate(checked):
            if not isinstance(request, Request):
                raise ValueError(f"requests[{index}]: got {shown(request)}, want a Request")
            low, high = min(request.prompt), max(request.prompt)
            if low < 0 or high > last:
                raise ValueError(
                    f"requests[{index}].prompt: got token ids from {low} to {high}, want 0 to {last}"
                )
            try:
                request.sampling.check_vocabulary(self.model.vocab_size)
            except ValueError as error:
                raise ValueError(f"requests[{index}].sampling.{error}") from None
        return checked

    def _events(
        self, requests: Sequence[Request], results: list[Result]
    ) -> Generator[TokenEvent, None, None]:
        self._check_idle()  # again: another stream may have begun since this one was made
        self._running = True
        waiting = deque(enumerate(requests))
        self.statistics = Statistics()
        try:
            self._clear()  # nothing, unless a second Ctrl-C cut the end of the last run short
            while waiting or self._active:
                if waiting and self._free:
                    yield from self._admit(waiting, results)
                self._waiting = bool(waiting)
                if self._active:
                    yield from self._round()
        finally:
            self._running = False
            self._clear()

    # --- admission and leaving ---

    def _admit(self, waiting: deque[tuple[int, Request]], results: list[Result]) -> list[TokenEvent]:
        """Prefills waiting requests into free slots; each emits its first token."""
        start = perf_counter()
        new: list[ActiveSequence] = []
        while waiting and self._free:
            index, request = waiting.popleft()
            result = results[index]
            result.seed = resolve_seed(request.sampling.seed)
            contextual = request.sampling.contextual
            history = TokenHistory(self.model.vocab_size, request.prompt) if contextual else None
            stop = request.stop() if request.stop is not None else None
            eos = frozenset() if request.ignore_eos else self.model.eos_token_ids
            # Last, because what is above may raise: from here on leaving frees the slot.
            sequence = ActiveSequence(index, self._free.pop(), request, result, history, stop, eos)
            sequence.budget = self._sequence_budget(request.sampling)
            self._enter([sequence])
            new.append(sequence)
        tap = self._tap
        logits = self.model.prefill(
            [s.request.prompt for s in new], cache=self.cache, slots=[s.slot for s in new], tap=tap
        )
        features = None if tap is None else tap.rows()  # [B, T, F]
        events = []
        finished: list[ActiveSequence] = []
        none = [Proposal.empty()] * len(new)
        batch = batch_proposals([s.root for s in new], none)
        decisions = self._decide(new, BatchSettings.of(new), none, batch, logits.unsqueeze(1))
        for row, (sequence, decided) in enumerate(zip(new, decisions, strict=True)):
            tokens, reason = sequence.emit([decided.next_token])
            if self.drafter is not None:
                prompt = sequence.request.prompt
                seen = None if features is None else features[row, : len(prompt)]
                self.drafter.begin(sequence.slot, prompt, seen)
                # A copy: a view that the drafter keeps would keep the features of all prompts.
                last = None if seen is None else NodeFeatures.of(seen[-1:].clone())
                self.drafter.observe(sequence.slot, (), tokens, last)
            events.append(self._event(sequence, decided, tokens, reason, finished))
        self.statistics.seconds.prefill += perf_counter() - start
        self.budget.begin(len(self._active))
        self._leave(finished)
        return events

    def _enter(self, sequences: Sequence[ActiveSequence]) -> None:
        self._tell_kept()  # in the rows of before
        self._settle(sorted([*self._active, *sequences], key=lambda s: s.slot))

    def _settle(self, active: list[ActiveSequence]) -> None:
        """Takes these as the active sequences, and makes once what stays as it is until that changes."""
        self._active = active
        self._slots = torch.tensor([s.slot for s in active], dtype=torch.int32)
        self._settings = BatchSettings.of(active)

    def _leave(self, sequences: Sequence[ActiveSequence]) -> None:
        if not sequences:
            return
        gone = {s.slot for s in sequences}
        remaining = [s for s in self._active if s.slot not in gone]
        if remaining:
            self._tell_kept()  # in the rows of before
        self._unheard.clear()
        if self.drafter is not None:
            for slot in sorted(gone):
                self.drafter.end(slot)
        self._settle(remaining)
        self._free.extend(sorted(gone, reverse=True))

    def _clear(self) -> None:
        """Ends what is active. All slots are free then, also one that Ctrl-C met between taking and use."""
        try:
            self._leave(list(self._active))
        finally:
            self._active = []
            self._free = list(range(self.cache.slots))[::-1]
            self.cache.flush()

    def _event(
        self,
        sequence: ActiveSequence,
        decided: Decided,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        finished: list[ActiveSequence],
    ) -> TokenEvent:
        logprobs = None
        count, told = sequence.request.logprobs, sequence.result.logprobs
        if decided.logits is not None and count is not None and told is not None:
            rows = [decided.logits[node] for node in decided.path[: len(tokens)]]  # token i came after node i
            logprobs = tuple(token_logprobs(rows, tokens, count))
            told.extend(logprobs)
        if reason is not None:
            sequence.result.finish_reason = reason
            finished.append(sequence)
        return TokenEvent(sequence.index, tokens, reason, logprobs)

    # --- one round ---

    def _round(self) -> list[TokenEvent]:
        active, stats = self._active, self.statistics
        t0 = perf_counter()
        rests = self._rests(active)
        proposals = [Proposal.empty()] * len(active) if rests else self._propose(active)
        batch = batch_proposals([s.root for s in active], proposals)
        t1 = perf_counter()
        tap = self._tap
        if self._begins is not None:
            logits, factors = self._begins.verify(batch, self._slots)
        else:
            logits, factors = self.model.forward(
                batch.tokens,
                cache=self.cache,
                slots=self._slots,
                parents=batch.parents,
                lengths=batch.lengths,
                tap=tap,
            )
        t2 = perf_counter()
        decisions = self._decide(active, self._settings, proposals, batch, logits)
        events: list[TokenEvent] = []
        finished: list[ActiveSequence] = []
        kept = []
        for sequence, proposal, decided in zip(active, proposals, decisions, strict=True):
            path = decided.path
            _check_accepted(sequence, proposal, path)
            accepted = [proposal.tree.tokens[i - 1] for i in path[1:]]
            tokens, reason = sequence.emit([*accepted, decided.next_token])
            kept.append(path[: len(tokens)])  # every emitted token but the last is in the state
            self._book(sequence, proposal, path, tokens)
            events.append(self._event(sequence, decided, tokens, reason, finished))
        t3 = perf_counter()
        self._commit(factors, kept)
        t4 = perf_counter()
        if self._observer is not None:
            self._observer.after_round(self.cache, active)
        t5 = perf_counter()
        if self.drafter is not None:
            if rests:
                self._keep(events)
            else:
                self._tell(self.drafter, kept, events)
        self._leave(finished)
        t6 = perf_counter()

        emitted = sum(len(event.tokens) for event in events)
        self.budget.observe_round(len(active), batch.tokens.shape[1], t4 - t1, t6 - t0, emitted, rests)
        s = stats.seconds
        s.draft += (t1 - t0) + (t6 - t5)
        s.verify += t2 - t1
        s.accept += t3 - t2
        s.commit += t4 - t3
        return events

    def _rests(self, active: Sequence[ActiveSequence]) -> bool:
        """Whether the drafter is left out of this round. Drafts that are drawn may not depend on a clock."""
        if self.drafter is None or any(s.budget is not None for s in active):
            return False
        return self.budget.rests(len(active))

    def _tell(self, drafter: Drafter, paths: Sequence[Sequence[int]], events: Sequence[TokenEvent]) -> None:
        """Tells the drafter what became of a round."""
        features = None if self._tap is None else self._tap.take()
        for row, (sequence, path, event) in enumerate(zip(self._active, paths, events, strict=True)):
            seen = None if features is None else features.at(row, path)
            drafter.observe(sequence.slot, [i - 1 for i in path[1:]], event.tokens, seen)

    def _keep(self, events: Sequence[TokenEvent]) -> None:
        """Keeps for a resting drafter what a round emitted, one token a sequence."""
        self._unheard.append(None if self._tap is None else self._tap.take())
        for sequence, event in zip(self._active, events, strict=True):
            sequence.unheard.extend(event.tokens)
        if len(self._unheard) >= UNHEARD:
            self._tell_kept()

    def _tell_kept(self) -> None:
        """Tells the drafter what was emitted while it rested."""
        if not self._unheard or self.drafter is None:
            return
        for row, sequence in enumerate(self._active):
            seen = [(features, row, (0,)) for features in self._unheard if features is not None]
            tokens, sequence.unheard = sequence.unheard, []
            self.drafter.observe(sequence.slot, (), tokens, NodeFeatures(seen) if seen else None)
        self._unheard = []

    def _propose(self, active: Sequence[ActiveSequence]) -> list[Proposal]:
        """One proposal a sequence, no longer than is worth verifying and never past the token limit."""
        drafter, budget = self.drafter, self.budget
        if drafter is None:
            return [Proposal.empty()] * len(active)
        self._tell_kept()
        prices = budget.prices(len(active))
        requests = [self._draft_request(s, prices) for s in active]
        proposals = drafter.propose(requests)
        check_proposals(drafter.name, requests, proposals, self.model.vocab_size)
        chances: list[Sequence[float]] = []
        remaining: list[int] = []
        for sequence, proposal in zip(active, proposals, strict=True):
            if sequence.budget is not None or proposal.kind is not ProposalKind.DETERMINISTIC:
                continue  # stays whole: with its length the text would come to depend on measured times
            if proposal.chances is None and len(proposal.tree):
                sequence.proposed = proposal.tree
            told = proposal.chances
            chances.append(budget.guess(proposal.tree) if told is None else told)
            remaining.append(sequence.remaining)
        weights = None if self._waiting else budget.weights(remaining)
        worth = budget.choose(chances, len(active), weights)
        return [
            p if s.budget is not None or p.kind is not ProposalKind.DETERMINISTIC else p.truncate(worth)
            for s, p in zip(active, proposals, strict=True)
        ]

    def _draft_request(self, sequence: ActiveSequence, prices: Prices) -> DraftRequest:
        """What the drafter is asked for one sequence. The round emits one token more than it accepts, so the
        last allowed token needs no draft.
        """
        nodes = depth = self._most_drafts
        if sequence.budget is not None:
            depth, prices = sequence.budget.depth(), FREE
            nodes = sequence.budget.nodes(depth)
        depth = min(depth, sequence.remaining - 1)
        return DraftRequest(
            sequence.slot,
            nodes if depth > 0 else 0,
            depth,
            sequence.request.sampling,
            sequence.result.seed,
            sequence.position,
            sequence.history,
            prices,
        )

    def _sequence_budget(self, sampling: SamplingParams) -> SequenceBudget | None:
        """A budget without a clock, where the text depends on how much is drafted."""
        if self.drafter is None or not self.drafter.draws or sampling.greedy:
            return None
        drafter = cast(DrawingDrafter, self.drafter)
        return self.budget.for_sequence(drafter.levels(self._most_drafts), drafter.step_cost(self.model))

    def _decide(
        self,
        sequences: Sequence[ActiveSequence],
        settings: BatchSettings,
        proposals: Sequence[Proposal],
        batch: ProposalBatch,
        logits: Tensor,
    ) -> list[Decided]:
        drafter = "none" if self.drafter is None else self.drafter.name
        return decide_batch(sequences, settings, proposals, batch, logits, self.acceptance, drafter)

    def _commit(self, factors: Round, paths: Sequence[Sequence[int]]) -> None:
        lengths = torch.tensor([len(p) for p in paths], dtype=torch.int32)
        path = None if factors.parents is None else path_tensor(paths)  # [B, P]
        if self._deferred:
            self.cache.defer(factors, path, lengths)
        else:
            self.cache.commit(factors, path, lengths)

    def _book(
        self, sequence: ActiveSequence, proposal: Proposal, path: Sequence[int], emitted: Sequence[int]
    ) -> None:
        """Books one sequence's round. Acceptance is the rule's, also where an end token cut the path."""
        accepted = len(path) - 1
        depths = proposal.tree.depths
        self.statistics.count_path([d + 1 for d in depths], accepted)
        self.statistics.emitted += len(emitted)
        result = sequence.result
        result.rounds += 1
        result.drafted += len(depths)
        result.accepted += accepted
        if depths and sequence.budget is not None:
            sequence.budget.observe(max(depths) + 1, accepted)
        elif sequence.proposed is not None:
            self.budget.observe_drafts(sequence.proposed, emitted)
            sequence.proposed = None


def _check_accepted(sequence: ActiveSequence, proposal: Proposal, path: Sequence[int]) -> None:
    """The path runs along the tree: off it, the state would go on wrong and no error would say so."""
    if path == [0]:  # the root token alone
        return
    tree = proposal.tree
    parents = None if tree.is_chain else [-1, *(above + 1 for above in tree.parents)]  # below the root token
    check_branch(f"path: slot {sequence.slot}", path, parents)
