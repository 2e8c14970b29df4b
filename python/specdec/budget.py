"""How many draft tokens a round is worth.

A verification of n drafts costs more than a decode step, and a wrong draft brings nothing, so a drafter that
is often wrong makes decoding slower. The budget keeps two running estimates, the time of a round by its
number of nodes and the chance that a draft token is accepted, and picks the n with the most expected tokens
per second; n = 0 is a plain decode step. The expected tokens of a chain are (1 - a^(n+1)) / (1 - a) with a
the chance per token (arXiv 2211.17192, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._idle_rounds = 0
        self._explore_after = explore_every

    def before_drafting(self, rows: int) -> int:
        """Draft tokens worth asking for, a sequence, when drafting itself costs time."""
        if not self.adaptive:
            return self.max_draft
        best = self._best(rows, [-1] * rows, [self.max_draft] * rows, self.draft_cost)
        if best > 0:
            self._idle_rounds, self._explore_after = 0, self._explore_every
            return best
        self._idle_rounds += 1
        if self._idle_rounds >= self._explore_after:
            self._idle_rounds = 0
            self._explore_after *= 2
            return min(2, self.max_draft)
        return 0

    def after_drafting(self, confidences: Sequence[float | None], sizes: Sequence[int]) -> int:
        """Draft tokens worth verifying, a sequence, of proposals that are already there (and cost nothing).

        Args:
            confidences: the drafter's confidence in each proposal.
            sizes: draft tokens in each proposal.
        """
        if not self.adaptive:
            return self.max_draft
        buckets = [confidence_bucket(c) for c in confidences]
        return self._best(len(sizes), buckets, sizes, 0.0)

    def _best(self, rows: int, buckets: Sequence[int], sizes: Sequence[int], draft_cost: float) -> int:
        chances = [self.acceptance(b) for b in buckets]
        longest = min(self.max_draft, max(sizes, default=0))
        best, best_rate = 0, rows / self.verify_cost(rows)
        for n in range(1, longest + 1):
            tokens = sum(expected_tokens(a, min(n, size)) for a, size in zip(chances, sizes, strict=True))
            # Rows are padded to the longest, so every row pays for n.
            rate = tokens / (self.verify_cost(rows * (1 + n)) + rows * n * draft_cost)
            if rate > best_rate * (1.0 + MARGIN if best == 0 else 1.0):
                best, best_rate = n, rate
        return best

    def observe_draft(self, tokens: int, seconds: float) -> None:
        """Books the time of a drafter's call that proposed `tokens` tokens in all."""
        if tokens > 0:
            per_token = seconds / tokens
            self.draft_cost = per_token if self.draft_cost == 0.0 else 0.9 * self.draft_cost + 0.1 * per_token

    def observe_acceptance(self, confidence: float | None, drafted_depth: int, accepted: int) -> None:
        """Books a proposal of depth `drafted_depth` of which `accepted` tokens were right."""
        self.acceptance.observe(confidence_bucket(confidence), accepted, int(accepted < drafted_depth))
