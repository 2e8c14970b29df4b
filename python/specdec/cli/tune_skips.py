"""`specdec tune --model`: which sub-layers a model's drafts should leave out, which tokens they should know,
and whether drafting pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from specdec._checks import check_integer, check_number
from specdec.bench.machine import describe
from specdec.cli.errors import INTERRUPTED, as_option, note
from specdec.cli.progress import progress_bar
from specdec.cli.values import check_plot, check_writable
from specdec.models.base import SkippableLM
from specdec.models.skipping import SkipSet
from specdec.training.running import interruptible
from specdec.tuning import skips
from specdec.tuning.advisor import table_of
from specdec.tuning.evaluation import Evaluator
from specdec.tuning.pace import RoundTimes
from specdec.tuning.plots import draw
from specdec.tuning.skip_search import SkipSearch, Trial, search_installed, try_all

ENDING = ".study"
PIPE_WIDTH = 160  # columns where stdout is no terminal
NOTE_EVERY = 60.0  # seconds, where stderr is no terminal


@dataclass(frozen=True)
class Options:
    """The command's options, named as on the command line."""

    model: str
    text: Path | None
    out: Path | None
    dtype: str
    draft_int8: bool
    seconds: float
    trials: int
    resume: bool
    warm_start_only: bool
    json: Path | None
    plot: Path | None


def run(options: Options) -> int:
    """Runs the command; returns the exit code: 0, or 130 where Ctrl-C ended it."""
    start = perf_counter()
    text, out, journal = _checked(options)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    try:
        with console.status("the model writes its texts"):
            target = skips.Target.load(options.model, options.dtype, text, int8=options.draft_int8)
    except ValueError as error:
        raise as_option(error) from None
    model, settings = target.model, target.settings(options.dtype)
    int8 = ", drafts with int8 weights" if options.draft_int8 else ""
    console.print(f"{describe()}\n{options.model}, {options.dtype}{int8}, texts from {text}", markup=False)
    search = None
    if not options.warm_start_only:
        search = SkipSearch(journal, model.num_layers, settings, target.views.sizes)
        if search.torn:
            note(f"{journal}: its last line was incomplete, as where the machine stopped, and is dropped")
    with console.status("times of drafts and verifications"):
        times = _times(target, search, options.seconds)
    with console.status("similarity of hidden states"):
        evaluator = skips.evaluator_of(target, times)
        similar = skips.proposed(evaluator.similar(), model.num_layers, int8=options.draft_int8)
        proposed = [*([SkipSet()] if options.draft_int8 else []), *(s.skips for s in similar)]
        evaluator = skips.evaluator_of(target, times, _depth(search, evaluator, proposed))
    with interruptible() as asked:

        def stopped() -> bool:
            return bool(asked)

        trials = _tried(search, evaluator, proposed, options, start, stopped)
        finals = skips.finalists(trials)[-1 if search is None else 0 :]
        if not finals:
            note("stopped before a set was tried on all texts; go on with --resume")
            return INTERRUPTED
        chosen = finals[0]
        ranking: list[tuple[Trial, float]] | None = []
        if len(finals) > 1 and not stopped():
            with _runs("contest") as on_run:
                ranking = skips.contest(target, finals, on_run, stopped)
        if ranking:
            chosen = ranking[0][0]
        advice = None
        if not stopped():
            with _runs("advice") as on_run:
                advice = skips.advice_on(target, chosen, finals[-1], on_run, stopped)
    outcome = skips.Outcome(
        chosen, finals[-1], trials, times, ranking or [], advice or [], perf_counter() - start
    )
    outcome.skip_file(target, options.dtype).write(out)
    _print(console, outcome, model)
    if options.json is not None:
        outcome.write_json(options.json, target, settings)
    if options.plot is not None:
        drawn = [("chosen", chosen.choice), ("best of the similarity of hidden states", finals[-1].choice)]
        draw(options.plot, model.num_layers, model.vocab_size, drawn, trials)
    if advice is None:
        note(f"stopped: {out} has the best set so far" + ("" if search is None else "; go on with --resume"))
        return INTERRUPTED
    console.print(outcome.sentence(options.model), markup=False, soft_wrap=True)
    console.print(
        f"{out} written; specdec generate 'def ' --model {options.model} --method self-speculative "
        f"--skip {out} --compare",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _checked(options: Options) -> tuple[Path, Path, Path]:
    """The folder of text, the file of the set and that of the search; refuses what would fail later."""
    for name, path in (("--text", options.text), ("--out", options.out)):
        if path is None:
            raise ValueError(f"{name}: missing, want one with --model")
    assert options.text is not None
    assert options.out is not None
    try:
        check_number("seconds", options.seconds, 0.0)
        check_integer("trials", options.trials, 1)
    except ValueError as error:
        raise as_option(error) from None
    journal = options.out.with_suffix(ENDING)
    if options.out == journal:
        raise ValueError(f"--out: got {journal}, the name that the search itself is kept under; name another")
    if options.json is not None and options.json.resolve() == options.out.resolve():
        raise ValueError(f"--json: got {options.json}, want another file than --out")
    if options.warm_start_only and options.resume:
        raise ValueError("--resume: not with --warm-start-only, which keeps nothing")
    if options.resume and not journal.is_file():
        raise ValueError(f"--resume: there is no search in {journal}")
    if journal.exists() and not (options.resume or options.warm_start_only):
        raise ValueError(f"--out: there is a search in {journal} already; add --resume or name another file")
    check_plot(options.plot)
    for name, path in (("--out", options.out), ("--json", options.json)):
        check_writable(name, path)
    if not options.warm_start_only:
        search_installed()
    return options.text, options.out, journal


def _times(target: skips.Target, search: SkipSearch | None, seconds: float) -> RoundTimes:
    """Times of the target's rounds; a search goes on with those that it began with."""
    saved = None if search is None else search.noted("times")
    if saved is not None:
        return RoundTimes.read(saved)
    times = skips.times_of(target, skips.TIMING * seconds)
    if search is not None:
        search.note("times", times.as_dict())
    return times


def _depth(search: SkipSearch | None, evaluator: Evaluator, proposed: list[SkipSet]) -> int:
    """Most drafts of a round; a search goes on with what it began with."""
    saved = None if search is None else search.noted("depth")
    if saved is not None:
        check_integer("depth", saved, 1, skips.DEPTH)
        return int(saved)
    depth = skips.useful_depth(evaluator, proposed)
    if search is not None:
        search.note("depth", depth)
    return depth


def _tried(
    search: SkipSearch | None,
    evaluator: Evaluator,
    proposed: list[SkipSet],
    options: Options,
    start: float,
    stopped: Callable[[], bool],
) -> list[Trial]:
    """Tries sets under a progress bar: what was proposed, and then whatever the search comes to."""
    count = 0
    best: Trial | None = None
    if search is not None:
        search.propose(proposed)
        count = len(search.trials)
        best = min((t for t in search.trials if t.complete), key=lambda t: t.pace, default=None)
    left = max(0.0, options.seconds - (perf_counter() - start))
    told = perf_counter()
    with progress_bar() as progress:
        task = progress.add_task("", total=int(options.seconds))

        def on_trial(trial: Trial) -> None:
            nonlocal count, best, told
            count += 1
            if trial.complete and (best is None or trial.pace < best.pace):
                best = trial
            line = f"{count} sets"
            if best is not None:
                line += f", best {best.pace:.3f} of plain decoding's time a token: {best.choice}"
            now = perf_counter()
            progress.update(task, completed=min(int(now - start), int(options.seconds)), description=line)
            if progress.disable and now - told > NOTE_EVERY:
                told = now
                note(f"{now - start:.0f} s: {line}")

        if search is None:
            return try_all(proposed, evaluator, stopped, on_trial)
        search.run(evaluator, trials=options.trials, seconds=left, should_stop=stopped, on_trial=on_trial)
        return search.trials


@contextmanager
def _runs(title: str) -> Iterator[Callable[[str], None]]:
    """A bar of the runs of a contest or of the advice; gives what is to be told of each."""
    with progress_bar() as progress:
        task = progress.add_task(title, total=None)
        yield lambda name: progress.update(task, advance=1, description=f"{title}: {name}")


def _print(console: Console, outcome: skips.Outcome, model: SkippableLM) -> None:
    complete = sum(t.complete for t in outcome.trials)
    console.print(
        f"\n{len(outcome.trials)} sets tried, {complete} on all texts, {outcome.seconds:.0f} s in all on "
        f"{torch.get_num_threads()} thread(s)"
    )
    rows = [("chosen", outcome.chosen), ("best of the similarity of hidden states", outcome.warm_start)]
    measured = {trial.number: speedup for trial, speedup in outcome.contest}
    for name, trial in rows:
        left_out, size = trial.choice
        line = (
            f"{name}: {left_out}; {len(left_out)} of {2 * model.num_layers} left out, "
            f"drafts of {'all' if size is None else f'{size} of'} {model.vocab_size} tokens, "
            f"{trial.pace:.3f} of plain decoding's time a token"
        )
        if trial.number in measured:
            line += f", measured {1.0 / measured[trial.number]:.3f}"
        console.print(line, markup=False, soft_wrap=True)
    if outcome.advice:
        table_of(outcome.advice, "Does it pay?").print(console)
        console.print()
