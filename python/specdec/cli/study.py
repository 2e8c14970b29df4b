"""`specdec bench --study`: a fixed set of measurements with a report in files."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from specdec.bench.machine import describe
from specdec.bench.prompts import Prompt, load_prompts
from specdec.bench.studies import hispec, self_speculative, specla
from specdec.bench.studies.lab import Lab
from specdec.bench.studies.report import Report, Study
from specdec.cli.drafting import note_other_machine, skip_spec
from specdec.cli.errors import as_option, note
from specdec.cli.progress import unit_progress
from specdec.cli.values import open_for_writing, split_list
from specdec.methods import DrafterSpec, choices, load_skip_file, read_skip_file
from specdec.models import load_model, load_tokenizer
from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

MISMATCH = 1
PIPE_WIDTH = 160  # columns where stdout is no terminal
DRAFTERS = ("ngram", "adapted", "adapted+ngram", "exit:2")
STUDIES = {study.name: study for study in (specla.STUDY, self_speculative.STUDY, hispec.STUDY)}
# Options of every study, and of one.
TAKES = ("quick", "out", "json", "model", "prompts", "dtype")
OWN = {
    specla.STUDY.name: ("drafter",),
    self_speculative.STUDY.name: ("skip",),
    hispec.STUDY.name: ("exit_adapters",),
}
DEFAULT_MODEL = "gdn-code"  # whose files have no model in their names


@dataclass(frozen=True)
class Options:
    """The command's options, named as on the command line.

    Attributes:
        given: those that the user gave, by parameter name.
        drafters: names of the drafters of specla, comma-separated; None for `DRAFTERS`.
        skip: file of the sub-layers that self-speculative leaves out; None for the set of the model.
        exit_adapters: directory of the adapters of hispec, or "none"; None for those of the model.
    """

    study: str
    given: Sequence[str]
    quick: bool
    out: Path
    json: Path | None
    model: str
    prompts: Path | None
    drafters: str | None
    skip: Path | None
    exit_adapters: str | None
    dtype: str


def run(options: Options) -> int:
    """Runs the command; returns the exit code: 0, or 1 where tokens differ that may not."""
    study = STUDIES.get(options.study)
    if study is None:
        raise ValueError(f"--study: got {options.study!r}, want one of {choices(STUDIES)}")
    _refuse_others(study, options.given)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--study: needs matplotlib (the package's extra 'plot')")
    names = DRAFTERS if options.drafters is None else split_list(options.drafters, "--drafter")
    try:
        prompts = load_prompts(options.prompts)
        for name in names:
            DrafterSpec.parse(name)
        if options.skip is not None:
            read_skip_file(options.skip)
    except ValueError as error:
        raise as_option(error) from None
    for option, path in (("--out", options.out), ("--json", options.json)):
        _check_writable(option, path, directory=option == "--out")
    lab = _lab(study, options, prompts, names)

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    machine, about = describe(), f"{options.model}, {options.dtype}, {len(prompts)} prompts, greedy."
    if options.quick:
        about += " Quick: small sizes and few repeats, to see that it runs; the figures say little."
    console.print(f"{machine}\n{about}", markup=False)
    report = Report(
        study,
        options.out,
        _stem(study, options.model),
        options.json,
        machine=machine,
        command=_command(options),
        about=about,
    )
    every = 25  # runs, where there is no bar, a line on stderr
    with unit_progress(-(-sum(study.steps(lab).values()) // every), every) as advance:
        written = study.run(lab, report, advance, console)
    console.print("\n" + "\n".join(f"written: {path}" for path in written), markup=False)
    for mismatch in report.mismatches:
        note(mismatch)
    return MISMATCH if report.mismatches else 0


def _lab(study: Study, options: Options, prompts: list[Prompt], drafters: Sequence[str]) -> Lab:
    model = load_model(options.model, dtype=getattr(torch, options.dtype))
    tokenizer = load_tokenizer(options.model)
    if study is specla.STUDY:
        if not isinstance(model, GatedDeltaNetForCausalLM):
            raise ValueError(f"--model: got {options.model}, want a Gated DeltaNet for this study")
        return Lab(model, tokenizer, prompts, drafters, quick=options.quick)
    if study is hispec.STUDY:
        lab = Lab(model, tokenizer, prompts, exit_adapters=options.exit_adapters, quick=options.quick)
        try:
            lab.exits()
        except ValueError as error:
            raise as_option(error) from None
        return lab
    spec = skip_spec(options.skip, None, None)
    try:
        load_skip_file(spec, model)
    except ValueError as error:
        raise as_option(error) from None
    note_other_machine(spec, model, options.dtype)
    return Lab(model, tokenizer, prompts, skip=spec.model or None, quick=options.quick)


def _stem(study: Study, model: str) -> str:
    """What the names of a study's files begin with."""
    return study.name if model == DEFAULT_MODEL else f"{study.name}-{Path(model).stem}"


def _refuse_others(study: Study, given: Iterable[str]) -> None:
    """A study says itself what it measures: an option that would change nothing is an error."""
    takes = (*TAKES, *OWN.get(study.name, ()))
    for name in given:
        if name not in ("study", *takes):
            wanted = ", ".join(f"--{option.replace('_', '-')}" for option in takes)
            raise ValueError(f"--{name.replace('_', '-')}: the study {study.name} takes none, only {wanted}")


def _check_writable(name: str, path: Path | None, *, directory: bool) -> None:
    """What would only fail after the measurement is refused before it."""
    if path is None:
        return
    if directory and path.exists() and not path.is_dir():
        raise ValueError(f"{name}: cannot write {path} (not a directory)")
    try:
        (path if directory else path.parent).mkdir(parents=True, exist_ok=True)
        if directory:
            with tempfile.TemporaryFile(dir=path):
                pass
        else:
            open_for_writing(path)
    except OSError as error:
        raise ValueError(f"{name}: cannot write {path} ({error.strerror})") from None


def _command(options: Options) -> list[str]:
    """What to type to have it again."""
    command = ["specdec", "bench", "--study", options.study]
    values = {
        "--quick": options.quick,
        "--out": options.out,
        "--json": options.json,
        "--model": options.model,
        "--prompts": options.prompts,
        "--drafter": options.drafters,
        "--skip": options.skip,
        "--exit-adapters": options.exit_adapters,
        "--dtype": options.dtype,
    }
    for option, value in values.items():
        if option[2:].replace("-", "_") in options.given and value:
            command += [option] if value is True else [option, str(value)]
    return command
