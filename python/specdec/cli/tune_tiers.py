"""`specdec tune --method hispec`: a sweep of exits and lengths of early-exit drafting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from specdec._checks import check_number
from specdec.bench.machine import describe, machine
from specdec.cli.errors import INTERRUPTED, as_option, note
from specdec.cli.progress import progress_bar
from specdec.cli.values import check_plot, check_writable
from specdec.methods.hispec import exit_adapters
from specdec.models import load_model, load_tokenizer
from specdec.models.checkpoint import write_json
from specdec.training.running import interruptible
from specdec.tuning import tier_sweep
from specdec.tuning.texts import cut_prompts

PIPE_WIDTH = 160  # columns where stdout is no terminal


@dataclass(frozen=True)
class Options:
    """The command's options, named as on the command line."""

    model: str
    text: Path | None
    dtype: str
    exit_adapters: str | None
    draft_int8: bool
    seconds: float
    json: Path | None
    plot: Path | None


def run(options: Options) -> int:
    """Runs the command; returns the exit code: 0, or 130 where Ctrl-C ended it before all was measured."""
    if options.text is None:
        raise ValueError("--text: missing, want one with --model")
    try:
        check_number("seconds", options.seconds, 0.0)
    except ValueError as error:
        raise as_option(error) from None
    check_plot(options.plot)
    check_writable("--json", options.json)
    try:
        model = load_model(options.model, dtype=getattr(torch, options.dtype))
        adapters = exit_adapters(model, options.exit_adapters or "")
        plans = tier_sweep.plans_of(model, adapters)
        prompts = cut_prompts(options.text, load_tokenizer(options.model), tier_sweep.PROMPTS)
    except ValueError as error:
        raise as_option(error) from None
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    int8 = ", exits read through an int8 head" if options.draft_int8 else ""
    about = f"{options.model}, {options.dtype}{int8}, {len(prompts)} prompts from {options.text}"
    console.print(f"{describe()}\n{about}, {len(plans)} settings", markup=False)
    with interruptible() as asked, progress_bar() as progress:
        task = progress.add_task("", total=None)
        found = tier_sweep.sweep(
            model,
            prompts,
            adapters=adapters,
            int8=options.draft_int8,
            seconds=options.seconds,
            on_run=lambda name: progress.update(task, advance=1, description=name),
            should_stop=lambda: bool(asked),
        )
    if found is None:
        note("stopped before all settings were measured")
        return INTERRUPTED
    tier_sweep.table_of(found).print(console)
    said = tier_sweep.sentence(found)
    console.print(f"\n{said}", markup=False, soft_wrap=True)
    if options.json is not None:
        report = {
            "machine": machine(),
            "model": options.model,
            "dtype": options.dtype,
            "draft_int8": options.draft_int8,
            "sentence": said,
            "rows": [f.as_dict() for f in found],
        }
        write_json(options.json, report)
    if options.plot is not None:
        tier_sweep.draw(options.plot, found, f"{about}\n{describe()}")
    return 0
