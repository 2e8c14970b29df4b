"""What a round of a plan brings and takes, by arithmetic: section 3 of arXiv 2211.17192, tier by tier.

What is brought follows from how often one exit's tokens pass another, what is taken from the layers that run.
"""

from __future__ import annotations

from collections.abc import Callable

from specdec.budget import expected_tokens
from specdec.costs import prior_cost
from specdec.drafters.calibration import RunningRatio
from specdec.drafters.plan import Plan
from specdec.models.base import LayeredLM

MARGIN = 0.02  # that drafting must promise more than plain decoding
MEMORY, WEIGHT = 0.995, 6.0  # of a ratio between two exits, and what its prior counts for

Chance = Callable[[int, int], float]
"""How often a token of the exit after so many layers is the one after so many."""


class Passed:
    """How often tokens of one exit are those of another; at first, the closer the two the more often."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], RunningRatio] = {}

    def __call__(self, lower: int, upper: int) -> float:
        """Of the exits after `lower` and `upper` layers."""
        return self._ratio(lower, upper).value

    def observe(self, lower: int, upper: int, kept: int, said: int) -> None:
        """Books that `kept` of `said` tokens of one exit were those of the other."""
        self._ratio(lower, upper).observe(kept, said)

    def _ratio(self, lower: int, upper: int) -> RunningRatio:
        key = lower, upper
        if key not in self._ratios:
            self._ratios[key] = RunningRatio(MEMORY, WEIGHT, 0.5 + 0.5 * lower / upper)
        return self._ratios[key]


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
        """Time of a round of `rows` sequences, in rounds of plain decoding."""
        if plan is None:
            return 1.0

        def several(nodes: float) -> float:
            """What a layer takes for so many nodes, in passes of one."""
            low = int(nodes)
            a, b = prior_cost(rows, low), prior_cost(rows, low + 1)
            return (a + (nodes - low) * (b - a)) / prior_cost(rows, 1)

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

    def _came(self, plan: Plan, chance: Chance) -> float:
        """Tokens that come through a check."""
        return expected_tokens(chance(plan.exit, plan.middle), plan.length)

    def _inner(self, plan: Plan, chance: Chance) -> float:
        """Checks of a round: as many as bring the tentative tokens, the last one half too many."""
        came = self._came(plan, chance)
        return max((plan.tentative + 0.5 * (came - 1.0)) / came, 1.0)
