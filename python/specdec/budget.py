"""How many draft tokens a round is worth.

A verification of n drafts costs more than a decode step, and a wrong draft brings nothing, so a drafter that
is often wrong makes decoding slower. The budget maximises the tokens per second of the whole run: with lambda
the rate of late, time is worth lambda tokens a second, and a draft is worth verifying if its chance is above
lambda times what it adds to the round (the fractional programme of Dinkelbach, 1967). Rows of a batch are
padded to the longest, so all pay for n, and n is chosen for all of them. A drafter whose own work takes time
gets the same prices (`Prices`) and stops where they are not met.

Measured times may decide where the text does not depend on what is drafted: for greedy requests and for
drafts that were not drawn at random. Where drafts are drawn, another length gives another text (of the same
law), so the length must come from the sequence alone for its seed to repeat it: `SequenceBudget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specdec._checks import check_integer
from specdec.costs import RoundCost
from specdec.drafters.base import FREE, Prices
from specdec.drafters.calibration import RunningRatio, outcomes
from specdec.drafters.worth import Exploration
from specdec.learned import PerModel
from specdec.models.base import CausalLM
from specdec.resting import Rest
from specdec.tree import TokenTree

ACCEPTANCE = 0.98, 3.0, 0.7  # `RunningRatio` of draft tokens: memory, weight of the prior, and the prior
NODE_COST = 0.1  # of a decode step, for each draft, where no clock may be asked
# Drafting must promise this much more than plain decoding: estimates are noisy, and wrong drafts cost.
MARGIN = 0.03
MEMORY = 0.95  # of the rate of late, a round


def expected_tokens(a: float, n: int) -> float:
    """Tokens that a round emits on average with a chain of n drafts, the bonus token counted (arXiv
    2211.17192, section 3).
    """
    if a >= 1.0:
        return n + 1.0
    return float((1.0 - a ** (n + 1)) / (1.0 - a))


def _best(rate: Callable[[int], float], most: int) -> int:
    """The n from 1 to `most` of highest rate; 0 where none beats plain decoding, rate(0), by the margin."""
    best, best_rate = 0, rate(0) * (1.0 + MARGIN)
    for n in range(1, most + 1):
        if rate(n) > best_rate:
            best, best_rate = n, rate(n)
    return best


class SequenceBudget:
    """Chooses how deep one sequence drafts from what was accepted in that sequence alone.

    No clock and no neighbour in the batch has a say, so a seed repeats a text whose drafts were drawn at
    random.

    Args:
        sizes: draft tokens of a proposal that is 1, 2, ... tokens deep.
        step_cost: cost of drafting one level, as a part of a decode step of the target.
        adaptive: False always drafts as deep as `sizes` goes.
        whole: drafts as deep as `sizes` goes where any depth pays: the drafter says itself where to end.
        explore_every: after this many rounds without drafts, draft once to see whether it pays again. Doubled
            while it does not, so exploring costs less and less.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        step_cost: float,
        *,
        adaptive: bool = True,
        whole: bool = False,
        explore_every: int = 32,
    ) -> None:
        self._sizes = sizes
        self._step_cost = step_cost
        self._adaptive = adaptive
        self._whole = whole
        self._acceptance = RunningRatio(*ACCEPTANCE)
        self._exploration = Exploration(explore_every)

    def depth(self) -> int:
        """Levels to draft in the next round. Call it once a round."""
        most = len(self._sizes)
        if not self._adaptive:
            return most
        chance = self._acceptance.value

        def rate(n: int) -> float:
            nodes = self._sizes[n - 1] if n else 0
            return expected_tokens(chance, n) / (1.0 + NODE_COST * nodes + self._step_cost * n)

        best = _best(rate, most)
        if self._exploration.due(best > 0):
            return min(2, most)
        return most if best and self._whole else best

    def nodes(self, depth: int) -> int:
        """Most draft tokens of a proposal of this depth."""
        return self._sizes[depth - 1] if depth else 0

    def observe(self, drafted_depth: int, accepted: int) -> None:
        """Books a proposal of depth `drafted_depth` of which a path of `accepted` tokens was kept."""
        self._acceptance.observe(accepted, min(accepted + 1, drafted_depth))


@dataclass
class Rate:
    """Tokens and seconds of late, of one batch size, and the drafts a sequence got."""

    tokens: float = 0.0
    seconds: float = 0.0
    drafts: float = 4.0


@dataclass
class Rates:
    """What rounds of one kind of loop brought of late: of one model, one drafter and one way of committing.

    Attributes:
        by_size: tokens and seconds of late, by sequences in a round.
        rests: whether the drafter rests, by `bit_length` of one sequence less: batches of nearly one size,
            such as those that the last sequences of a run leave, are one case.
    """

    by_size: dict[int, Rate] = field(default_factory=dict)
    rests: dict[int, Rest] = field(default_factory=dict)

    def rest(self, rows: int) -> Rest:
        """Whether the drafter rests in rounds of `rows` sequences."""
        return self.rests.setdefault((rows - 1).bit_length(), Rest())


_RATES = PerModel(Rates)


def rates_of(model: CausalLM, drafter: str, *, deferred: bool) -> Rates:
    """Rates of late in this process, with the number of threads that torch has now.

    Args:
        model: the target.
        drafter: its name.
        deferred: whether the loop commits late.
    """
    return _RATES(model, drafter, torch.get_num_threads(), deferred)


class RoundPlanner(Protocol):
    """Says which rounds go without the drafter, where that is one choice among several."""

    def rests(self, rows: int) -> bool:
        """Whether a round of `rows` sequences goes without asking the drafter; asked once a round."""

    def observe(self, rows: int, nodes: int, tokens: int, seconds: float, rested: bool) -> None:
        """Books a round: sequences, nodes of the longest, the tokens that all of them emitted, the seconds of
        the whole round, and whether it went without the drafter.
        """


class DraftBudget:
    """Chooses how much is drafted and verified, from measured costs and the drafts' chances.

    Args:
        max_draft: most draft tokens a sequence may get in one round.
        adaptive: False always grants `max_draft` (for studies of a fixed length).
        costs: what rounds cost; None: a loop takes what was learned about its model.
        whole: verify what is proposed as it is, of a drafter that says itself where a draft ends. There
            are no prices then: the clock alone says whether to draft (`rests`).
        planned: who compares rounds with drafts and without them instead, by the clock, for a drafter that
            chooses among several kinds of them.

    Raises:
        ValueError: a number is no integer or out of its range.
    """

    def __init__(
        self,
        max_draft: int = 16,
        *,
        adaptive: bool = True,
        costs: RoundCost | None = None,
        whole: bool = False,
        planned: RoundPlanner | None = None,
    ) -> None:
        check_integer("max_draft", max_draft, 0)
        self.max_draft = max_draft
        self.adaptive = adaptive
        self.whole = whole
        self.planned = planned
        self.costs = RoundCost() if costs is None else costs
        self._given = costs
        self.acceptance = RunningRatio(*ACCEPTANCE)
        self._rates = Rates()

    def for_loop(self, costs: RoundCost, rates: Rates | None = None) -> DraftBudget:
        """A budget of the same settings for one loop: loops of different models may be made with one.

        Args:
            costs: what rounds cost, where this budget was given none.
            rates: of loops of the same kind before; it goes on learning. None: nothing is known.
        """
        given = costs if self._given is None else self._given
        budget = DraftBudget(
            self.max_draft, adaptive=self.adaptive, costs=given, whole=self.whole, planned=self.planned
        )
        # What rounds of a fixed length bring says nothing of those that draft what pays.
        if rates is not None and self._given is None and self.adaptive:
            budget._rates = rates
        return budget

    def for_sequence(self, sizes: Sequence[int], step_cost: float | None) -> SequenceBudget:
        """The budget of a sequence whose drafts are drawn at random; see there for the arguments. A
        `step_cost` of None grants all levels in every round.
        """
        adaptive = self.adaptive and step_cost is not None
        return SequenceBudget(sizes, step_cost or 0.0, adaptive=adaptive, whole=self.whole)

    def begin(self, rows: int) -> None:
        """A sequence has come into a batch, now of `rows`. In a batch of its own its drafter is tried: a few
        rounds cost little there, and one text says little of the next.
        """
        if rows == 1:
            self._rates.rest(1).wake()

    def rests(self, rows: int) -> bool:
        """Whether a round of `rows` sequences goes without asking the drafter; call it once a round."""
        if not self.adaptive or self.max_draft == 0:
            return False
        if self.planned is not None:
            return self.planned.rests(rows)
        return self._rates.rest(rows).due()

    def prices(self, rows: int) -> Prices:
        """What drafts must bring in a round of `rows` sequences."""
        if not self.adaptive or self.whole or self.max_draft == 0:
            return FREE
        rate = self.rate(rows)
        drafts = max(1, round(self._rates.by_size.get(rows, Rate()).drafts))
        seconds = self._seconds(rows, 1 + drafts)
        return Prices(rate * (seconds[1 + drafts] - seconds[1]) / (drafts * rows), rate)

    def choose(
        self,
        chances: Sequence[Sequence[float]],
        rows: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> int:
        """Draft tokens worth verifying, for every sequence.

        Args:
            chances: for each sequence those of its drafts, in their order.
            rows: sequences in the round, more than those where some have drafts that are not up to this.
            weights: what a token of each sequence is worth, see `weights`; None: all the same.
        """
        longest = max(map(len, chances), default=0)
        most = min(self.max_draft, longest)
        if not self.adaptive or self.whole or most == 0:
            return most
        rows = len(chances) if rows is None else rows
        rate, seconds = self.rate(rows), self._seconds(rows, 1 + most)
        best, best_gain, tokens = 0, 0.0, 0.0
        for n in range(1, most + 1):
            if weights is None:
                tokens += sum([row[n - 1] for row in chances if len(row) >= n])
            else:
                found = zip(chances, weights, strict=True)
                tokens += sum([w * row[n - 1] for row, w in found if len(row) >= n])
            gain = tokens - rate * (1.0 + MARGIN) * (seconds[1 + n] - seconds[1])
            if gain > best_gain:
                best, best_gain = n, gain
        return best

    def weights(self, remaining: Sequence[int]) -> list[float]:
        """What a token of each sequence of a batch is worth when nobody waits for its slot; all of them
        together as much as there are sequences, where all have as far to go.

        A round takes time for every sequence in it and time that all share. A token saves the first for its
        own sequence; it saves the second only if the last sequence to finish is the one that gets it.

        Args:
            remaining: tokens that each sequence may still emit.
        """
        rows = len(remaining)
        if rows < 2:
            return [1.0] * rows
        half = rows // 2
        whole = self._seconds(rows, 1)[1]
        own = rows / whole * (whole - self._seconds(half, 1)[1]) / (rows - half)
        own = min(max(own, 0.0), 1.0)
        last = 0.9 * max(remaining)
        late = sum(left >= last for left in remaining)
        shared = (1.0 - own) * rows / late
        return [own + (shared if left >= last else 0.0) for left in remaining]

    def rate(self, rows: int) -> float:
        """Tokens per second of late in rounds of `rows` sequences; at least what plain decoding does."""
        plain = rows / self._seconds(rows, 1)[1]
        known = self._rates.by_size.get(rows)
        return plain if known is None else max(plain, known.tokens / known.seconds)

    def guess(self, tree: TokenTree) -> list[float]:
        """Chances of the drafts of a drafter that has none of its own."""
        chance = self.acceptance.value
        return [chance ** (depth + 1) for depth in tree.depths]

    def observe_drafts(self, tree: TokenTree, emitted: Sequence[int]) -> None:
        """Books what became of drafts without chances, verified or not."""
        told = outcomes(tree, emitted)
        accepted = sum(kept for _, kept in told)
        deepest = 1 + max((tree.depths[node] for node, _ in told), default=-1)
        self.acceptance.observe(accepted, min(accepted + 1, deepest))

    def observe_round(
        self,
        rows: int,
        nodes: int,
        verify_seconds: float,
        seconds: float,
        tokens: int,
        rested: bool = False,
    ) -> None:
        """Books a round.

        Args:
            rows: sequences in it.
            nodes: of the longest.
            verify_seconds: of all that comes after the drafts.
            seconds: of the whole round.
            tokens: emitted by all sequences.
            rested: whether the drafter was left out, as `rests` said.
        """
        self.costs.observe(rows, nodes, verify_seconds)
        rate = self._rates.by_size.get(rows, Rate())
        # An interruption must not make time look cheap for the rounds that follow.
        slowest = 3.0 * (seconds - verify_seconds + self._seconds(rows, nodes)[nodes])
        rate.tokens = MEMORY * rate.tokens + tokens
        seconds = min(max(seconds, 1e-9), slowest)
        rate.seconds = MEMORY * rate.seconds + seconds
        if self.planned is not None:
            self.planned.observe(rows, nodes, tokens, seconds, rested)
        else:
            self._rates.rest(rows).observe(rested, rows, tokens, seconds, self._seconds(rows, 1)[1])
        rate.drafts = MEMORY * rate.drafts + (1.0 - MEMORY) * (nodes - 1)
        # Now that it has seconds: another loop may read it in another thread.
        self._rates.by_size[rows] = rate

    def _seconds(self, rows: int, nodes: int) -> list[float]:
        return self.costs.up_to(rows, nodes)
