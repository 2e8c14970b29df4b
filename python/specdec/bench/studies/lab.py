"""What the parts of a study share: the model, the prompts, and runs that are compared with plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from specdec.acceptance.params import SamplingParams
from specdec.bench.contenders import BASELINE, Contender, MethodContender, Run
from specdec.bench.harness import Measured, Unit, measure, speedup_of
from specdec.bench.prompts import Prompt, groups_of
from specdec.loop import Loop
from specdec.methods import DrafterSpec, MethodOptions, load_drafter_model
from specdec.methods.hispec import exit_adapters, exits_of
from specdec.models.base import CausalLM
from specdec.models.exit_adapter import ExitAdapters
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
from specdec.models.llama import LlamaForCausalLM
from specdec.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec.methods.building import DrafterModel

LARGE = 50_000_000  # weights
METHOD_OF = {"skip": "self-speculative", "tiers": "hispec"}  # by kind of drafter; specla of the others
Step = Callable[[str], None]  # told what was measured


def after(prefix: str, step: Step) -> Step:
    """`step` with a prefix before what it is told."""
    return lambda text: step(f"{prefix}, {text}")


@dataclass(frozen=True)
class Entry:
    """A way to decode that is compared with plain decoding.

    Attributes:
        name: in tables.
        drafter: its drafter.
        max_draft: most draft tokens a round.
        adaptive: draft only what pays.
        commit: "deferred" or "eager".
        strategy: of verification; "exact" is what a model does by itself.
        watch: is shown every loop before it runs, that of the warm-up first.
    """

    name: str
    drafter: DrafterSpec
    max_draft: int = 16
    adaptive: bool = True
    commit: str = "deferred"
    strategy: str = "exact"
    watch: Callable[[Loop], None] | None = None


class Lab:
    """A loaded target, its prompts and its drafters' models.

    Args:
        model: the target.
        tokenizer: of the target.
        prompts: texts to continue.
        drafters: names of the drafters to compare, as `--drafter` takes them.
        skip: file of the sub-layers that self-drafting leaves out; None: the set that comes with the target.
        exit_adapters: directory of the adapters of early exits; None: those that come with the target;
            "none": exits are read as they are.
        quick: few prompts and repeats: does it run?
    """

    def __init__(
        self,
        model: GatedDeltaNetForCausalLM | LlamaForCausalLM,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        drafters: Sequence[str] = (),
        *,
        skip: str | None = None,
        exit_adapters: str | None = None,
        quick: bool = False,
    ) -> None:
        self.model = model
        self.drafters = tuple(drafters)
        self.skip = skip
        self.exit_adapters = exit_adapters
        self.quick = quick
        self._prompts = list(prompts)
        self._tokenizer = tokenizer
        self._drafter_models: dict[DrafterSpec, DrafterModel | None] = {}

    @property
    def large(self) -> bool:
        """Whether fewer prompts and tokens have to do, as the target is large."""
        return self.model.num_parameters > LARGE

    @cached_property
    def adapters(self) -> ExitAdapters:
        """The adapters of `exit_adapters`, read once. Raises ValueError where they cannot be had."""
        return exit_adapters(self.model, self.exit_adapters or "")

    def exits(self) -> tuple[int, ...]:
        """The early exits that are measured. Raises ValueError like `adapters`."""
        return exits_of(self.model, self.adapters)

    def units(self, batch: int, each: int) -> list[Unit]:
        """Batches of prompts of one kind, at most `each` of every kind (with --quick one)."""
        groups: dict[str, list[list[Prompt]]] = {}
        for group in groups_of(self._prompts, batch):
            groups.setdefault(group[0].kind, []).append(group)
        chosen = [group for of_kind in groups.values() for group in of_kind[: 1 if self.quick else each]]
        return [
            Unit(g[0].kind, [p.name for p in g], [self._tokenizer.encode(p.prompt) for p in g])
            for g in chosen
        ]

    def unavailable(self, drafter: DrafterSpec) -> str | None:
        """Why a drafter cannot be had for this target; None where it can."""
        try:
            self._drafter_model(drafter)
        except ValueError as error:
            return str(error)
        return None

    def compare(
        self,
        entries: Sequence[Entry],
        units: Sequence[Unit],
        *,
        batch: int,
        count: int,
        repeats: int,
        step: Step,
    ) -> list[dict[str, Any]]:
        """Times entries and plain decoding in turn, greedily; a row an entry, of sums over its runs.

        `speedup` is the median over the turns of the ratio to plain decoding in the same turn, and its
        geometric mean over the units. It is given also where tokens differ, which `different_tokens` counts
        (of `compared_tokens`).
        """
        measured = self.measured(entries, units, batch=batch, count=count, repeats=repeats, step=step)
        return self.rows(entries, units, measured, batch)

    def measured(
        self,
        entries: Sequence[Entry],
        units: Sequence[Unit],
        *,
        batch: int,
        count: int,
        repeats: int,
        step: Step,
    ) -> list[Measured]:
        """The runs of plain decoding, then those of every entry; all took turns, greedily."""
        contenders: list[Contender] = [self.contender(None, batch)]
        contenders += [self.contender(entry, batch) for entry in entries]
        return measure(contenders, units, count=count, repeats=repeats, greedy=True, progress=step)

    @staticmethod
    def rows(
        entries: Sequence[Entry], units: Sequence[Unit], measured: Sequence[Measured], batch: int
    ) -> list[dict[str, Any]]:
        """A row an entry of what `measured` gave, as `compare`."""
        baseline = measured[0]
        known = [runs[0].tokens for runs in baseline.runs]
        return [
            {"name": entry.name, "batch": batch, "strategy": entry.strategy}
            | _summary(m, baseline, known, units)
            for entry, m in zip(entries, measured[1:], strict=True)
        ]

    def decoded(self, unit: Unit, count: int) -> list[list[int]]:
        """How the target goes on after each prompt, greedily, `count` tokens."""
        return self.contender(None, len(unit.prompts)).run(unit.prompts, count, []).tokens

    def contender(self, entry: Entry | None, batch: int) -> MethodContender:
        """What runs an entry; None: plain decoding. All greedily."""
        sampling = SamplingParams(0.0, seed=0)
        if entry is None:
            options = MethodOptions(slots=batch)
            return MethodContender(
                BASELINE, None, self.model, options, sampling=sampling, dtype=self.model.dtype
            )
        options = MethodOptions(
            slots=batch,
            commit="eager" if entry.commit == "eager" else "deferred",
            max_draft=entry.max_draft,
            adaptive=entry.adaptive,
        )
        return MethodContender(
            METHOD_OF.get(entry.drafter.kind, "specla"),
            entry.drafter,
            self._with_strategy(entry.strategy),
            options,
            sampling=sampling,
            dtype=self.model.dtype,
            drafter_model=self._drafter_model(entry.drafter),
            watch=entry.watch,
        )

    def _with_strategy(self, strategy: str) -> CausalLM:
        if strategy == "exact":
            return self.model
        if not isinstance(self.model, GatedDeltaNetForCausalLM):
            raise ValueError(f"strategy: got {strategy!r}, want a Gated DeltaNet for another one than exact")
        return self.model.with_strategy(strategy)

    def _drafter_model(self, drafter: DrafterSpec) -> DrafterModel | None:
        """Loaded once; None for drafters without a model."""
        if drafter not in self._drafter_models:
            self._drafter_models[drafter] = (
                load_drafter_model(drafter, self.model, dtype=self.model.dtype) if drafter.has_model else None
            )
        return self._drafter_models[drafter]


def _summary(
    m: Measured, baseline: Measured, known: Sequence[Sequence[Sequence[int]]], units: Sequence[Unit]
) -> dict[str, Any]:
    runs = [run for unit in m.runs for run in unit]
    # What interrupts a run only makes it slower: of every unit the fastest turn says what rounds take.
    fastest, plain = ([min(unit, key=_seconds) for unit in which.runs] for which in (m, baseline))
    of_fastest = [run.statistics for run in fastest if run.statistics is not None]
    told = [run.statistics for run in runs if run.statistics is not None]
    rounds, drafted = sum(r.rounds for r in runs), sum(r.drafted for r in runs)
    wrong = [
        sum(x != y for x, y in zip(a, b, strict=True))
        for texts, unit in zip(known, m.runs, strict=True)
        for run in unit
        for a, b in zip(texts, run.tokens, strict=True)
    ]
    kinds: dict[str, list[int]] = {}
    for number, of in enumerate(units):
        kinds.setdefault(of.kind, []).append(number)
    return {
        "speedup": speedup_of(m, baseline, range(len(m.runs))),
        "speedup_by_kind": {kind: speedup_of(m, baseline, chosen) for kind, chosen in kinds.items()},
        "tokens_per_second": sum(r.emitted for r in fastest) / sum(r.seconds for r in fastest),
        "tokens_per_round": sum(r.emitted for r in runs) / rounds,
        "rounds": rounds,
        "drafting_rounds": sum(s.drafting_rounds for s in told),
        "complete_rounds": sum(s.complete_rounds for s in told),
        "levels": sum(s.levels for s in told),
        "drafted": drafted,
        "accepted": sum(r.accepted for r in runs),
        "acceptance_rate": sum(r.accepted for r in runs) / drafted if drafted else 0.0,
        "drafted_at": _sums(s.drafted_at for s in told),
        "accepted_at": _sums(s.accepted_at for s in told),
        "fastest_rounds": sum(r.rounds for r in fastest),
        "fastest_levels": sum(s.levels for s in of_fastest),
        "fastest_drafting_rounds": sum(s.drafting_rounds for s in of_fastest),
        "draft_seconds": sum(s.seconds.draft for s in of_fastest),
        "round_seconds": sum(r.seconds for r in fastest),
        "verify_seconds_per_round": sum(s.seconds.verify for s in told) / rounds,
        "seconds_per_round": sum(r.seconds for r in runs) / rounds,
        "plain_seconds_per_round": sum(r.seconds for r in plain) / sum(r.rounds for r in plain),
        "different_tokens": sum(wrong),
        "different_texts": sum(count > 0 for count in wrong),
        "compared_texts": len(wrong),
        "compared_tokens": sum(len(text) for unit in m.runs for run in unit for text in run.tokens),
    }


def _seconds(run: Run) -> float:
    return run.seconds / run.rounds


def _sums(rows: Iterable[Sequence[int]]) -> list[int]:
    """Column by column, of rows of several lengths."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
