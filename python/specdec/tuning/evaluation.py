"""The pace of a set of skipped sub-layers, on ever more texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet
from specdec.tuning.pace import Policy, RoundTimes, best_policy
from specdec.tuning.reading import Outcomes, Reading
from specdec.tuning.similarity import Similar
from specdec.tuning.texts import Text


@dataclass(frozen=True)
class Evaluation:
    """What was found of a set.

    Attributes:
        paces: with its best policy, after every part of the texts.
        policy: the best after the last of them.
        complete: whether it saw all texts.
    """

    paces: tuple[float, ...]
    policy: Policy
    complete: bool


class Evaluator:
    """Evaluates sets on the same texts with the same times.

    Args:
        model: the target.
        texts: prompts and the model's greedy continuations.
        times: what rounds take.
        depth: most drafts of a round; None for as many as the times know.
        int8: whether drafts are made with int8 copies of the matrices.
        parts: of the texts, after each of which an evaluation may end.
    """

    def __init__(
        self,
        model: SkippableLM,
        texts: Sequence[Text],
        times: RoundTimes,
        depth: int | None = None,
        *,
        int8: bool = False,
        parts: int = 4,
    ) -> None:
        self._model = model
        self._times = times
        self._int8 = int8
        depth = len(times.verify) - 1 if depth is None else depth
        size = -(-len(texts) // parts)
        self._readings = [Reading(model, texts[i : i + size], depth) for i in range(0, len(texts), size)]

    @property
    def places(self) -> int:
        """Places at which drafts are looked at, of all texts."""
        return sum(reading.places * reading.texts for reading in self._readings)

    def __call__(
        self, skips: SkipSet, hopeless: Callable[[Sequence[float]], bool] = lambda paces: False
    ) -> Evaluation:
        """Evaluates a set.

        Args:
            skips: the set.
            hopeless: told the paces so far after every part but the last; True ends the evaluation.
        """
        view = self._model.skipping(skips, int8=self._int8)
        once, each = self._times.drafting(skips, self._model.num_layers)
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
        return self._readings[0].similar(2 * self._model.num_layers - 1)
