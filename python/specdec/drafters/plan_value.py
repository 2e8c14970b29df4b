"""What a round of a plan brings and takes, by arithmetic: section 3 of arXiv 2211.17192, tier by tier.

What is brought follows from how often one exit's tokens pass another, what is taken from the layers that run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from specdec.budget import expected_tokens
from specdec.costs import prior_cost
from specdec.drafters.calibration import RunningRatio
from specdec.drafters.plan import Plan
from specdec.models.base import LayeredLM

MARGIN = 0.02  # that drafting must promise more than plain decoding
LONG = 0.998, 6.0  # of how often tokens pass in texts: memory, and what the prior counts for
MEMORY, WEIGHT = 0.97, 12.0  # of how often they do now: memory, and what is known of texts counts for
PASS = 0.08  # of a round of plain decoding, that a pass takes besides its layers

Chance = Callable[[int, int], float]
"""How often a token of the exit after so many layers is the one after so many."""


@lru_cache
def _several(rows: int, nodes: int) -> float:
    """What a pass over so many nodes of each sequence is thought to take, in passes over one."""
    return prior_cost(rows, nodes) / prior_cost(rows, 1)


class _Pair:
    """Of two exits: how often a token was kept, in the texts before and in what is written now."""

    def __init__(self) -> None:
        self.known = RunningRatio(*LONG)
        self.kept = self.said = 0.0

    def observe(self, kept: int, said: int) -> None:
        """Books tokens."""
        self.known.observe(kept, said)
        self.kept, self.said = MEMORY * self.kept + kept, MEMORY * self.said + said

    def chance(self, prior: float) -> float:
        """That a token is kept, where `prior` is thought of texts."""
        # What is known of other texts counts for no more than there is of it.
        weight = min(WEIGHT, LONG[1] + self.known.said - self.said)
        return (self.kept + weight * self.known.mixed(prior)) / (self.said + weight)


class Passed:
    """How often tokens of one exit are those of another. Until more is known of two, they are thought to
    differ as often as all others do, in proportion to the part of the layers that is between them.
    """

    def __init__(self) -> None:
        self._differ = RunningRatio(*LONG, 0.5)  # of tokens, over that part
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def __call__(self, lower: int, upper: int) -> float:
        """Of the exits after `lower` and `upper` layers."""
        prior = max(1.0 - self._differ.value * (upper - lower) / upper, 0.0)
        return self._pairs.setdefault((lower, upper), _Pair()).chance(prior)

    def begin(self, share: float) -> None:
        """This share of what is written is another text now."""
        for pair in self._pairs.values():
            pair.kept, pair.said = (1.0 - share) * pair.kept, (1.0 - share) * pair.said

    def observe(self, lower: int, upper: int, kept: int, said: int) -> None:
        """Books that `kept` of `said` tokens of one exit were those of the other."""
        self._pairs.setdefault((lower, upper), _Pair()).observe(kept, said)
        self._differ.observe(said - kept, said * (upper - lower) / upper)


class PlanValue:
    """The arithmetic of one model.

    Args:
        model: the target.
        int8: whether exits are read through a head in int8.
    """

    def __init__(self, model: LayeredLM, *, int8: bool = False) -> None:
        self._layers = model.num_layers
        head = model.head.in_features * model.head.out_features
        self._head = head * self._layers / max(model.num_parameters - head, 1)  # in layers
        self._exit_head = self._head * (0.5 if int8 else 1.0)

    def tokens(self, plan: Plan | None, chance: Chance) -> float:
        """Tokens that a round emits; None is plain decoding."""
        if plan is None:
            return 1.0
        if not plan.middle:
            return expected_tokens(chance(plan.exit, self._layers), plan.length)
        came = self._inner(plan, chance) * self._came(plan, chance)
        passed = chance(plan.middle, self._layers)
        return float(1.0 + passed * (1.0 - passed**came) / (1.0 - passed))

    def units(self, plan: Plan | None, chance: Chance, rows: int = 1) -> float:
        """Time of the layers of a round of `rows` sequences, in rounds of plain decoding."""
        if plan is None:
            return 1.0

        def several(nodes: float) -> float:
            """What a layer takes for so many nodes, in passes of one."""
            low = int(nodes)
            a, b = _several(rows, low), _several(rows, low + 1)
            return a + (nodes - low) * (b - a)

        layers, head, exit_head = self._layers, self._head, self._exit_head
        draft = plan.length * (plan.exit + exit_head)
        if plan.middle:
            inner = self._inner(plan, chance)
            check = plan.exit + (plan.middle - plan.exit + exit_head) * several(1.0 + plan.length)
            came = inner * self._came(plan, chance)
            last = plan.middle + (layers - plan.middle + head) * several(1.0 + came)
            every = inner * (draft + check) + last
        else:
            every = draft + plan.exit + (layers - plan.exit + head) * several(1.0 + plan.length)
        return every / (layers + head)

    def passes(self, plan: Plan | None, chance: Chance) -> float:
        """Passes of a round one after the other, above the one of plain decoding."""
        if plan is None:
            return 0.0
        if not plan.middle:
            return plan.length + 1.0
        return self._inner(plan, chance) * (plan.length + 2.0) + 2.0

    def time(self, plan: Plan | None, chance: Chance, rows: int = 1, a_pass: float = PASS) -> float:
        """Time of a round, in rounds of plain decoding, where every pass takes so much besides its layers."""
        return self.units(plan, chance, rows) + a_pass * self.passes(plan, chance)

    def _came(self, plan: Plan, chance: Chance) -> float:
        """Tokens that come through a check."""
        return expected_tokens(chance(plan.exit, plan.middle), plan.length)

    def _inner(self, plan: Plan, chance: Chance) -> float:
        """Checks of a round: as many as bring the tentative tokens, the last one half too many."""
        came = self._came(plan, chance)
        return max((plan.tentative + 0.5 * (came - 1.0)) / came, 1.0)
