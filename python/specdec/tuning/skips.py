"""All of `specdec tune --model`: texts, times, search, a contest of the best choices, advice, the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.bench.machine import cpu_model, machine
from specdec.drafters.draft_exit import AdaptiveExit, DraftExit, StaticThreshold
from specdec.drafters.layer_skip import LayerSkipDrafter
from specdec.loop import Loop
from specdec.methods.autoregressive import autoregressive
from specdec.methods.own_memory import loop_of
from specdec.models import load_model, load_tokenizer
from specdec.models.base import SkippableLM, SkippingView
from specdec.models.checkpoint import resolve_model, weights_sha256, write_json
from specdec.models.skip_file import SkipFile
from specdec.models.skipping import SkipSet
from specdec.tuning.advisor import Advice, advise, decode_in_turn, sentence
from specdec.tuning.choices import Choice, DraftViews
from specdec.tuning.evaluation import Evaluator
from specdec.tuning.pace import Policy, RoundTimes
from specdec.tuning.round_times import measure_times
from specdec.tuning.similarity import Similar
from specdec.tuning.skip_search import Trial, best_of
from specdec.tuning.texts import Texts, write_texts

DEPTH = 8  # most drafts of a round
PLACES = 28  # of each text at which drafts are looked at
SEARCHED, HELD_OUT = 8, 4  # texts
PROPOSED = 16  # sets that the similarity of hidden states proposes
FINALISTS = 2  # beside the best of these
CONTEST_TOKENS, CONTEST_TURNS, CONTEST_SECONDS = 32, 2, 60.0
ADVICE_TOKENS, ADVICE_TURNS, ADVICE_SECONDS = 48, 2, 60.0
SPARE = 2  # drafts that the search looks at beyond those that seem to pay
WAYS = 3  # of drafting with the chosen set
TIMING = 0.06  # of the seconds of a search that measuring times gets
LEAST_GAIN = 0.2  # a set that leaves out less than this part of the sub-layers is not proposed

Stopped = Callable[[], bool]


@dataclass(frozen=True)
class Target:
    """The model that is tuned.

    Attributes:
        name: as given.
        model: loaded.
        sha256: of its weights.
        views: that it drafts with.
        texts: that it wrote.
    """

    name: str
    model: SkippableLM
    sha256: str
    views: DraftViews
    texts: Texts

    @classmethod
    def load(cls, name: str, dtype: str, text: Path, *, int8: bool = False) -> Target:
        """Loads a model and has it write its texts.

        Raises:
            ValueError: there is no such model, or too little text.
        """
        source = resolve_model(name)
        model = load_model(source if source.exists() else name, dtype=getattr(torch, dtype))
        texts = write_texts(
            model,
            text,
            load_tokenizer(name),
            searched=SEARCHED,
            held_out=HELD_OUT,
            new_tokens=PLACES + DEPTH,
        )
        views = DraftViews(model, texts.ranked, int8=int8)
        return cls(name, model, weights_sha256(source), views, texts)

    def settings(self, dtype: str) -> dict[str, Any]:
        """What the trials of a search depend on."""
        return {
            "sha256": self.sha256,
            "texts": self.texts.sha256,
            "device": cpu_model(),
            "dtype": dtype,
            "int8": self.views.int8,
            "threads": torch.get_num_threads(),
        }


def times_of(target: Target, seconds: float) -> RoundTimes:
    """What rounds of the target take, measured for about so many seconds."""
    views = target.views
    return measure_times(
        target.model,
        target.texts.held_out,
        DEPTH,
        seconds,
        int8=views.int8,
        vocabulary=views.tokens(views.sizes[-1]),
    )


def proposed(similar: Sequence[Similar], layers: int, *, int8: bool = False) -> list[Similar]:
    """Of the sets that leave the residual stream most similar, some of every size that is worth a trial: of
    drafts with int8 weights also the smallest, as these gain without leaving anything out.
    """
    least = 0.0 if int8 else LEAST_GAIN * 2 * layers
    useful = [s for s in similar if len(s.skipped) >= least]
    count = min(PROPOSED, len(useful))
    return [useful[i * len(useful) // count] for i in range(count)]


def loop_maker(
    model: SkippableLM, view: SkippingView, exit: DraftExit | None, *, max_draft: int, adaptive: bool
) -> Callable[[], Loop]:
    """Makes loops that draft with one view, so that they share what is learned about it."""

    def make() -> Loop:
        drafter = LayerSkipDrafter(view, model.new_cache(1), exit=exit)
        return loop_of(model, drafter, max_draft=max_draft, adaptive=adaptive)

    return make


def always(target: Target, trial: Trial) -> Callable[[], Loop]:
    """Makes loops that draft in every round as a trial's policy says."""
    exit, view = StaticThreshold(trial.policy.threshold), target.views.view(trial.choice)
    return loop_maker(target.model, view, exit, max_draft=trial.policy.length, adaptive=False)


def contest(
    target: Target,
    trials: Sequence[Trial],
    on_run: Callable[[str], None] = lambda name: None,
    should_stop: Stopped = lambda: False,
) -> list[tuple[Trial, float]] | None:
    """Decodes the held-out prompts with each choice, as its policy says, in turn with plain decoding.

    Returns:
        The trials and their measured speedups, the fastest first; None where it was stopped.
    """
    model = target.model
    makers = {f"set of trial {t.number}": always(target, t) for t in trials}
    found = decode_in_turn(
        lambda: autoregressive(model),
        makers,
        target.texts.held_out,
        new_tokens=CONTEST_TOKENS,
        turns=CONTEST_TURNS,
        seconds=CONTEST_SECONDS,
        on_run=on_run,
        should_stop=should_stop,
    )
    if found is None:
        return None
    pairs = [(trial, decoded.speedup) for trial, decoded in zip(trials, found[1].values(), strict=True)]
    return sorted(pairs, key=lambda pair: -pair[1])


def advice_on(
    target: Target,
    chosen: Trial,
    warm_start: Trial,
    on_run: Callable[[str], None] = lambda name: None,
    should_stop: Stopped = lambda: False,
) -> list[Advice] | None:
    """Measures self-speculative decoding with what was chosen: as it comes, by the exit of the paper; where
    prices end drafts; in every round as the search had it; and the last of these with the best set of the
    similarity of hidden states, where that is another.

    Returns:
        One for each, that of decoding as it comes first; None where it was stopped.
    """
    model = target.model
    view = target.views.view(chosen.choice)
    makers = {
        "adaptive (the default)": loop_maker(model, view, AdaptiveExit(), max_draft=12, adaptive=True),
        "priced": loop_maker(model, view, None, max_draft=16, adaptive=True),
        label_of(chosen.policy): always(target, chosen),
    }
    if warm_start.choice != chosen.choice:
        makers[f"similarity: {label_of(warm_start.policy)}"] = always(target, warm_start)
    found = decode_in_turn(
        lambda: autoregressive(model),
        makers,
        target.texts.held_out,
        new_tokens=ADVICE_TOKENS,
        turns=ADVICE_TURNS,
        seconds=ADVICE_SECONDS,
        on_run=on_run,
        should_stop=should_stop,
    )
    if found is None:
        return None
    plain, others = found
    return [advise(name, plain, decoded) for name, decoded in others.items()]


def label_of(policy: Policy) -> str:
    """How tables call a policy that drafts in every round."""
    exit = f"static:{policy.threshold:g}" if policy.threshold else "fixed"
    return f"always, {exit}, up to {policy.length}"


@dataclass(frozen=True)
class Outcome:
    """What a search came to.

    Attributes:
        chosen: the trial whose choice is the best.
        warm_start: the best of those that the similarity of hidden states proposed.
        trials: all.
        times: what rounds take.
        contest: the trials of the contest with their speedups.
        advice: empty where it was stopped before.
        seconds: that all of it took, earlier runs not counted.
    """

    chosen: Trial
    warm_start: Trial
    trials: Sequence[Trial]
    times: RoundTimes
    contest: Sequence[tuple[Trial, float]]
    advice: Sequence[Advice]
    seconds: float

    def sentence(self, model: str) -> str:
        """The advice on what was chosen in one sentence. There is advice."""
        return sentence(model, self.advice[:WAYS])

    def skip_file(self, target: Target, dtype: str) -> SkipFile:
        """The choice as a file."""
        skips, vocabulary = self.chosen.choice
        return SkipFile(
            skips,
            target.name if "/" not in target.name else Path(target.name).name,
            target.sha256,
            target.model.num_layers,
            cpu_model(),
            dtype,
            vocabulary=target.views.tokens(vocabulary),
            int8=target.views.int8,
            measured=self._measured(),
        )

    def _measured(self) -> dict[str, Any]:
        return {
            "threads": torch.get_num_threads(),
            "trials": len(self.trials),
            "seconds": round(self.seconds, 1),
            "times": self.times.as_dict(),
            "policy": self.chosen.policy.as_dict(),
            "contest": [
                {"trial": t.number, "similarity": t is self.warm_start, "measured_speedup": speedup}
                for t, speedup in self.contest
            ],
            "advice": [a.as_dict() for a in self.advice],
        }

    def write_json(self, path: Path, target: Target, settings: Mapping[str, Any]) -> None:
        """Writes everything, a table of the trials included."""
        report = {
            "machine": machine(),
            "model": target.name,
            "settings": dict(settings),
            "vocabularies": [size or target.model.vocab_size for size in target.views.sizes],
            **self._measured(),
            "chosen": self.chosen.number,
            "warm_start": self.warm_start.number,
            "sentence": self.sentence(target.name) if self.advice else None,
            "trials": [t.as_dict() for t in self.trials],
        }
        write_json(path, report)


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The choices that are worth a measurement, the best that similarity proposed last; none where none of
    its sets was tried on all texts.
    """
    warm = best_of(trials, 1, "similarity")
    if not warm:
        return []
    best = [t for t in best_of(trials, FINALISTS + 1) if t.choice != warm[0].choice][:FINALISTS]
    return [*best, warm[0]]


def evaluator_of(target: Target, times: RoundTimes, depth: int | None = None) -> Evaluator:
    """Evaluates choices on the target's texts, with at most `depth` drafts a round."""
    return Evaluator(target.views, target.texts.searched, times, depth)


def useful_depth(evaluator: Evaluator, sets: Sequence[SkipSet]) -> int:
    """How many drafts a round a search should look at: more than the best of these sets would make, by what a
    part of the texts says. A model whose drafts are soon wrong is searched faster so.
    """
    policies = [evaluator(Choice(skips), lambda paces: True).policy for skips in sets]
    best = min(policies, key=lambda policy: policy.pace)
    return min(DEPTH, best.length + SPARE)
