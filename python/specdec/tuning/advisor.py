"""Whether self-speculation pays: the same texts decoded plainly and with drafts, in turn within one process.

A round with n drafts takes n c + v(n) plain rounds, c for each draft and v to verify, accept and commit; it
brings 1 + a_1 + ... + a_n tokens, a_j being how often a draft at depth j is kept. For drafts of one length
that are kept with chance a each, the speedup is (1 - a^(n+1)) / ((1 - a) (n c + v)) (arXiv 2211.17192). An
exit drafts now more and now less, so here both sums run over the rounds as they were: depth j counts as often
as it was drafted, and rounds of n drafts as often as there were some. What is predicted from medians of c and
v then differs from what is measured by what medians leave out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

from specdec.bench.studies.section import Section, times
from specdec.generation import Request
from specdec.loop import Loop
from specdec.tuning.round_times import TimedRound, timed_rounds

EVEN = 0.02  # a speedup within this of 1 is none, and no loss either
LITTLE = 0.1  # drafts a round: with fewer a run says little about drafting
SHOWN = 4  # depths in the table

MakeLoop = Callable[[], Loop]


@dataclass
class Decoded:
    """What one way of decoding did on all prompts.

    Attributes:
        rounds: all of them.
        speedups: of each prompt the ratios to plain decoding, one a turn.
        drafted_at, accepted_at: draft tokens by depth, verified and kept.
        texts: of each prompt in the first turn.
    """

    rounds: list[TimedRound] = field(default_factory=list)
    speedups: list[list[float]] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """The median over turns, its geometric mean over prompts."""
        return geometric_mean(median(turns) for turns in self.speedups)


@dataclass(frozen=True)
class Advice:
    """One way of decoding in figures.

    Attributes:
        name: of it.
        draft_cost: c, the time of a draft in plain rounds.
        verify_cost: v by the number of drafts.
        rounds: with so many drafts, by their number.
        acceptance: a by depth.
        tokens: a round.
        predicted: speedup from these.
        measured: speedup, by wall time.
        by_prompt: the measured one of each prompt.
    """

    name: str
    draft_cost: float
    verify_cost: Mapping[int, float]
    rounds: Mapping[int, int]
    acceptance: Sequence[float]
    tokens: float
    predicted: float
    measured: float
    by_prompt: Sequence[float]

    @property
    def drafts(self) -> float:
        """A round."""
        return sum(n * count for n, count in self.rounds.items()) / sum(self.rounds.values())

    @property
    def verifying(self) -> float:
        """v of the rounds as they were."""
        return sum(self.verify_cost[n] * count for n, count in self.rounds.items()) / sum(
            self.rounds.values()
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "draft_cost": self.draft_cost,
            "verify_cost": {str(n): v for n, v in sorted(self.verify_cost.items())},
            "rounds": {str(n): count for n, count in sorted(self.rounds.items())},
            "drafts_per_round": self.drafts,
            "acceptance_by_position": list(self.acceptance),
            "tokens_per_round": self.tokens,
            "predicted_speedup": self.predicted,
            "measured_speedup": self.measured,
            "measured_by_prompt": list(self.by_prompt),
        }


def decode_in_turn(
    plain: MakeLoop,
    others: Mapping[str, MakeLoop],
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    turns: int,
    seconds: float = 0.0,
    on_run: Callable[[str], None] = lambda name: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Decoded, dict[str, Decoded]] | None:
    """Decodes every prompt in every way, turn by turn; the order is reversed from turn to turn.

    Every run has a new loop. A turn on the first prompt comes before the others, untimed.

    Args:
        plain: makes the loop of plain decoding.
        others: makes the other loops, by name.
        prompts: token ids.
        new_tokens: of each prompt.
        turns: at least so many.
        seconds: turns begin for so long, so that fast models get more of them.
        on_run: told the name of every run.
        should_stop: asked before every turn.

    Returns:
        What plain decoding and the others did; None where it was stopped.

    Raises:
        RuntimeError: a text is not that of plain decoding.
    """
    makers = {"": plain, **others}
    found = {name: Decoded([], [[] for _ in prompts]) for name in makers}
    stop = perf_counter() + seconds
    turn = -1  # with cold caches
    while turn < turns or perf_counter() < stop:
        for number, prompt in enumerate(prompts[: 1 if turn < 0 else None]):
            if should_stop():
                return None
            request = Request(prompt, new_tokens, ignore_eos=True)
            taken: dict[str, float] = {}
            for name in list(makers)[:: 1 if turn % 2 == 0 else -1]:
                loop = makers[name]()
                rounds, tokens = timed_rounds(loop, request)
                on_run(name or "plain decoding")
                if turn < 0:
                    continue
                taken[name] = sum(r.draft + r.rest for r in rounds)
                found[name].rounds += rounds
                if turn == 0:
                    found[name].texts.append(tokens)
                _count(found[name], loop)
            for name, spent in taken.items():
                found[name].speedups[number].append(taken[""] / spent)
                if found[name].texts[number] != found[""].texts[number]:
                    raise RuntimeError(f"{name}: prompt {number} got another text than by plain decoding")
        turn += 1
    return found.pop(""), found


def _count(decoded: Decoded, loop: Loop) -> None:
    stats = loop.statistics
    for own, new in ((decoded.drafted_at, stats.drafted_at), (decoded.accepted_at, stats.accepted_at)):
        own.extend([0] * (len(new) - len(own)))
        for depth, count in enumerate(new):
            own[depth] += count


def advise(name: str, plain: Decoded, decoded: Decoded) -> Advice:
    """Puts what was measured of one way of decoding into figures."""
    one = median(r.draft + r.rest for r in plain.rounds)
    costs = [r.draft / r.drafted for r in decoded.rounds if r.drafted]
    cost = median(costs) / one if costs else 0.0
    counts = Counter(r.drafted for r in decoded.rounds)
    # A round without drafts has the drafter's own work in it all the same.
    verify = {
        n: median(r.rest + (0.0 if n else r.draft) for r in decoded.rounds if r.drafted == n) / one
        for n in counts
    }
    drafted = decoded.drafted_at
    acceptance = [kept / count for kept, count in zip(decoded.accepted_at, drafted, strict=True)]
    return Advice(
        name,
        cost,
        verify,
        counts,
        acceptance,
        sum(r.tokens for r in decoded.rounds) / len(decoded.rounds),
        predicted_speedup(acceptance, drafted, counts, cost, verify),
        decoded.speedup,
        [median(turns) for turns in decoded.speedups],
    )


def predicted_speedup(
    acceptance: Sequence[float],
    drafted: Sequence[int],
    rounds: Mapping[int, int],
    cost: float,
    verify: Mapping[int, float],
) -> float:
    """Tokens a round over the time of a round.

    Args:
        acceptance: a by depth: how often a draft that was verified there was kept.
        drafted: drafts that were verified at each depth.
        rounds: with so many drafts, by their number.
        cost: c, of a draft in plain rounds.
        verify: v by the number of drafts.

    Example: 10 rounds of 2 drafts, kept with 0.8 and 0.64, c = 0.4, v = 1.2: 2.44 / 2.0
        >>> predicted_speedup([0.8, 0.64], [10, 10], {2: 10}, 0.4, {2: 1.2})
        1.22
    """
    every = sum(rounds.values())
    tokens = every + sum(a * count for a, count in zip(acceptance, drafted, strict=True))
    return tokens / sum(count * (n * cost + verify[n]) for n, count in rounds.items())


def table_of(rows: Sequence[Advice], title: str) -> Section:
    """The figures as a table."""
    header = ["", "drafts", "c", "v", *(f"a{j + 1}" for j in range(SHOWN)), "tokens", "predicted", "measured"]
    cells = [
        [
            row.name,
            f"{row.drafts:.2f}",
            f"{row.draft_cost:.2f}",
            f"{row.verifying:.2f}",
            *(f"{a:.2f}" for a in [*row.acceptance[:SHOWN]]),
            *[""] * (SHOWN - len(row.acceptance)),
            f"{row.tokens:.2f}",
            times(row.predicted),
            times(row.measured),
        ]
        for row in rows
    ]
    text = (
        "drafts and tokens a round; c: a draft, v: verification and all else, in plain rounds; a: drafts "
        "kept of those verified at depth 1, 2, ...; speedups over plain decoding, predicted from these and "
        "measured in the same run."
    )
    return Section(title, [text], header, cells)


def sentence(model: str, ways: Sequence[Advice]) -> str:
    """Whether it pays, in one sentence.

    Args:
        model: its name.
        ways: of drafting with one set; the last drafts in every round.
    """
    best, always = max(ways, key=lambda way: way.measured), ways[-1]
    low, high = min(best.by_prompt), max(best.by_prompt)
    speed = f"{best.measured:.2f} times the speed of plain decoding ({low:.2f} to {high:.2f} by prompt)"
    drafting = best if best.drafts >= LITTLE else always
    why = (
        f"a draft takes {drafting.draft_cost:.2f} of a plain round and "
        f"{(drafting.acceptance or [0.0])[0]:.0%} of the first drafts are kept"
    )
    told = f"On this machine self-speculation {{}} for {model}{{}}: {best.name} has {speed}"
    if best.measured > 1.0 + EVEN and best is drafting:
        return told.format("pays", "") + f", as {why}."
    every = f", and drafting in every round {always.measured:.2f} times, as {why}."
    if best.measured >= 1.0 - EVEN:
        return told.format("makes no difference", "") + every
    return told.format("does not pay", ", decode plainly") + every
