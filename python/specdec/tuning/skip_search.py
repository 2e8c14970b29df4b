"""Searches the sub-layers that a model's drafts should leave out: the set with the least time per token.

Trials come from three places: what a programme over hidden states proposes (`similarity`), a sampler
(Optuna's TPE, a variable for every token mixer and every MLP) and, two for each of its own, small changes of
the best set so far. A trial sees the texts part by part and ends early where it is clearly behind the best.
Everything is in a journal file, so that a search goes on where it was.
"""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdec._checks import shown
from specdec.models.skipping import SkipSet
from specdec.tuning.evaluation import Evaluation
from specdec.tuning.pace import Policy

if TYPE_CHECKING:
    import optuna

STUDY = "skips"
VERSION = 1
SLACK = 0.06  # by how much a set may be behind the best on the first part of the texts, and less on more
SOURCES = ("similarity", "sampler", "neighbour")

Evaluate = Callable[[SkipSet, Callable[[Sequence[float]], bool]], Evaluation]


@dataclass(frozen=True)
class Trial:
    """A set that was tried.

    Attributes:
        number: of the trial, from 0.
        skips: the set.
        source: one of `SOURCES`.
        paces: after every part of the texts that it saw.
        policy: the best way to draft with it on these.
        complete: whether it saw all texts.
        seconds: of the evaluation; 0 where the same set had been tried before.
    """

    number: int
    skips: SkipSet
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
        return {
            "number": self.number,
            "source": self.source,
            "mixers": sorted(self.skips.mixers),
            "mlps": sorted(self.skips.mlps),
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
    """Tries these sets and no others, as of the source "similarity", and keeps nothing."""
    trials: list[Trial] = []
    for number, skips in enumerate(sets):
        if should_stop():
            break
        best = next(iter(best_of(trials, 1)), None)
        start = perf_counter()
        found = evaluate(skips, _behind(best))
        seconds = perf_counter() - start
        trials.append(Trial(number, skips, "similarity", found.paces, found.policy, found.complete, seconds))
        on_trial(trials[-1])
    return trials


def best_of(trials: Sequence[Trial], count: int, source: str | None = None) -> list[Trial]:
    """The best complete trials of distinct sets, those of one source where one is given."""
    chosen: dict[SkipSet, Trial] = {}
    for trial in sorted(trials, key=lambda t: t.pace):
        if trial.complete and source in (None, trial.source):
            chosen.setdefault(trial.skips, trial)
    return list(chosen.values())[:count]


class SkipSearch:
    """A search that is kept in a file.

    Args:
        path: the journal; it is made where there is none.
        layers: of the model.
        settings: what the trials depend on, of JSON's types. A journal of other settings is refused.
        seed: of sampler and changes.

    Raises:
        ImportError: Optuna is not installed.
        ValueError: there is a file at `path` that is no journal of such a search, or one of other settings.
    """

    def __init__(self, path: Path, layers: int, settings: Mapping[str, Any], seed: int = 0) -> None:
        self._path = path
        self._layers = layers
        self._names = [f"{kind}_{i}" for i in range(layers) for kind in ("mixer", "mlp")]
        self._seed = seed
        self._study = _opened(path, {"version": VERSION, "layers": layers, **settings}, seed)
        self.trials: list[Trial] = [self._read(t) for t in self._study.get_trials(deepcopy=False) if _done(t)]
        self._known = {t.skips: t for t in self.trials}

    def note(self, name: str, value: Any) -> None:
        """Keeps something of JSON's types beside the trials."""
        self._study.set_user_attr(f"note {name}", value)

    def noted(self, name: str) -> Any:
        """What `note` kept under this name; None for nothing."""
        return self._study.user_attrs.get(f"note {name}")

    def propose(self, sets: Sequence[SkipSet]) -> None:
        """Sets to try first, of the source "similarity"; those that were tried or proposed are left out."""
        waiting = {self._set_of(t.system_attrs["fixed_params"]) for t in self._waiting()}
        for skips in dict.fromkeys(sets):
            if skips not in self._known and skips not in waiting:
                self._enqueue(skips, "similarity")

    def run(
        self,
        evaluate: Evaluate,
        *,
        trials: int,
        seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        """Tries sets, one at least.

        Args:
            evaluate: gives a set's evaluation; `Evaluator` is one.
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
            self._enqueue(self._changed(best.skips, random.Random(f"{self._seed} {number}")), "neighbour")
        trial = self._study.ask()
        skips = self._set_of({name: trial.suggest_categorical(name, (False, True)) for name in self._names})
        start = perf_counter()
        known = self._known.get(skips)
        if known is None:
            found = evaluate(skips, _behind(best))
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
        self._known.setdefault(skips, made)
        return made

    def _changed(self, skips: SkipSet, chance: random.Random) -> SkipSet:
        """A set beside this one that was not tried: one or two sub-layers more or less, or one exchanged."""
        skipped = {2 * i for i in skips.mixers} | {2 * i + 1 for i in skips.mlps}
        for _ in range(64):
            new = set(skipped)
            others = set(range(2 * self._layers)) - skipped
            kind = chance.random()
            if kind < 0.4 and skipped and others:
                new ^= {chance.choice(sorted(skipped)), chance.choice(sorted(others))}
            else:
                new ^= set(chance.sample(range(2 * self._layers), 1 if kind < 0.85 else 2))
            changed = self._set_of({name: i in new for i, name in enumerate(self._names)})
            if changed not in self._known:
                return changed
        return changed  # all around it is known

    def _enqueue(self, skips: SkipSet, source: str) -> None:
        values = {
            name: (name.startswith("mixer") and i // 2 in skips.mixers)
            or (name.startswith("mlp") and i // 2 in skips.mlps)
            for i, name in enumerate(self._names)
        }
        self._study.enqueue_trial(values, user_attrs={"source": source})

    def _set_of(self, values: Mapping[str, Any]) -> SkipSet:
        chosen = [(i // 2, name) for i, name in enumerate(self._names) if values[name]]
        return SkipSet.of(
            [i for i, name in chosen if name.startswith("mixer")],
            [i for i, name in chosen if name.startswith("mlp")],
        )

    def _waiting(self) -> Sequence[Any]:
        return self._study.get_trials(deepcopy=False, states=(_states().WAITING,))

    def _read(self, trial: Any) -> Trial:
        try:
            attributes = trial.user_attrs
            paces = tuple(trial.intermediate_values[i] for i in range(len(trial.intermediate_values)))
            return Trial(
                trial.number,
                self._set_of(trial.params),
                attributes["source"],
                paces,
                Policy.read(attributes["policy"]),
                trial.state == _states().COMPLETE,
                attributes["seconds"],
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"{self._path}: trial {trial.number} is none of a search ({error})") from None


def _behind(best: Trial | None) -> Callable[[Sequence[float]], bool]:
    """Whether paces on the first parts of the texts are too far behind the best set's on the same."""

    def hopeless(paces: Sequence[float]) -> bool:
        if best is None:
            return False
        return paces[-1] > best.paces[len(paces) - 1] * (1.0 + SLACK / len(paces))

    return hopeless


def search_installed() -> None:
    """Refuses to go on without Optuna. Raises ImportError."""
    if importlib.util.find_spec("optuna") is None:
        raise ImportError("a search needs optuna, which is not installed: pip install 'specdec[tune]'")


def _states() -> Any:
    from optuna.trial import TrialState

    return TrialState


def _done(trial: Any) -> bool:
    """Whether a trial has a result: one that was cut off has none and is left behind."""
    return trial.state in (_states().COMPLETE, _states().PRUNED)


def _opened(path: Path, settings: dict[str, Any], seed: int) -> optuna.Study:
    search_installed()
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
    for name, value in settings.items():
        if found.get(name) != value:
            raise ValueError(f"{path}: a search with {name} {shown(found.get(name))}, want {shown(value)}")
    return study
