"""How many draft tokens a round is worth.

A verification of n drafts costs more than a decode step, and a wrong draft brings nothing, so a drafter that
is often wrong makes decoding slower. The budget keeps two running estimates, the time of a round by its
number of nodes and the chance that a draft token is accepted, and picks the n with the most expected tokens
per second; n = 0 is a plain decode step. The expected tokens of a chain are (1 - a^(n+1)) / (1 - a) with a
the chance per token (arXiv 2211.17192, section 3).

Measured times may decide where the text does not depend on what is drafted: for greedy requests and for
drafts that were not drawn at random. Where drafts are drawn, another length gives another text (of the same
law), so the length must come from the sequence alone for its seed to repeat it: `SequenceBudget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec._checks import check_integer

PRIOR_SLOPE = 0.1  # of the time of a one-node round, per further node
LEAST_SLOPE = 0.25  # of the prior slope: noise must not make nodes look free, for then rounds stay long
# Drafting must promise this much more than plain decoding: estimates are noisy, and wrong drafts cost.
MARGIN = 0.03


@dataclass
class RoundCost:
    """Seconds of a round as a line in its node count, fitted with exponential forgetting.

    The first estimates assume what holds for a memory-bound model: a further node costs a small part of the
    first.
    """

    memory: float = 0.97
    _rounds: int = 0
    _weight: float = 0.0
    _nodes: float = 0.0
    _seconds: float = 0.0
    _nodes2: float = 0.0
    _cross: float = 0.0

    def observe(self, nodes: int, seconds: float) -> None:
        """Books a measured round. A measurement far above the estimate is an interruption, not a cost, and is
        cut.
        """
        if self._rounds == 1:
            # The first round ran with cold caches; beside warm rounds it would make nodes look free.
            self._weight = self._nodes = self._seconds = self._nodes2 = self._cross = 0.0
        self._rounds += 1
        seconds = max(seconds, 1e-9)  # a coarse clock must not make rounds free
        if self._weight > 3.0:
            seconds = min(seconds, 3.0 * self(nodes))
        m = self.memory
        self._weight = m * self._weight + 1.0
        self._nodes = m * self._nodes + nodes
        self._seconds = m * self._seconds + seconds
        self._nodes2 = m * self._nodes2 + nodes * nodes
        self._cross = m * self._cross + nodes * seconds

    def __call__(self, nodes: float) -> float:
        """Estimated seconds of a round over `nodes` nodes."""
        if self._weight == 0.0:
            return 1.0 + PRIOR_SLOPE * (nodes - 1)
        n, t = self._nodes / self._weight, self._seconds / self._weight
        variance = self._nodes2 / self._weight - n * n
        # The prior slope counts as a few rounds that differ by one node, until rounds of several sizes were
        # seen.
        prior = 0.25
        prior_slope = PRIOR_SLOPE * t / (1.0 + PRIOR_SLOPE * (n - 1.0))
        slope = (self._cross / self._weight - n * t + prior * prior_slope) / (variance + prior)
        slope = max(slope, LEAST_SLOPE * prior_slope)
        return max(t + slope * (nodes - n), 0.05 * t)


@dataclass
class AcceptanceEstimate:
    """Running chance that a draft token is accepted, given that the ones before it were.

    Separate estimates are kept by the drafter's confidence in its proposal, where it states one.
    """

    memory: float = 0.98
    prior: float = 0.7
    prior_weight: float = 3.0
    _counts: dict[int, list[float]] = field(default_factory=dict)

    def observe(self, bucket: int, accepted: int, rejected: int) -> None:
        """Books accepted tokens and at most one rejected token of a proposal."""
        counts = self._counts.setdefault(bucket, [0.0, 0.0])
        for i, new in enumerate((accepted, rejected)):
            counts[i] = self.memory * counts[i] + new

    def __call__(self, bucket: int) -> float:
        """The estimate for proposals of this confidence."""
        hits, misses = self._counts.get(bucket, (0.0, 0.0))
        return (hits + self.prior * self.prior_weight) / (hits + misses + self.prior_weight)


def expected_tokens(a: float, n: int) -> float:
    """Tokens that a round emits on average with a chain of n drafts, the bonus token counted."""
    if a >= 1.0:
        return n + 1.0
    return float((1.0 - a ** (n + 1)) / (1.0 - a))


def confidence_bucket(confidence: float | None) -> int:
    """Coarse classes of a drafter's stated confidence (for n-grams: the length of the match)."""
    if confidence is None:
        return -1
    for bucket, upper in enumerate((2.5, 3.5, 5.5, 8.5, 16.5)):
        if confidence < upper:
            return bucket
    return 5


def _best(rate: Callable[[int], float], most: int) -> int:
    """The n from 1 to `most` of highest rate; 0 where none beats plain decoding, rate(0), by the margin."""
    best, best_rate = 0, rate(0) * (1.0 + MARGIN)
    for n in range(1, most + 1):
        if rate(n) > best_rate:
            best, best_rate = n, rate(n)
    return best


class _Exploration:
    """Drafts once in a while although it does not seem to pay, ever more rarely while that is so."""

    def __init__(self, every: int) -> None:
        self._every = self._after = every
        self._idle = 0

    def __call__(self, best: int, most: int) -> int:
        """`best`, or sometimes up to 2 where it is 0."""
        if best > 0:
            self._idle, self._after = 0, self._every
            return best
        self._idle += 1
        if self._idle < self._after:
            return 0
        self._idle = 0
        self._after *= 2
        return min(2, most)


class SequenceBudget:
    """Chooses how deep one sequence drafts from what was accepted in that sequence alone.

    No clock and no neighbour in the batch has a say, so a seed repeats a text whose drafts were drawn at
    random.

    Args:
        sizes: draft tokens of a proposal that is 1, 2, ... tokens deep.
        step_cost: cost of drafting one level, as a part of a decode step of the target.
        adaptive: False always drafts as deep as `sizes` goes.
        explore_every: as for `DraftBudget`.
    """

    def __init__(
        self, sizes: Sequence[int], step_cost: float, *, adaptive: bool = True, explore_every: int = 32
    ) -> None:
        self._sizes = sizes
        self._step_cost = step_cost
        self._adaptive = adaptive
        self._acceptance = AcceptanceEstimate()
        self._exploration = _Exploration(explore_every)

    def depth(self) -> int:
        """Levels to draft in the next round. Call it once a round."""
        if not self._adaptive:
            return len(self._sizes)
        chance = self._acceptance(-1)

        def rate(n: int) -> float:
            nodes = self._sizes[n - 1] if n else 0
            return expected_tokens(chance, n) / (1.0 + PRIOR_SLOPE * nodes + self._step_cost * n)

        return self._exploration(_best(rate, len(self._sizes)), len(self._sizes))

    def observe(self, drafted_depth: int, accepted: int) -> None:
        """Books a proposal of depth `drafted_depth` of which a path of `accepted` tokens was kept."""
        self._acceptance.observe(-1, accepted, int(accepted < drafted_depth))


class DraftBudget:
    """Chooses draft lengths from measured costs and acceptance.

    Args:
        max_draft: most draft tokens a sequence may get in one round.
        adaptive: False always grants `max_draft` (for studies of a fixed length).
        explore_every: for a drafter whose proposals cost time: after this many rounds without drafts, draft
            once to see whether it pays again. Doubled while it does not, so exploring costs less and less.

    Raises:
        ValueError: a number is no integer or out of its range.
    """

    def __init__(self, max_draft: int = 16, *, adaptive: bool = True, explore_every: int = 32) -> None:
        check_integer("max_draft", max_draft, 0)
        check_integer("explore_every", explore_every, 1)
        self.max_draft = max_draft
        self.adaptive = adaptive
        self.verify_cost = RoundCost()
        self.draft_cost = 0.0  # seconds per draft token, running mean
        self.acceptance = AcceptanceEstimate()
        self._explore_every = explore_every
        self._exploration = _Exploration(explore_every)

    def for_sequence(self, sizes: Sequence[int], step_cost: float) -> SequenceBudget:
        """The budget of a sequence whose drafts are drawn at random; see there for the arguments."""
        return SequenceBudget(sizes, step_cost, adaptive=self.adaptive, explore_every=self._explore_every)

    def before_drafting(self, rows: int, sizes: Sequence[int]) -> int:
        """How deep to draft, when drafting itself costs time.

        Args:
            rows: sequences in the round.
            sizes: draft tokens of a proposal that is 1, 2, ... tokens deep.
        """
        if not self.adaptive:
            return len(sizes)
        chance = self.acceptance(-1)

        def rate(n: int) -> float:
            nodes = sizes[n - 1] if n else 0
            seconds = self.verify_cost(rows * (1 + nodes)) + rows * nodes * self.draft_cost
            return rows * expected_tokens(chance, n) / seconds

        return self._exploration(_best(rate, len(sizes)), len(sizes))

    def after_drafting(self, confidences: Sequence[float | None], sizes: Sequence[int]) -> int:
        """Draft tokens worth verifying, a sequence, of proposals that are already there (and cost nothing).

        Args:
            confidences: the drafter's confidence in each proposal.
            sizes: draft tokens in each proposal.
        """
        if not self.adaptive:
            return self.max_draft
        chances = [self.acceptance(confidence_bucket(c)) for c in confidences]

        def rate(n: int) -> float:
            tokens = sum(expected_tokens(a, min(n, size)) for a, size in zip(chances, sizes, strict=True))
            return tokens / self.verify_cost(
                len(sizes) * (1 + n)
            )  # rows are padded to the longest: all pay for n

        return _best(rate, min(self.max_draft, max(sizes, default=0)))

    def observe_draft(self, tokens: int, seconds: float) -> None:
        """Books the time of a drafter's call that proposed `tokens` tokens in all."""
        if tokens > 0:
            per_token = seconds / tokens
            self.draft_cost = per_token if self.draft_cost == 0.0 else 0.9 * self.draft_cost + 0.1 * per_token

    def observe_acceptance(self, confidence: float | None, drafted_depth: int, accepted: int) -> None:
        """Books a proposal of depth `drafted_depth` of which `accepted` tokens were right."""
        self.acceptance.observe(confidence_bucket(confidence), accepted, int(accepted < drafted_depth))
