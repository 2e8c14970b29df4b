"""`specdec bench`: methods side by side on the same prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from rich.console import Console

from specdec._checks import check_integer
from specdec.acceptance.params import SamplingParams
from specdec.bench.contenders import BASELINE, REFERENCE, Contender, MethodContender, ReferenceContender
from specdec.bench.harness import Measured, Unit, measure, rows_of
from specdec.bench.machine import describe
from specdec.bench.prompts import Prompt, groups_of, load_prompts
from specdec.bench.report import over_reference, table_of, write_json, write_plot
from specdec.cli.drafting import check_drafting, check_useful, note_other_machine, skip_spec, tiers_spec
from specdec.cli.errors import as_option, note
from specdec.cli.progress import unit_progress
from specdec.cli.values import check_plot, check_writable, split_list
from specdec.methods import METHODS, DrafterSpec, MethodOptions, choices, default_drafter, load_drafter_model
from specdec.models import load_model, load_tokenizer
from specdec.models.reference import ReferenceGatedDeltaNet
from specdec.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec.methods.building import DrafterModel

MISMATCH = 1
PIPE_WIDTH = 160  # columns where stdout is no terminal
_SETTING = "\0"  # for a comma within an entry, which no command line can hold


@dataclass(frozen=True)
class Options:
    """The command's options, named as on the command line."""

    methods: str
    model: str
    prompts: Path | None
    batch: str
    drafter: str | None
    oracle_p: float
    draft_tree: str | None
    acceptance: str
    max_new_tokens: int
    temperature: float
    repeats: int
    dtype: str
    max_draft: int
    fixed_draft: bool
    skip: Path | None
    draft_exit: str | None
    draft_int8: bool | None
    tiers: str | None
    exit_adapters: str | None
    commit: str
    json: Path | None
    plot: Path | None


def run(options: Options) -> int:
    """Runs the command; returns the exit code: 0, or 1 where greedy tokens disagree."""
    methods = _methods(options.methods)
    batches = _batches(options.batch)
    try:
        given = default_drafter(options.model) if options.drafter is None else options.drafter
        drafters = [
            DrafterSpec.parse(name, p=options.oracle_p, tree=options.draft_tree)
            for name in split_list(given, "--drafter")
        ]
        skipping = [
            skip_spec(options.skip, exit, options.draft_tree, int8=options.draft_int8)
            for exit in _exits(options.draft_exit)
        ]
        tiered = [
            tiers_spec(tiers, options.exit_adapters, options.draft_tree, int8=options.draft_int8)
            for tiers in ([None] if options.tiers is None else split_list(options.tiers, "--tiers"))
        ]
        rules = split_list(options.acceptance, "--acceptance")
        specs = {name: _specs_of(name, drafters, skipping, tiered) for name in methods}
        for spec in dict.fromkeys([*drafters, *(spec for found in specs.values() for spec in found)]):
            for rule in rules:
                spec.check_acceptance(rule)
        check_integer("max_new_tokens", options.max_new_tokens, 2)
        check_integer("repeats", options.repeats, 1)
        check_drafting(options.max_draft, options.oracle_p)
        sampling = SamplingParams(options.temperature, seed=0)
        prompts = load_prompts(options.prompts)
    except ValueError as error:
        raise as_option(error) from None
    if REFERENCE in methods and not sampling.greedy:
        raise ValueError("--temperature: the method reference decodes greedily, want 0")
    check_useful(
        [spec for found in specs.values() for spec in found],
        sampling,
        rules,
        options.draft_tree,
        options.oracle_p,
        fixed_draft=options.fixed_draft,
        skip=options.skip,
        draft_exit=options.draft_exit,
        draft_int8=options.draft_int8,
        tiers=options.tiers,
        exit_adapters=options.exit_adapters,
    )
    _check_outputs(options)

    tokenizer = load_tokenizer(options.model)
    contenders = _Contenders(specs, rules, options, sampling)
    units = {batch: _units(prompts, batch, tokenizer) for batch in batches}

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    machine = describe()
    console.print(f"{machine}\n{options.model}, {options.dtype}, {len(prompts)} prompts, ", end="")
    console.print(f"{options.max_new_tokens} tokens each, median of {options.repeats}\n")
    measured: list[Measured] = []
    rows: list[dict[str, object]] = []
    with unit_progress(sum(map(len, units.values())), contenders.count * options.repeats) as advance:
        for batch in batches:

            def step(description: str, batch: int = batch) -> None:
                advance(f"batch {batch}, {description}")

            new = measure(
                contenders.at(batch),
                units[batch],
                count=options.max_new_tokens,
                repeats=options.repeats,
                greedy=sampling.greedy,
                progress=step,
            )
            measured += new
            rows += rows_of(new, units[batch], model=options.model, batch=batch)

    console.print(table_of(rows))
    for batch, ratio in over_reference(rows):
        console.print(
            f"\nbatch {batch}: {BASELINE} is {ratio:.2f}x as fast as the reference model in plain PyTorch"
        )
    if not sampling.greedy:
        console.print("\nsampled: tokens were not compared")
    for rule in dict.fromkeys(str(row["acceptance"]) for row in rows if not row["lossless"]):
        console.print(f"{rule} is LOSSY: its text is not of the target's distribution, whatever its speedup")
    if options.json is not None:
        write_json(options.json, machine, rows)
    if options.plot is not None:
        write_plot(options.plot, machine, rows)
    mismatches = [mismatch for m in measured for mismatch in m.mismatches]
    for mismatch in mismatches:
        note(str(mismatch))
    return MISMATCH if mismatches else 0


def _methods(text: str) -> list[str]:
    """The methods asked for, the baseline first."""
    names = split_list(text, "--methods")
    for name in names:
        if name not in METHODS and name != REFERENCE:
            raise ValueError(f"--methods: got {name!r}, want some of {choices([*METHODS, REFERENCE])}")
    return [BASELINE, *(n for n in names if n != BASELINE)]


def _exits(text: str | None) -> Sequence[str | None]:
    """What `--draft-exit` lists; [None] where it was not given. A setting, NAME=NUMBER, belongs to the entry
    before it.
    """
    if text is None:
        return [None]
    joined = re.sub(r",(?=\s*\w+\s*=)", _SETTING, text)
    return [entry.replace(_SETTING, ",") for entry in split_list(joined, "--draft-exit")]


def _specs_of(
    method: str,
    drafters: Sequence[DrafterSpec],
    skipping: Sequence[DrafterSpec],
    tiered: Sequence[DrafterSpec],
) -> Sequence[DrafterSpec]:
    """The drafters that a method is measured with; none where it takes none."""
    known = METHODS.get(method)
    if known is None or not known.drafts:
        return ()
    return skipping if known.skips else tiered if known.tiers else drafters


def _batches(text: str) -> list[int]:
    entries = split_list(text, "--batch")
    if not all(e.isdecimal() and 1 <= int(e) <= 1024 for e in entries):
        raise ValueError(f"--batch: got {text!r}, want numbers from 1 to 1024 separated by commas")
    return [int(e) for e in entries]


def _check_outputs(options: Options) -> None:
    """What would only fail after the measurement is refused before it."""
    check_plot(options.plot)
    check_writable("--json", options.json)


def _units(prompts: list[Prompt], batch: int, tokenizer: Tokenizer) -> list[Unit]:
    return [
        Unit(group[0].kind, [p.name for p in group], [tokenizer.encode(p.prompt) for p in group])
        for group in groups_of(prompts, batch)
    ]


class _Contenders:
    """Loads every model once and makes the contenders of each batch size."""

    def __init__(
        self,
        specs: Mapping[str, Sequence[DrafterSpec]],
        rules: Sequence[str],
        options: Options,
        sampling: SamplingParams,
    ) -> None:
        self._options = options
        self._sampling = sampling
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._entries: list[tuple[str, DrafterSpec | None, str]] = []
        for name, drafters in specs.items():
            if not drafters:
                self._entries.append((name, None, "auto"))
            for spec in drafters:
                # Rules that come to the same are measured once.
                used = {spec.decided_by(rule): rule for rule in reversed(rules)}
                self._entries += [(name, spec, rule) for rule in rules if rule in used.values()]
        self._model = load_model(options.model, dtype=self._dtype)
        self._drafter_models: dict[DrafterSpec, DrafterModel] = {}
        for spec in {spec for _, spec, _ in self._entries if spec is not None and spec.has_model}:
            try:
                self._drafter_models[spec] = load_drafter_model(spec, self._model, dtype=self._dtype)
                note_other_machine(spec, self._model, options.dtype)
            except ValueError as error:
                raise as_option(error) from None
        self._reference = None
        if REFERENCE in specs:
            self._reference = ReferenceGatedDeltaNet.from_directory(options.model, self._dtype)

    @property
    def count(self) -> int:
        """Contenders at each batch size."""
        return len(self._entries)

    def at(self, batch: int) -> list[Contender]:
        """The contenders that decode `batch` sequences together."""
        commit = cast(Literal["deferred", "eager"], self._options.commit)
        made: list[Contender] = []
        for name, spec, rule in self._entries:
            if name == REFERENCE and self._reference is not None:
                made.append(ReferenceContender(self._reference))
                continue
            settings = MethodOptions(
                slots=batch,
                commit=commit,
                max_draft=self._options.max_draft,
                adaptive=not self._options.fixed_draft,
                acceptance=rule,
            )
            drafter_model = None if spec is None else self._drafter_models.get(spec)
            made.append(
                MethodContender(
                    name,
                    spec,
                    self._model,
                    settings,
                    sampling=self._sampling,
                    dtype=self._dtype,
                    drafter_model=drafter_model,
                )
            )
        return made
