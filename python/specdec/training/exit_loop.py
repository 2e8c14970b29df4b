"""The training of exit adapters: distillation of the last layer, and a state to go on from to the bit.

The model is frozen and its hidden states come from files, so the adapters of all exits are trained together
and a step costs little more than its products with the head. As in every training here nothing random is
stored: the order of the data and the draws of the vocabulary are functions of the seed and the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec._checks import check_boolean, check_integer, check_number
from specdec.models.exit_adapter import ExitAdaptersConfig, save_exit_adapters
from specdec.models.features import Feature
from specdec.training.corpus import TOKENS_NAME, TokenWindows, frequent_tokens
from specdec.training.distillation import VocabularySample, distillation_loss
from specdec.training.evaluation import exit_agreement
from specdec.training.exit_model import TrainableExitAdapters
from specdec.training.features import FeatureCache
from specdec.training.optimization import Optimization
from specdec.training.running import Run, saved_history, saved_state
from specdec.training.target import FrozenModel, frozen_model

_HELD_OUT_WINDOWS = 32
_BALANCE_WINDOWS = 16  # windows from which the sizes of channels are taken
_DRAWN = 4  # of a step's vocabulary one part in so many is drawn


@dataclass(frozen=True)
class ExitOptions:
    """What defines a run: equal options, model and text give equal weights on one machine.

    Attributes:
        config: the adapters.
        tokens: trained on in all, in passes over the text; rounded up to whole steps.
        batch_size: windows in a step.
        seq_len: tokens in a window.
        loss_vocab: tokens over which a step compares distributions: three quarters of them the text's most
            frequent ones, the others drawn anew. A vocabulary that is no larger is taken whole.
        lr: peak learning rate: warmup over 5% of the steps, at most 200, then cosine decay to a tenth.
        seed: of initial weights, data order and draws of the vocabulary.
        autocast: multiply in bfloat16 (all sums stay float32).

    Raises:
        ValueError: names the option.
    """

    config: ExitAdaptersConfig
    tokens: int
    batch_size: int
    seq_len: int
    loss_vocab: int
    lr: float
    seed: int
    autocast: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", "seq_len"):
            check_integer(name, getattr(self, name), 1)
        check_integer("loss_vocab", self.loss_vocab, _DRAWN)
        check_integer("seed", self.seed, 0, (1 << 31) - 1)
        check_number("lr", self.lr, above=0.0, below=1.0)
        check_boolean("autocast", self.autocast)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return -(-self.tokens // (self.batch_size * self.seq_len))

    def to_dict(self) -> dict[str, Any]:
        """The options for the state file."""
        return {**asdict(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ExitOptions:
        """The options that `to_dict` wrote."""
        return cls(**{**values, "config": ExitAdaptersConfig.from_dict(values["config"])})


@dataclass
class ExitHistory:
    """How a run went.

    Attributes:
        training: `[step, KL in nats a token, the mean over exits]`.
        held_out: `[step, {exit: {"kl": nats a token, "agreement": share of tokens}}]`, on held-out text. That
            of step 0 is what the exits give without adapters.
    """

    training: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, dict[str, dict[str, float]]]] = field(default_factory=list)


class ExitTraining(Run):
    """A run in the directory `out`.

    Args:
        out: directory of the run; it becomes a directory of adapters.
        options: what defines the run.
        target: the model.
        cache: directory of the features, all of them there (features.py).

    Attributes:
        out: as given.
        options: as given.
        target: as given.
        step: steps done so far.
        history: how it went so far.
        windows: of the text.
        model: what is trained.

    Raises:
        ValueError: the text is too short.
    """

    options: ExitOptions
    history: ExitHistory

    def __init__(self, out: Path, options: ExitOptions, target: FrozenModel, cache: FeatureCache) -> None:
        self.out = out
        self.options = options
        self.target = target
        self.step = 0
        self.history = ExitHistory()
        self._cache = cache
        self._features = exit_features(options.config)
        path = cache.directory / TOKENS_NAME
        self.windows = TokenWindows(path, options.seq_len, options.seed)
        self._sample: VocabularySample | None = None
        if options.loss_vocab < target.vocab_size:
            drawn = options.loss_vocab // _DRAWN
            frequent = frequent_tokens(
                path, self.windows.training_tokens, target.vocab_size, options.loss_vocab - drawn
            )
            self._sample = VocabularySample(frequent, target.vocab_size, drawn, options.seed)
        self._head = target.head.to(torch.bfloat16) if options.autocast else target.head
        torch.manual_seed(options.seed)
        config = options.config
        self.model = TrainableExitAdapters(config.widths, config.hidden_size, config.norm_eps)
        rows = range(min(_BALANCE_WINDOWS, self.windows.num_training))
        for exit, feature in self._features.items():
            self.model.balance(exit, cache.rows(rows, [feature]))
        self._optimization = Optimization(self.model, options.steps, options.lr)

    @classmethod
    def resume(cls, out: Path) -> ExitTraining:
        """The run saved in `out`, with its model and its features where they were.

        Raises:
            ValueError: there is no run, its state is damaged, or its model, text or features are not there
                any more.
        """
        with saved_state(out) as (file, metadata):
            options = ExitOptions.from_dict(json.loads(metadata["options"]))
            step = int(metadata["step"])
            note = {key: metadata[key] for key in ("target", "cache", "tokens_sha256")}
            history = ExitHistory(*saved_history(out, step))
        target = frozen_model(Path(note["target"]))
        target.check_weights(options.config.sha256, out)
        features = list(exit_features(options.config).values())
        run = cls(out, options, target, FeatureCache.reopen(note, target, options.seq_len, features, out))
        with saved_state(out) as (file, _):
            run._optimization.restore(file)
        run.step, run.history = step, history
        return run

    def train_step(self) -> float:
        """One optimiser step; returns the loss in nats a token.

        Raises:
            ValueError: it diverged.
        """
        o = self.options
        outputs, targets = self._adapted(self.windows.batch_indices(self.step, o.batch_size), o.autocast)
        head, bias = self._head, None
        if self._sample is not None:
            tokens, bias = self._sample.at(self.step)
            head = head[tokens]
        weights = [1 / len(outputs)] * len(outputs)
        total, _ = distillation_loss(list(outputs.values()), targets, head, weights, later=False, bias=bias)
        return self._update(total, total)

    def _adapted(self, indices: Sequence[int], autocast: bool) -> tuple[dict[int, Tensor], Tensor]:
        """What the head reads at the exits and behind the last layer, `[B, T, D]`, for some windows."""
        hidden = {exit: self._cache.rows(indices, [feature]) for exit, feature in self._features.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            adapted = self.model(hidden)
        outputs = {exit: self.target.final_norm(x) for exit, x in adapted.items()}
        return outputs, self.target.final_norm(self._cache.rows(indices, [self.target.last]))

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, dict[str, float]]:
        """Loss and agreement of every exit on held-out windows, over the whole vocabulary and in float32;
        added to the history.
        """
        found = []
        for (window,) in self.windows.held_out_indices(1, _HELD_OUT_WINDOWS):
            outputs, targets = self._adapted([window], autocast=False)
            found.append(exit_agreement([x[0] for x in outputs.values()], targets[0], self.target.head))
        means = torch.tensor(found, dtype=torch.float64).mean(0).tolist()  # [exits, 2]
        figures = {
            str(exit): {"kl": kl, "agreement": agreement}
            for exit, (kl, agreement) in zip(self._features, means, strict=True)
        }
        self.history.held_out.append((self.step, figures))
        return figures

    def save(self) -> None:
        """Write the history and the state to resume from, then the adapters (matrices in bfloat16)."""
        self._save_state(json.dumps(self.options.to_dict()), notes=self._cache.note())
        save_exit_adapters(
            self.out, replace(self.options.config, measured=self.measured()), self.model.state_dict()
        )

    def measured(self) -> dict[str, Any]:
        """What the adapters' file says of the run: agreement on held-out text without and with them."""
        if not self.history.held_out:
            return {}
        first, newest = self.history.held_out[0][1], self.history.held_out[-1]
        return {
            "step": newest[0],
            "held_out_agreement": {
                exit: {"without": first[exit]["agreement"], "with": figures["agreement"]}
                for exit, figures in newest[1].items()
            },
        }


def exit_features(config: ExitAdaptersConfig) -> dict[int, Feature]:
    """The hidden states that adapters read, by exit."""
    return {exit: Feature("hidden", exit - 1) for exit in sorted(config.widths)}
