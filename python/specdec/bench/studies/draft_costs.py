"""Where the time of self-speculative decoding goes: passes, the bytes that they read, operators, and what
acceptance would pay.

Passes of the target and of its views take turns on one text. With few tokens a pass is mostly reading
weights, so beside each stands what it reads and how fast, and how fast this machine reads memory that it has
not in a cache. What a draft must be worth follows: with c and v(n) as measured, the chance of a drafted token
that gives 1.1 times plain decoding at the best length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, thread_time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from specdec.bench.studies.lab import Lab, Step
from specdec.bench.studies.section import Section
from specdec.bench.timing import interleaved
from specdec.budget import expected_tokens
from specdec.cache import Steps
from specdec.methods import DrafterSpec
from specdec.methods.building import Skipped, skipped_by
from specdec.models.base import CausalLM
from specdec.models.skipping import SkipSet
from specdec.tuning.reading import Reading

TITLE = "Where the time goes"
DRAFTS = (1, 2, 3, 4, 6, 8, 12)
DEPTH = 4  # drafts read at each place of a text
WANTED = 1.1
OPERATORS = 6  # of each pass, the longest
CACHE = 1 << 25  # bytes, about what a processor's last cache holds
STREAM = 1 << 28  # bytes, more than any cache holds

Result = dict[str, Any]


def steps(lab: Lab) -> int:
    """Calls of `step` that `measure` makes."""
    return 4


@torch.inference_mode()
def measure(lab: Lab, step: Step) -> Result:
    """Times passes, reads texts with every view and profiles a plain and a drafting pass."""
    model = lab.model
    views = _views(lab)
    passes = _Passes(model, lab.units(1, 1)[0].prompts[0])
    functions: dict[str, Callable[[], object]] = {"plain": passes.verify(0)}
    functions |= {f"verify {n}": passes.verify(n) for n in DRAFTS}
    functions |= {name: passes.draft(view) for name, view in views.items()}
    us = interleaved(functions, 1.0 if lab.quick else 30.0, layers=1)
    step("passes")
    bandwidth = _bandwidth()
    step("memory")
    itemsize = model.head.dtype.itemsize
    accepted = _accepted(lab, views)
    step("texts")
    rows = [
        {"name": name, "us": us[name], "bytes": view.num_parameters * itemsize, **told}
        for name, view in {"plain": model, **views}.items()
        for told in [{"accepted": accepted[name]} if name in accepted else {}]
    ]
    operators = {name: _operators(functions[name]) for name in ("plain", next(iter(views)))}
    step("operators")
    return {
        "set": _told(_skipped(lab)),
        "passes": rows,
        "verify": {str(n): us[f"verify {n}"] / us["plain"] for n in DRAFTS},
        "bandwidth": bandwidth,
        "operators": operators,
    }


def _skipped(lab: Lab) -> Skipped:
    return skipped_by(DrafterSpec.skipping(lab.skip, exit="fixed"), lab.model)


def _told(skipped: Skipped) -> str:
    known = "" if skipped.vocabulary is None else f"; {len(skipped.vocabulary)} tokens are drafted"
    return f"{skipped.skips}{known}"


def _views(lab: Lab) -> dict[str, Any]:
    """What drafts are made with, by name."""
    model, (skips, vocabulary, _) = lab.model, _skipped(lab)
    return {
        "set": model.skipping(skips, vocabulary),
        "set, int8": model.skipping(skips, vocabulary, int8=True),
        "nothing skipped, int8": model.skipping(SkipSet(), int8=True),
    }


class _Passes:
    """Passes of one sequence whose memory is a prompt."""

    def __init__(self, model: CausalLM, prompt: Sequence[int]) -> None:
        self._model = model
        self._prompt = list(prompt)
        self._slots = torch.tensor([0], dtype=torch.int32)
        self._rng = torch.Generator().manual_seed(0)

    def _cache(self) -> Any:
        cache = self._model.new_cache(1)
        self._model.prefill([self._prompt], cache=cache, slots=[0])
        return cache

    def verify(self, drafts: int) -> Callable[[], object]:
        """A pass of the target over 1 + `drafts` tokens, which folds in one token of the pass before."""
        cache, one = self._cache(), torch.tensor([1], dtype=torch.int32)
        tokens = torch.randint(self._model.vocab_size, (1, 1 + drafts), generator=self._rng)
        length = cache.lengths.clone()

        def run() -> None:
            cache.lengths.copy_(length)  # the text stays as long as it was
            _, factors = self._model.forward(tokens, cache=cache, slots=self._slots)
            cache.defer(factors, None, one)

        return run

    def draft(self, view: CausalLM) -> Callable[[], object]:
        """A pass of a view over a drafted token with two before it."""
        cache, steps = self._cache(), Steps()
        tokens = torch.randint(self._model.vocab_size, (1, 3), generator=self._rng)
        steps.extend(view.forward(tokens[:, :2], cache=cache, slots=self._slots)[1])
        return lambda: view.forward(tokens[:, 2:], cache=cache, slots=self._slots, prefix=steps)


def _bandwidth() -> float:
    """Bytes a second of reading memory in a row, the best of some sums over more than a cache holds."""
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter  # as passes are timed
    numbers = torch.ones(STREAM // 4)
    numbers.sum()
    times = []
    for _ in range(5):
        begin = clock()
        numbers.sum()
        times.append(clock() - begin)
    return STREAM / min(times)


def _accepted(lab: Lab, views: Mapping[str, Any]) -> dict[str, list[float]]:
    """Of all places of texts the share where drafts 1, 2, ... are the target's, were those before right."""
    texts = []
    few = lab.quick or lab.large
    for unit in lab.units(1, 1 if few else 2):
        texts += [(unit.prompts[0], tokens) for tokens in lab.decoded(unit, 32 if few else 64)]
    reading = Reading(lab.model, texts, DEPTH)
    found = {}
    for name, view in views.items():
        kept = reading.outcomes(view).right.cumprod(-1).float().mean((0, 1))  # [K] all right up to here
        found[name] = kept.tolist()
    return found


def _operators(run: Callable[[], object]) -> list[dict[str, Any]]:
    """The longest operators of a pass by their own time, in microseconds a pass, and all others."""
    repeats = 20
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            run()
    rows = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
    told = [
        {"name": e.key, "calls": e.count / repeats, "us": e.self_cpu_time_total / repeats}
        for e in rows[:OPERATORS]
    ]
    rest = sum(e.self_cpu_time_total for e in rows[OPERATORS:]) / repeats
    return [*told, {"name": "others", "calls": sum(e.count for e in rows[OPERATORS:]) / repeats, "us": rest}]


def best(chance: float, cost: float, verify: Mapping[str, float]) -> tuple[float, int]:
    """The best speedup over all lengths that were measured, and that length.

    Args:
        chance: of a drafted token, given that those before it were kept.
        cost: of drafting one, in plain passes.
        verify: by number of drafts, what the target's pass takes, in plain ones.
    """
    return max((expected_tokens(chance, int(n)) / (int(n) * cost + v), int(n)) for n, v in verify.items())


def needed(cost: float, verify: Mapping[str, float], speedup: float) -> float | None:
    """The least chance of a drafted token that gives this speedup; None where no chance does."""
    if best(1.0, cost, verify)[0] < speedup:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if best(middle, cost, verify)[0] >= speedup else (middle, high)
    return high


def sections(result: Result) -> list[Section]:
    """Passes, verification, what acceptance pays, operators."""
    plain = result["passes"][0]
    return [
        Section(
            "Passes",
            [
                f"The set leaves out: {result['set']}.",
                "Of one token, with the bytes of the weights that it reads. This machine reads memory in a "
                f"row at {result['bandwidth'] / 1e9:.1f} GB/s; what fits a cache comes faster.",
            ],
            ["", "ms", "in plain passes (c)", "MB", "of plain's", "GB/s"],
            [
                [
                    row["name"],
                    f"{row['us'] / 1e3:.2f}",
                    f"{row['us'] / plain['us']:.2f}",
                    f"{row['bytes'] / 1e6:.1f}",
                    f"{row['bytes'] / plain['bytes']:.2f}",
                    f"{row['bytes'] / row['us'] / 1e3:.1f}",
                ]
                for row in result["passes"]
            ],
        ),
        Section(
            "Verification",
            ["The target's pass over a draft, in plain passes (v)."],
            ["drafts", *result["verify"]],
            [["v", *(f"{v:.2f}" for v in result["verify"].values())]],
        ),
        Section("What it takes", account(result), *_worth(result)),
        *(
            Section(
                f"Operators of a pass: {name}",
                ["By torch's profiler, which makes short calls longer: their own microseconds in a pass."],
                ["", "calls", "us", "share"],
                [
                    [row["name"], f"{row['calls']:.0f}", f"{row['us']:.0f}", f"{row['us'] / total:.0%}"]
                    for row in rows
                ],
            )
            for name, rows in result["operators"].items()
            for total in [sum(row["us"] for row in rows)]
        ),
    ]


def _worth(result: Result) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what a draft must be right for, how often it is, and what that would bring."""
    plain, verify = result["passes"][0]["us"], result["verify"]
    rows = []
    for row in result["passes"][1:]:
        cost = row["us"] / plain
        wants = [needed(cost, verify, speedup) for speedup in (1.0, WANTED)]
        bound = best(1.0, cost, verify)
        cells = [row["name"], f"{cost:.2f}", *("never" if a is None else f"{a:.2f}" for a in wants)]
        cells.append(f"{bound[0]:.2f}x with {bound[1]}")
        if "accepted" in row:
            chance = _chance(row["accepted"])
            reached = best(chance, cost, verify)
            cells += [f"{chance:.2f}", f"{reached[0]:.2f}x with {reached[1]}"]
        rows.append([*cells, *[""] * (7 - len(cells))])
    head = [
        "",
        "c",
        "a for 1.0x",
        f"a for {WANTED:g}x",
        "if all were right",
        "a read on texts",
        "that would give",
    ]
    return head, rows


def _chance(accepted: Sequence[float]) -> float:
    """The constant chance that keeps as many of so many drafts."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        kept = expected_tokens(middle, len(accepted)) - 1.0
        low, high = (middle, high) if kept < sum(accepted) else (low, middle)
    return high


def account(result: Result) -> list[str]:
    """What bounds the speedup on this machine, in words."""
    plain, *views = result["passes"]
    verify, first = result["verify"], views[0]
    speed, memory = plain["bytes"] / plain["us"] / 1e3, result["bandwidth"] / 1e9
    kind = "The weights fit a cache"
    if plain["bytes"] > CACHE:
        reading = speed > 0.5 * memory
        kind = "Reading weights is what takes the time" if reading else "Reading weights is not all there is"
    n = DRAFTS[3]
    v = verify[str(n)]
    told = [
        f"{kind}: a plain pass reads {plain['bytes'] / 1e6:.0f} MB at {speed:.1f} GB/s. The set leaves "
        f"{1.0 - first['bytes'] / plain['bytes']:.0%} of it out and saves "
        f"{1.0 - first['us'] / plain['us']:.0%} of the time; what it cannot leave out is the head.",
        f"Verifying {n} drafts takes {v:.2f} plain passes, so that drafts that cost nothing and were all "
        f"right would give {(n + 1) / v:.2f}x with {n}.",
    ]
    gains = []
    for row in views:
        if "accepted" in row:
            chance = _chance(row["accepted"])
            gains.append((best(chance, row["us"] / plain["us"], verify)[0], row, chance))
    if gains:
        speedup, row, chance = max(gains, key=lambda gain: gain[0])
        told.append(
            f'Of these drafts those of "{row["name"]}" bring most: c = {row["us"] / plain["us"]:.2f} and '
            f"a = {chance:.2f} give {speedup:.2f}x before what the loop itself takes."
        )
    return told


def draw(result: Result, figure: Any) -> None:
    """Speedup by chance, a line a view, with a mark where texts are."""
    figure.set_size_inches(7, 4.5)
    axes = figure.subplots()
    plain, *views = result["passes"]
    chances = [i / 100 for i in range(30, 101)]
    for row in views:
        cost = row["us"] / plain["us"]
        line = [best(a, cost, result["verify"])[0] for a in chances]
        (drawn,) = axes.plot(chances, line, label=f"{row['name']}, c = {cost:.2f}")
        if "accepted" in row:
            chance = _chance(row["accepted"])
            axes.plot([chance], [best(chance, cost, result["verify"])[0]], "o", color=drawn.get_color())
    axes.axhline(1.0, color="0.4", linewidth=0.8)
    axes.set_xlabel("chance a that a drafted token is kept (mark: as read on texts)")
    axes.set_ylabel("speedup at the best length")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
