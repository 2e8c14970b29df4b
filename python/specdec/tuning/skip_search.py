"""Searches the sub-layers that a model's drafts should leave out and the vocabulary that they should know:
the choice with the least time per token.

Trials come from three places: what a programme over hidden states proposes (`similarity`, of all tokens), a
sampler (Optuna's TPE, a variable for every token mixer, for every MLP and for the vocabulary) and, two for
each of its own, small changes of the best choice so far. A trial sees the texts part by part and ends early
where it is clearly behind the best. Everything is in a journal file, so that a search goes on where it was.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdec._checks import shown
from specdec.models.skipping import SkipSet
from specdec.tuning.choices import Choice
from specdec.tuning.evaluation import Evaluation
from specdec.tuning.pace import Policy
from specdec.tuning.similarity import skip_set

if TYPE_CHECKING:
    import optuna

STUDY = "skips"
VERSION = 2
SLACK = 0.06  # by how much a choice may be behind the best on the first part of the texts, and less on more
SOURCES = ("similarity", "sampler", "neighbour")
OTHER_VOCABULARY = 0.25  # of the small changes that change the vocabulary alone
_VOCABULARY = "vocabulary"  # the name of its variable

Evaluate = Callable[[Choice, Callable[[Sequence[float]], bool]], Evaluation]


@dataclass(frozen=True)
class Trial:
    """A choice that was tried.

    Attributes:
        number: of the trial, from 0.
        choice: how drafts were made.
        source: one of `SOURCES`.
        paces: after every part of the texts that it saw.
        policy: the best way to draft with it on these.
        complete: whether it saw all texts.
        seconds: of the evaluation; 0 where the same choice had been tried before.
    """

    number: int
    choice: Choice
    source: str
    paces: tuple[float, ...]
    policy: Policy
    complete: bool
    seconds: float

    @property
    def pace(self) -> float:
        """Plain rounds that a token takes."""
        return self.policy.pace

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        skips, vocabulary = self.choice
        return {
            "number": self.number,
            "source": self.source,
            "mixers": sorted(skips.mixers),
            "mlps": sorted(skips.mlps),
            "vocabulary": vocabulary,
            "complete": self.complete,
            "paces": list(self.paces),
            "policy": self.policy.as_dict(),
            "seconds": self.seconds,
        }


def try_all(
    sets: Sequence[SkipSet],
    evaluate: Evaluate,
    should_stop: Callable[[], bool] = lambda: False,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Tries these sets, with all tokens, and no others, as of the source "similarity"; keeps nothing."""
    trials: list[Trial] = []
    for number, skips in enumerate(sets):
        if should_stop():
            break
        best, choice = next(iter(best_of(trials, 1)), None), Choice(skips)
        start = perf_counter()
        found = evaluate(choice, _behind(best))
        seconds = perf_counter() - start
        trials.append(Trial(number, choice, "similarity", found.paces, found.policy, found.complete, seconds))
        on_trial(trials[-1])
    return trials


def best_of(trials: Sequence[Trial], count: int, source: str | None = None) -> list[Trial]:
    """The best complete trials of distinct choices, those of one source where one is given."""
    chosen: dict[Choice, Trial] = {}
    for trial in sorted(trials, key=lambda t: t.pace):
        if trial.complete and source in (None, trial.source):
            chosen.setdefault(trial.choice, trial)
    return list(chosen.values())[:count]


class SkipSearch:
    """A search that is kept in a file.

    Args:
        path: the journal; it is made where there is none.
        layers: of the model.
        settings: what the trials depend on, of JSON's types. A journal of other settings is refused.
        vocabularies: sizes to choose from, None for all tokens, which comes first.
        seed: of sampler and changes.

    Attributes:
        trials: all that came to an end.
        torn: whether the journal ended in the middle of a line, which is dropped.

    Raises:
        ImportError: Optuna is not installed.
        ValueError: there is a file at `path` that is no journal of such a search, or one of other settings.
    """

    def __init__(
        self,
        path: Path,
        layers: int,
        settings: Mapping[str, Any],
        vocabularies: Sequence[int | None] = (None,),
        seed: int = 0,
    ) -> None:
        self._path = path
        self._layers = layers
        self._names = [f"{kind}_{i}" for i in range(layers) for kind in ("mixer", "mlp")]
        self._vocabularies = tuple(vocabularies)
        self._seed = seed
        search_installed()
        self.torn = _drop_torn_line(path)
        settings = {"version": VERSION, "layers": layers, "vocabularies": list(vocabularies), **settings}
        self._study = _opened(path, settings, seed)
        self.trials: list[Trial] = [self._read(t) for t in self._study.get_trials(deepcopy=False) if _done(t)]
        self._known = {t.choice: t for t in self.trials}

    def note(self, name: str, value: Any) -> None:
        """Keeps something of JSON's types beside the trials."""
        self._study.set_user_attr(f"note {name}", value)

    def noted(self, name: str) -> Any:
        """What `note` kept under this name; None for nothing."""
        return self._study.user_attrs.get(f"note {name}")

    def propose(self, sets: Sequence[SkipSet]) -> None:
        """Sets to try first, with all tokens, of the source "similarity"; those that were tried or proposed
        are left out.
        """
        waiting = {self._choice_of(t.system_attrs["fixed_params"]) for t in self._waiting()}
        for choice in dict.fromkeys(Choice(skips) for skips in sets):
            if choice not in self._known and choice not in waiting:
                self._enqueue(choice, "similarity")

    def run(
        self,
        evaluate: Evaluate,
        *,
        trials: int,
        seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        """Tries choices, one at least.

        Args:
            evaluate: gives a choice's evaluation; `Evaluator` is one.
            trials: most trials in all, those of earlier runs included.
            seconds: after which no trial begins.
            should_stop: asked before every trial.
            on_trial: told every trial.
        """
        stop = perf_counter() + seconds
        while len(self.trials) < trials and not should_stop():
            on_trial(self._try(evaluate))
            if perf_counter() >= stop:
                break

    def _try(self, evaluate: Evaluate) -> Trial:
        best, number = next(iter(best_of(self.trials, 1)), None), len(self.trials)
        if best is not None and number % 3 and not self._waiting():
            self._enqueue(self._changed(best.choice, random.Random(f"{self._seed} {number}")), "neighbour")
        trial = self._study.ask()
        values: dict[str, Any] = {
            name: trial.suggest_categorical(name, (False, True)) for name in self._names
        }
        values[_VOCABULARY] = trial.suggest_categorical(_VOCABULARY, self._vocabularies)
        choice = self._choice_of(values)
        start = perf_counter()
        known = self._known.get(choice)
        if known is None:
            found = evaluate(choice, _behind(best))
            seconds = perf_counter() - start
        else:
            found, seconds = Evaluation(known.paces, known.policy, known.complete), 0.0
        trial.set_user_attr("source", trial.user_attrs.get("source", "sampler"))
        trial.set_user_attr("policy", found.policy.as_dict())
        trial.set_user_attr("seconds", seconds)
        for part, pace in enumerate(found.paces):
            trial.report(pace, part)
        if found.complete:
            self._study.tell(trial, found.policy.pace)
        else:
            self._study.tell(trial, state=_states().PRUNED)
        made = self._read(self._study.get_trials(deepcopy=False)[trial.number])
        self.trials.append(made)
        self._known.setdefault(choice, made)
        return made

    def _changed(self, choice: Choice, chance: random.Random) -> Choice:
        """A choice beside this one that was not tried: another vocabulary, or one or two sub-layers more or
        less, or one exchanged.
        """
        sizes = [size for size in self._vocabularies if size != choice.vocabulary]
        for _ in range(64):
            if sizes and chance.random() < OTHER_VOCABULARY:
                changed = choice._replace(vocabulary=chance.choice(sizes))
            else:
                changed = choice._replace(skips=self._changed_set(choice.skips, chance))
            if changed not in self._known:
                return changed
        return changed  # all around it is known

    def _changed_set(self, skips: SkipSet, chance: random.Random) -> SkipSet:
        skipped = {2 * i for i in skips.mixers} | {2 * i + 1 for i in skips.mlps}
        others = set(range(2 * self._layers)) - skipped
        kind = chance.random()
        if kind < 0.4 and skipped and others:
            return skip_set(skipped ^ {chance.choice(sorted(skipped)), chance.choice(sorted(others))})
        return skip_set(skipped ^ set(chance.sample(range(2 * self._layers), 1 if kind < 0.85 else 2)))

    def _enqueue(self, choice: Choice, source: str) -> None:
        skips, vocabulary = choice
        values: dict[str, Any] = {
            name: (name.startswith("mixer") and i // 2 in skips.mixers)
            or (name.startswith("mlp") and i // 2 in skips.mlps)
            for i, name in enumerate(self._names)
        }
        self._study.enqueue_trial({**values, _VOCABULARY: vocabulary}, user_attrs={"source": source})

    def _choice_of(self, values: Mapping[str, Any]) -> Choice:
        skips = skip_set(i for i, name in enumerate(self._names) if values[name])
        return Choice(skips, values[_VOCABULARY])

    def _waiting(self) -> Sequence[Any]:
        return self._study.get_trials(deepcopy=False, states=(_states().WAITING,))

    def _read(self, trial: Any) -> Trial:
        try:
            attributes = trial.user_attrs
            paces = tuple(trial.intermediate_values[i] for i in range(len(trial.intermediate_values)))
            return Trial(
                trial.number,
                self._choice_of(trial.params),
                attributes["source"],
                paces,
                Policy.read(attributes["policy"]),
                trial.state == _states().COMPLETE,
                attributes["seconds"],
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"{self._path}: trial {trial.number} is none of a search ({error})") from None


def _behind(best: Trial | None) -> Callable[[Sequence[float]], bool]:
    """Whether paces on the first parts of the texts are too far behind the best choice's on the same."""

    def hopeless(paces: Sequence[float]) -> bool:
        if best is None:
            return False
        return paces[-1] > best.paces[len(paces) - 1] * (1.0 + SLACK / len(paces))

    return hopeless


def search_installed() -> None:
    """Refuses to go on without Optuna. Raises ImportError."""
    if importlib.util.find_spec("optuna") is None:
        raise ImportError("a search needs optuna, which is not installed: pip install optuna")


def _states() -> Any:
    from optuna.trial import TrialState

    return TrialState


def _done(trial: Any) -> bool:
    """Whether a trial has a result: one that was cut off has none and is left behind."""
    return trial.state in (_states().COMPLETE, _states().PRUNED)


def _drop_torn_line(path: Path) -> bool:
    """Drops what a journal has after its last line break: a machine that stops while a line is written leaves
    the beginning of it, and Optuna would write the next line behind it.

    Returns:
        Whether there was something.

    Raises:
        ValueError: the file is no journal; it stays as it is.
    """
    data = path.read_bytes() if path.exists() else b""
    if not data:
        return False
    *lines, torn = data.split(b"\n")
    try:
        entries = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: not the journal of a search ({error})") from None
    if not entries or not all(isinstance(entry, dict) and "op_code" in entry for entry in entries):
        raise ValueError(f"{path}: not the journal of a search, or cut off in its first line")
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(data) - len(torn))
            os.fsync(file.fileno())
    return bool(torn)


def _opened(path: Path, settings: dict[str, Any], seed: int) -> optuna.Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    existed = path.exists() and path.stat().st_size > 0
    try:
        storage = JournalStorage(JournalFileBackend(str(path)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(storage=storage, study_name=STUDY, load_if_exists=True)
            # Not the numbers again that the trials before were drawn with.
            seed += len(study.get_trials(deepcopy=False))
            study.sampler = optuna.samplers.TPESampler(multivariate=True, seed=seed)
        found = study.user_attrs.get("settings")
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, AssertionError) as error:
        raise ValueError(f"{path}: not the journal of a search ({error})") from None
    if not existed:
        study.set_user_attr("settings", settings)
        return study
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not the journal of a search for sets of sub-layers")
    if found.get("version") != VERSION:
        raise ValueError(
            f"{path}: a search of version {shown(found.get('version'))}, want {VERSION}, which chooses the "
            "vocabulary of drafts too: begin a new one"
        )
    for name, value in settings.items():
        if found.get(name) != value:
            raise ValueError(f"{path}: a search with {name} {shown(found.get(name))}, want {shown(value)}")
    return study
