"""Measures what rounds of plain and of self-speculative decoding take, in turn within one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.draft_exit import FixedLength
from specdec.generation import Request
from specdec.loop import Loop
from specdec.methods.autoregressive import autoregressive
from specdec.methods.self_speculative import self_speculative
from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet
from specdec.tuning.pace import RoundTimes

ROUNDS = 3  # of one length in a turn
LEAST_TURNS = 4
PLAIN_EVERY = 4  # runs between two of plain decoding


class Case(NamedTuple):
    """What is left of a drafting model, and how it is used.

    Attributes:
        mixers, mlps: that are left.
        part: of the head.
        drafts: a round.
    """

    mixers: int
    mlps: int
    part: float
    drafts: int


class TimedRound(NamedTuple):
    """A round of one sequence.

    Attributes:
        drafted: draft tokens verified.
        tokens: emitted.
        draft: seconds of drafting.
        rest: all its other seconds.
    """

    drafted: int
    tokens: int
    draft: float
    rest: float


def timed_rounds(loop: Loop, request: Request, most: int | None = None) -> tuple[list[TimedRound], list[int]]:
    """Decodes one request: its rounds, the first `most` of them, and its text so far."""
    found: list[TimedRound] = []
    tokens: list[int] = []
    before = (0, 0, 0.0, 0.0)
    for number, event in enumerate(loop.stream([request])):
        tokens += event.tokens
        stats = loop.statistics
        s = stats.seconds
        now = (stats.drafted, stats.emitted, s.draft, s.verify + s.accept + s.commit)
        if number:  # the first token comes from the prefill
            found.append(TimedRound(*(b - a for a, b in zip(before, now, strict=True))))  # type: ignore[arg-type]
        before = now
        if len(found) == most:
            break
    return found, tokens


def evenly_skipped(layers: int, mixers: int, mlps: int) -> SkipSet:
    """A set that leaves so many token mixers and MLPs, spread over the layers."""

    def skipped(kept: int) -> set[int]:
        return set(range(layers)) - {i * layers // kept for i in range(kept)}

    return SkipSet.of(skipped(mixers), skipped(mlps))


def measure_times(
    model: SkippableLM,
    prompts: Sequence[Sequence[int]],
    depth: int,
    seconds: float,
    *,
    int8: bool = False,
    vocabulary: Sequence[int] | None = None,
) -> RoundTimes:
    """What drafts and verifications take.

    Drafting is measured with four sets that leave a quarter or three quarters of the mixers and of the MLPs,
    at two lengths, the least and the most of them with a small vocabulary too, and a line is put through:
    layers of a model are alike, so what counts is how many are left, and how much of the head.
    Verification is measured at every length. Everything takes turns with plain rounds; what counts is the
    first quartile of all rounds of a kind, as other work on the machine only ever adds time.

    Args:
        model: the target.
        prompts: decoded in turn.
        depth: most drafts K of a round.
        seconds: for all of it, about; four turns at least, the first of which does not count.
        int8: whether drafts are made with int8 copies of the matrices.
        vocabulary: a small one, for the time of the head; None: it remains in the time of each draft.
    """
    layers = model.num_layers
    few, many = max(1, layers // 4), max(1, 3 * layers // 4)
    lengths = sorted({max(1, depth // 4), max(1, depth - depth // 4)})
    cases = [Case(mixers, mlps, 1.0, n) for mixers in (few, many) for mlps in (few, many) for n in lengths]
    if vocabulary is not None:
        part = len(vocabulary) / model.vocab_size
        cases += [Case(kept, kept, part, n) for kept in (few, many) for n in lengths]
    cases += [Case(few, few, 1.0, n) for n in range(1, depth + 1) if n not in lengths]
    cases = list(dict.fromkeys(cases))  # a small model has fewer
    plain = autoregressive(model)
    loops = [
        self_speculative(
            model,
            evenly_skipped(layers, case.mixers, case.mlps),
            exit=FixedLength(),
            max_draft=case.drafts,
            adaptive=False,
            vocabulary=vocabulary if case.part < 1.0 else None,
            int8=int8,
        )
        for case in cases
    ]
    found: dict[Case, list[TimedRound]] = {}
    plain_rounds: list[TimedRound] = []
    stop = perf_counter() + seconds
    turn = 0
    while turn < LEAST_TURNS or perf_counter() < stop:
        prompt = prompts[turn % len(prompts)]
        order = list(range(len(cases)))[:: 1 if turn % 2 == 0 else -1]
        for place, i in enumerate(order):
            for r in _rounds(loops[i], prompt, cases[i].drafts):
                case = cases[i]._replace(drafts=r.drafted)  # an end token cuts drafts short
                found.setdefault(case, []).append(r)
            if place % PLAIN_EVERY == 0:
                plain_rounds += _rounds(plain, prompt, 0)
        turn += 1
        if turn == 1:  # with cold caches
            found.clear()
            plain_rounds.clear()
    return _fitted(found, plain_rounds, depth)


def _rounds(loop: Loop, prompt: Sequence[int], n: int) -> list[TimedRound]:
    """Rounds of n drafts each: the end of the text, where there would be fewer, is not reached."""
    return timed_rounds(loop, Request(prompt, 1 + (ROUNDS + 1) * (n + 1), ignore_eos=True), ROUNDS)[0]


def _fitted(
    found: Mapping[Case, Sequence[TimedRound]], plain_rounds: Sequence[TimedRound], depth: int
) -> RoundTimes:
    """Least squares of relative errors for drafting, in which no part takes less than no time; and times of
    verifications, which do not fall with their length: where they seem to, neighbours share their mean. Of
    lengths that did not occur they are on a line between the others.
    """
    one = _quartile([r.draft + r.rest for r in plain_rounds])
    rows = np.array([(1.0, c.drafts, *(c.drafts * of for of in c[:3])) for c in found])
    seen = np.array([_quartile([r.draft for r in rounds]) / one for rounds in found.values()])
    whole = all(case.part == 1.0 for case in found)
    line = _not_negative(rows[:, : 4 if whole else 5] / seen[:, None], np.ones(len(seen)))
    once, each, mixer, mlp, head = map(float, [*line, 0.0][:5])
    by_length: dict[int, list[float]] = {}
    for case, rounds in found.items():
        by_length.setdefault(case.drafts, []).extend(r.rest / one for r in rounds)
    known = sorted(by_length)
    rising = _rising([_quartile(by_length[n]) for n in known])
    verify = np.interp(range(1, depth + 1), known, rising)
    return RoundTimes(one, (1.0, *map(float, verify)), (once, each, mixer, mlp, head))


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest numbers in squares that do not fall: pools of neighbours that would, at their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [fmean(pool) for pool in pools for _ in pool]


def _not_negative(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without the columns that would come out negative."""
    used = np.ones(rows.shape[1], dtype=bool)
    while True:
        line = np.zeros(rows.shape[1])
        line[used] = np.linalg.lstsq(rows[:, used], wanted, rcond=None)[0]
        if (line >= 0.0).all():
            return line
        used[int(line.argmin())] = False
