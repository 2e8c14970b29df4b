"""The pace of a choice of drafts, on ever more texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.tuning.choices import Choice, DraftViews
from specdec.tuning.pace import Policy, RoundTimes, best_policy
from specdec.tuning.reading import Outcomes, Reading
from specdec.tuning.similarity import Similar
from specdec.tuning.texts import Text


@dataclass(frozen=True)
class Evaluation:
    """What was found of a choice.

    Attributes:
        paces: with its best policy, after every part of the texts.
        policy: the best after the last of them.
        complete: whether it saw all texts.
    """

    paces: tuple[float, ...]
    policy: Policy
    complete: bool


class Evaluator:
    """Evaluates choices on the same texts with the same times.

    Args:
        views: of the target.
        texts: prompts and the target's greedy continuations.
        times: what rounds take.
        depth: most drafts of a round; None for as many as the times know.
        parts: of the texts, after each of which an evaluation may end.
    """

    def __init__(
        self,
        views: DraftViews,
        texts: Sequence[Text],
        times: RoundTimes,
        depth: int | None = None,
        *,
        parts: int = 4,
    ) -> None:
        self._views = views
        self._times = times
        depth = len(times.verify) - 1 if depth is None else depth
        size = -(-len(texts) // parts)
        parted = [texts[i : i + size] for i in range(0, len(texts), size)]
        self._readings = [Reading(views.model, part, depth) for part in parted]

    @property
    def places(self) -> int:
        """Places at which drafts are looked at, of all texts."""
        return sum(reading.places * reading.texts for reading in self._readings)

    def __call__(
        self, choice: Choice, hopeless: Callable[[Sequence[float]], bool] = lambda paces: False
    ) -> Evaluation:
        """Evaluates a choice.

        Args:
            choice: how to draft.
            hopeless: told the paces so far after every part but the last; True ends the evaluation.
        """
        view, part = self._views.view(choice), self._views.part(choice.vocabulary)
        once, each = self._times.drafting(choice.skips, self._views.model.num_layers, part)
        parts: list[Outcomes] = []
        paces: list[float] = []
        while True:
            parts.append(self._readings[len(parts)].outcomes(view))
            policy = best_policy(Outcomes.joined(parts), once, each, self._times.verify)
            paces.append(policy.pace)
            complete = len(parts) == len(self._readings)
            if complete or hopeless(paces):
                return Evaluation(tuple(paces), policy, complete)

    def similar(self) -> list[Similar]:
        """The sets of every size that change the residual stream least (`Reading.similar`), on all texts'
        first part.
        """
        return self._readings[0].similar(2 * self._views.model.num_layers - 1)
