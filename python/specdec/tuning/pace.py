"""What a choice of drafts is worth: time per token, from measured times and counted tokens.

Times are in plain rounds, the time in which plain decoding makes a token: below 1 speculation pays. The
tokens of a round follow from the text alone (`Reading`) and the times from the number of sub-layers that are
left and the part of the head, so that a choice has the same pace whenever it is asked for, whatever else the
machine does meanwhile.

    a set keeps 20 of 60 sub-layers, a draft takes 0.4, a round of 3 drafts v = 1.2 to verify
    3 drafts a round, kept with 0.8, 0.7, 0.5 (each with those before it)   tokens 1 + 0.8 + 0.7 + 0.5 = 3
    pace (3 * 0.4 + 1.2) / 3 = 0.8                                          speedup 1.25
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec._checks import check_number, is_integer, shown
from specdec.models.skipping import SkipSet
from specdec.tuning.reading import Outcomes

THRESHOLDS = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)


@dataclass(frozen=True)
class RoundTimes:
    """What rounds take, in plain rounds.

    Attributes:
        plain_seconds: of a plain round.
        verify: by the number of drafts, from 0 to K, what comes after drafting; the first is 1.
        draft: of drafting what comes once a round, then of each draft what comes once, what every token mixer
            takes that is left, what every MLP does, and what the head does over all tokens.
    """

    plain_seconds: float
    verify: tuple[float, ...]
    draft: tuple[float, float, float, float, float]

    def drafting(self, skips: SkipSet, layers: int, part: float) -> tuple[float, float]:
        """Of a model of so many layers without some sub-layers, with a part of its head: once a round, and of
        each draft.
        """
        once, each, mixer, mlp, head = self.draft
        kept = mixer * (layers - len(skips.mixers)) + mlp * (layers - len(skips.mlps))
        return once, each + kept + head * part

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `read` makes it again."""
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RoundTimes:
        """The times that `as_dict` wrote. Raises ValueError for anything else."""
        try:
            plain, verify, draft = (values[name] for name in ("plain_seconds", "verify", "draft"))
            numbers = [plain, *verify, *draft]
        except (KeyError, TypeError):
            raise ValueError(f"times: got {shown(values)}, want plain_seconds, verify and draft") from None
        for number in numbers:
            check_number("times", number, 0.0)
        if len(draft) != 5 or len(verify) < 2:
            raise ValueError(f"times: got {shown(values)}, want five numbers in draft and two in verify")
        once, each, mixer, mlp, head = map(float, draft)
        return cls(float(plain), tuple(map(float, verify)), (once, each, mixer, mlp, head))


@dataclass(frozen=True)
class Policy:
    """The best way to draft with a choice, of those that were tried.

    Attributes:
        pace: plain rounds that a token takes.
        length: most drafts a round.
        threshold: a draft ends after a token of less confidence; 0 for none.
        tokens: a round, the target's own included.
        drafts: a round.
    """

    pace: float
    length: int
    threshold: float
    tokens: float
    drafts: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `read` makes it again."""
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Policy:
        """The policy that `as_dict` wrote. Raises ValueError for anything else."""
        try:
            policy = cls(**values)
        except TypeError:
            raise ValueError(f"policy: got {shown(values)}, want a policy") from None
        for name in ("pace", "threshold", "tokens", "drafts"):
            check_number(f"policy.{name}", getattr(policy, name), 0.0)
        if not is_integer(policy.length) or policy.length < 1:
            raise ValueError(f"policy.length: got {shown(policy.length)}, want a number of drafts")
        return policy


def best_policy(
    outcomes: Outcomes, once: float, each: float, verify: Sequence[float], places: int | None = None
) -> Policy:
    """The length and threshold under which a token takes the least time.

    Rounds follow one another through each text: a round that keeps d drafts is followed by one d + 1 places
    on. They begin at each of the first places in turn, so that every place counts as often as rounds come to
    it. How far a draft goes on beyond its first wrong token is taken from the confidences along the text.

    Args:
        outcomes: of the choice's view.
        once, each: time of drafting a round, and of each draft.
        verify: by the number of drafts, from 0 to K.
        places: only the first so many of each text; None for all.
    """
    right, confidence = (t.numpy()[:, :places] for t in outcomes)
    most = right.shape[-1]
    correct = right.cumprod(-1).sum(-1)  # [T, W]
    lengths = range(1, most + 1)
    grid = [(n, threshold) for threshold in THRESHOLDS for n in lengths]
    ends = [_first_below(confidence, threshold) for threshold in THRESHOLDS]  # of each threshold
    drafted = np.stack([np.minimum(end, n) for end in ends for n in lengths])  # [G, T, W]
    kept = np.minimum(drafted, correct)
    seconds = once + each * drafted + np.asarray(verify)[drafted]
    visits = _visits(kept)
    rounds = visits.sum((1, 2))
    tokens = (visits * (kept + 1)).sum((1, 2)) / rounds
    drafts = (visits * drafted).sum((1, 2)) / rounds
    paces = (visits * seconds).sum((1, 2)) / rounds / tokens
    best = int(paces.argmin())
    length, threshold = grid[best]
    return Policy(float(paces[best]), length, threshold, float(tokens[best]), float(drafts[best]))


def _first_below(confidence: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """[T, W]: drafts up to the first of less confidence, that one included; K where there is none."""
    below = confidence < threshold  # [T, W, K]
    found: NDArray[np.int64] = np.where(below.any(-1), below.argmax(-1) + 1, confidence.shape[-1])
    return found


def _visits(kept: NDArray[np.int64]) -> NDArray[np.float64]:
    """How often rounds begin at each place, [G, T, W], where they keep so many drafts there."""
    ways, texts, places = kept.shape
    most = int(kept.max())
    visits = np.zeros((ways, texts, places + most + 1))
    visits[:, :, : min(most + 1, places)] = 1.0
    way, text = np.ogrid[:ways, :texts]
    for place in range(places):
        visits[way, text, place + 1 + kept[:, :, place]] += visits[:, :, place]
    return visits[:, :, :places]
