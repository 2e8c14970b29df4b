"""Runs contenders on the same prompts, interleaved, and sums up what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from specdec._rules import is_lossless
from specdec.bench.contenders import BASELINE, REFERENCE, Contender, Run, Tokens


@dataclass(frozen=True)
class Unit:
    """A batch of prompts that are decoded together.

    Attributes:
        kind: of all its prompts.
        names: of the prompts.
        prompts: their token ids.
    """

    kind: str
    names: list[str]
    prompts: list[list[int]]


@dataclass(frozen=True)
class Mismatch:
    """A token that is not the baseline's.

    Attributes:
        method: which contender wrote it.
        drafter: its drafter's label, or None.
        kind: of the prompt.
        name: of the prompt.
        position: of the token among the emitted ones, from 0.
    """

    method: str
    drafter: str | None
    kind: str
    name: str
    position: int

    def __str__(self) -> str:
        who = self.method if self.drafter is None else f"{self.method} ({self.drafter})"
        return (
            f"{who}: another token than {BASELINE}'s at position {self.position} of {self.kind}/{self.name}"
        )


@dataclass
class Measured:
    """All runs of one contender at one batch size.

    Attributes:
        contender: which.
        runs: [unit][repeat].
        compared: whether its tokens were compared with the baseline's (greedy decoding).
        mismatches: where they differed; at most one a prompt.
    """

    contender: Contender
    runs: list[list[Run]] = field(default_factory=list)
    compared: bool = True
    mismatches: list[Mismatch] = field(default_factory=list)


def measure(
    contenders: Sequence[Contender],
    units: Sequence[Unit],
    *,
    count: int,
    repeats: int,
    greedy: bool,
    progress: Callable[[str], None] = lambda description: None,
) -> list[Measured]:
    """Times every contender on every unit.

    On each unit the contenders take turns, `repeats` times, in an order that is reversed from turn to turn,
    so that a slow moment of the machine meets all of them. The baseline's text is decoded first, untimed; it
    is what tokens are compared with and what an oracle knows.

    Args:
        contenders: the baseline among them.
        units: what to decode.
        count: tokens a sequence.
        repeats: timed runs of each contender on each unit.
        greedy: whether tokens can be compared.
        progress: called with a description after every timed run.
    """
    baseline = next(c for c in contenders if c.method == BASELINE)
    measured = [Measured(c, compared=greedy) for c in contenders]
    _warm_up(contenders, units[0], count)
    for unit in units:
        known: Tokens = baseline.run(unit.prompts, count, []).tokens
        for m in measured:
            m.runs.append([])
        for repeat in range(repeats):
            for m in measured if repeat % 2 == 0 else reversed(measured):
                run = m.contender.run(unit.prompts, count, known, repeat)
                m.runs[-1].append(run)
                if m.compared and (repeat == 0 or m.contender.method != REFERENCE):
                    _compare(m, unit, known, run)
                progress(f"{unit.kind}/{unit.names[0]}")
    return measured


def _warm_up(contenders: Iterable[Contender], unit: Unit, count: int) -> None:
    known: Tokens = [[0] * count] * len(unit.prompts)
    for contender in contenders:
        contender.run(unit.prompts, min(count, 8), known)


def _compare(measured: Measured, unit: Unit, known: Tokens, run: Run) -> None:
    contender = measured.contender
    label = None if contender.drafter is None else contender.drafter.label
    for row, position in contender.differences(unit.prompts, known, run.tokens):
        new = Mismatch(contender.method, label, unit.kind, unit.names[row], position)
        if new not in measured.mismatches:
            measured.mismatches.append(new)


Row = Mapping[str, object]


def rows_of(
    measured: Sequence[Measured], units: Sequence[Unit], *, model: str, batch: int
) -> list[dict[str, object]]:
    """One row a contender over all prompts, then one for each kind.

    A unit's figures are medians over its repeats, those of a row geometric means over its units. A speedup is
    the median of the ratios to the baseline's run of the same turn; None where tokens disagree.
    """
    baseline = next(m for m in measured if m.contender.method == BASELINE)
    rows = []
    for m in measured:
        kinds = [None, *dict.fromkeys(unit.kind for unit in units)]
        for kind in kinds:
            chosen = [i for i, unit in enumerate(units) if kind in (None, unit.kind)]
            rows.append(_row(m, baseline, chosen, kind, model, batch))
    return rows


def _row(
    m: Measured, baseline: Measured, chosen: Sequence[int], kind: str | None, model: str, batch: int
) -> dict[str, object]:
    drafter = m.contender.drafter
    row: dict[str, object] = {
        "method": m.contender.method,
        "drafter": None if drafter is None else drafter.name,
        "acceptance": m.contender.acceptance,
        "lossless": is_lossless(m.contender.acceptance),
        "model": model,
        "batch": batch,
    }
    if drafter is not None and drafter.kind == "oracle":
        row["oracle_p"] = drafter.p
    if drafter is not None and drafter.other_tree is not None:
        row["draft_tree"] = drafter.other_tree
    if drafter is not None and drafter.int8 is not None:
        row["draft_int8"] = drafter.int8
    if drafter is not None and drafter.exit:
        row["draft_exit"] = drafter.exit
    if kind is not None:
        row["kind"] = kind
    runs = [m.runs[i] for i in chosen]
    every = [run for unit_runs in runs for run in unit_runs]
    rounds, drafted = sum(r.rounds for r in every), sum(r.drafted for r in every)
    row["tokens_per_second"] = _geometric_mean(median(map(_rate, unit_runs)) for unit_runs in runs)
    row["rounds_per_second"] = _geometric_mean(
        median(r.rounds / r.seconds for r in unit_runs) for unit_runs in runs
    )
    row["speedup"] = None if m.mismatches else speedup_of(m, baseline, chosen)
    row["mean_accepted_length"] = sum(r.emitted for r in every) / rounds
    row["drafted"] = drafted  # in all runs
    row["acceptance_rate"] = sum(r.accepted for r in every) / drafted if drafted else 0.0
    deciding = [r.statistics.seconds.accept for r in every if r.statistics is not None]
    measured_apart = len(deciding) == len(every)
    row["acceptance_share"] = sum(deciding) / sum(r.seconds for r in every) if measured_apart else None
    row["tokens_match"] = not m.mismatches if m.compared else None
    return row


def speedup_of(m: Measured, baseline: Measured, chosen: Iterable[int]) -> float:
    """Over the chosen units: the median of the ratios to the baseline's run of the same turn, and the
    geometric mean of these medians.
    """
    return _geometric_mean(
        median(_rate(ours) / _rate(theirs) for ours, theirs in zip(m.runs[i], baseline.runs[i], strict=True))
        for i in chosen
    )


def _rate(run: Run) -> float:
    return run.emitted / run.seconds


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs))
