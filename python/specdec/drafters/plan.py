"""How far a round goes: which exits draft and check, and how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec._checks import check_integer
from specdec._host import MAX_SERIAL_NODES


@dataclass(frozen=True)
class Plan:
    """The tiers of a round.

    Attributes:
        exit: layers of the draft exit.
        length: tokens that it drafts, one after the other, before they are checked.
        middle: layers of the exit that checks them before the target does; 0: there is none.
        tentative: tokens that have passed it before the target checks them; 0 without a middle exit. The last
            check may bring up to `length` more.

    Raises:
        ValueError: the exits do not ascend, or a number is out of its range.

    Example:
        >>> str(Plan(2, 3)), Plan.parse("2x2/5x4")
        ('2x3', Plan(exit=2, length=2, middle=5, tentative=4))
    """

    exit: int
    length: int
    middle: int = 0
    tentative: int = 0

    def __post_init__(self) -> None:
        check_integer("exit", self.exit, 1)
        check_integer("length", self.length, 1, MAX_SERIAL_NODES - 2)
        if self.middle == 0:
            check_integer("tentative", self.tentative, 0, 0)
            return
        check_integer("middle", self.middle, self.exit + 1)
        # Kept nodes, the root and drafts are in one pass.
        check_integer("tentative", self.tentative, 1, MAX_SERIAL_NODES - 2 - self.length)

    def __str__(self) -> str:
        checked = f"/{self.middle}x{self.tentative}" if self.middle else ""
        return f"{self.exit}x{self.length}{checked}"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Reads what `str` writes.

        Raises:
            ValueError: it is no such text, or no such plan.
        """
        parts = [part.split("x") for part in text.split("/")]
        if len(parts) > 2 or not all(
            len(part) == 2 and all(number.isdecimal() and len(number) < 6 for number in part)
            for part in parts
        ):
            raise ValueError(
                f"tiers: got {text!r}, want LAYERSxTOKENS of the draft exit, such as 2x3, and of a middle "
                "exit where there is one, such as 2x2/5x4"
            )
        try:
            return cls(*(int(number) for part in parts for number in part))
        except ValueError as error:
            raise ValueError(f"tiers: {text}: {error}") from None

    @property
    def spans(self) -> tuple[range, ...]:
        """The layers that run before the target's verification, tier by tier."""
        first = range(self.exit)
        return (first, range(self.exit, self.middle)) if self.middle else (first,)

    @property
    def most(self) -> int:
        """Tokens that a chain of drafts has at most when the target checks it."""
        return self.tentative + self.length if self.middle else self.length

    def check_layers(self, count: int) -> None:
        """Refuses exits that are not before a model's last layer.

        Raises:
            ValueError: one is not below `count`.
        """
        for name in ("exit", "middle"):
            if getattr(self, name) >= count:
                raise ValueError(f"{name}: got {getattr(self, name)}, want at most {count - 1}")


class SequencePlanner(Protocol):
    """Makes the plans of one sequence's rounds, from what it is told of them and nothing else."""

    def choose(self) -> Plan | None:
        """The plan of the sequence's next round; None for plain decoding. Asked once a round. The plans of
        all sequences have the same exit, and the same middle exit where they have one.
        """

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        """As of `Planner`, in this sequence."""


class Planner(Protocol):
    """Makes the plans of rounds."""

    @property
    def plans(self) -> Sequence[Plan]:
        """All that it may choose."""

    def begin(self, slots: int) -> None:
        """A new text is one of so many sequences."""

    def rests(self, rows: int) -> bool:
        """Whether a round of `rows` sequences is plain decoding, for which nobody need be asked."""

    def choose(self, rows: int) -> Plan | None:
        """The plan of a round of `rows` sequences none of which draws its drafts; None for plain decoding.
        After `rests` that of the same round.
        """

    def for_sequence(self) -> SequencePlanner:
        """Who makes the plans of a new sequence, should its drafts be drawn at random."""

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        """Books that `kept` of `said` tokens of the exit after `lower` layers were those after `upper`."""

    def observe(self, rows: int, nodes: int, tokens: int, seconds: float, rested: bool) -> None:
        """Books a round; see `RoundPlanner.observe`."""


class FixedPlan:
    """The same plan for every round."""

    def __init__(self, plan: Plan) -> None:
        self.plans: Sequence[Plan] = (plan,)

    def begin(self, slots: int) -> None:
        """Nothing is known of texts."""

    def rests(self, rows: int) -> bool:
        """It never does."""
        return False

    def choose(self, rows: int = 1) -> Plan | None:
        """The plan."""
        return self.plans[0]

    def for_sequence(self) -> FixedPlan:
        """The same for a sequence."""
        return self

    def accepted(self, lower: int, upper: int, kept: int, said: int) -> None:
        """Nothing is learned."""

    def observe(self, rows: int, nodes: int, tokens: int, seconds: float, rested: bool) -> None:
        """Nothing is learned."""
