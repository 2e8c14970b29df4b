"""The training of a drafter: distillation over unrolled steps, and a state from which it goes on to the bit.

As in the training of a model (loop.py), nothing random is stored: the order of the data is a function of the
seed and the step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec._checks import check_boolean, check_integer, check_number
from specdec.models.drafter_checkpoint import VOCABULARY, save_drafter
from specdec.models.drafter_config import RecurrentDrafterConfig
from specdec.models.features import Feature
from specdec.training.corpus import TOKENS_NAME, TokenWindows
from specdec.training.distillation import distillation_loss
from specdec.training.drafter_model import TrainableDrafter
from specdec.training.evaluation import Acceptance, chain_matches, summarize
from specdec.training.features import FeatureCache
from specdec.training.optimization import Optimization
from specdec.training.running import Run, saved_history, saved_state
from specdec.training.target import FrozenTarget

CHAIN = 5  # positions of a chain on held-out text

_STEP_DECAY = 0.8  # of an unrolled step's weight against that of the one before
_FIRST_ONLY = 0.75  # of a run: only the first position is trained, at several times the speed; then all
_HELD_OUT_WINDOWS = 48
_SCALE_WINDOWS = 16  # windows from which the features' sizes are taken


@dataclass(frozen=True)
class DrafterOptions:
    """What defines a run: equal options, target and text give equal weights on one machine.

    Attributes:
        config: the drafter.
        tokens: trained on in all, in passes over the text; rounded up to whole steps.
        batch_size: windows in a step.
        seq_len: tokens in a window.
        unroll: positions of a drafted chain that are trained (in the last quarter of the steps; before that
            the first position alone).
        lr: peak learning rate: warmup over 5% of the steps, at most 200, then cosine decay to a tenth.
        seed: of initial weights and data order.
        autocast: multiply in bfloat16 (the recurrence and all sums stay float32).

    Raises:
        ValueError: names the option.
    """

    config: RecurrentDrafterConfig
    tokens: int
    batch_size: int
    seq_len: int
    unroll: int
    lr: float
    seed: int
    autocast: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size"):
            check_integer(name, getattr(self, name), 1)
        check_integer("unroll", self.unroll, 1, 64)
        check_integer("seq_len", self.seq_len, max(self.unroll, CHAIN) + 2)
        check_integer("seed", self.seed, 0, (1 << 31) - 1)
        check_number("lr", self.lr, above=0.0, below=1.0)
        check_boolean("autocast", self.autocast)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return -(-self.tokens // (self.batch_size * self.seq_len))

    def unrolled(self, step: int) -> int:
        """Positions of a chain that optimiser step `step` trains.

        Most of what there is to learn is the same for all of them and is learnt sooner from the first one
        alone. The positions of an independent drafter are all like the first.
        """
        return self.unroll if self.config.features and step >= _FIRST_ONLY * self.steps else 1

    @staticmethod
    def position_weights(count: int) -> list[float]:
        """Share in the loss of each of the first `count` positions."""
        weights = [_STEP_DECAY**j for j in range(count)]
        return [weight / sum(weights) for weight in weights]

    def to_dict(self) -> dict[str, Any]:
        """The options for the state file."""
        return {**asdict(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterOptions:
        """The options that `to_dict` wrote."""
        return cls(**{**values, "config": RecurrentDrafterConfig.from_dict(values["config"])})


@dataclass
class DrafterHistory:
    """How a run went.

    Attributes:
        training: `[step, KL in nats a token, averaged over the trained positions by their weights]`.
        held_out: `[step, {"kl": one a position of a chain, "match": one a position of a chain,
            "mean_accepted_length": number}]`, teacher-forced on held-out text.
    """

    training: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


class DrafterTraining(Run):
    """A run in the directory `out`.

    Args:
        out: directory of the run; it becomes a drafter's directory.
        options: what defines the run.
        target: that the drafter is for.
        cache: directory of the features, all of them there (features.py).
        vocabulary: ascending tokens that the drafter can draft, None for all.

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

    options: DrafterOptions
    history: DrafterHistory

    def __init__(
        self,
        out: Path,
        options: DrafterOptions,
        target: FrozenTarget,
        cache: FeatureCache,
        vocabulary: Tensor | None = None,
    ) -> None:
        self.out = out
        self.options = options
        self.target = target
        self.step = 0
        self.history = DrafterHistory()
        self._cache = cache
        self._vocabulary = vocabulary
        self._features = tuple(Feature.parse(name) for name in options.config.features)
        self._head = target.head if vocabulary is None else target.head[vocabulary]
        self.windows = TokenWindows(cache.directory / TOKENS_NAME, options.seq_len, options.seed)
        torch.manual_seed(options.seed)
        self.model = TrainableDrafter(options.config.layer, options.config.feature_size)
        self._initialise()
        self._optimization = Optimization(self.model, options.steps, options.lr)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Start from the target's first layer and final norm, and with features of equal size."""
        self.model.norm.weight.copy_(self.target.weights["model.norm.weight"])
        self.model.layer.load_state_dict(self.target.first_layer())
        if self._features:
            rows = range(min(_SCALE_WINDOWS, self.windows.num_training))
            scales = [
                self._cache.rows(rows, [feature]).square().mean().sqrt().expand(self._cache.size(feature))
                for feature in self._features
            ]
            scale = torch.cat(scales).clamp_min(torch.finfo(torch.float32).tiny)
            self.model.fuse_norm.weight.copy_(scale.square().mean().sqrt() / scale)

    @classmethod
    def resume(cls, out: Path) -> DrafterTraining:
        """The run saved in `out`, with its target and its features where they were.

        Raises:
            ValueError: there is no run, its state is damaged, or its target, text or features are not there
                any more.
        """
        with saved_state(out) as (file, metadata):
            options = DrafterOptions.from_dict(json.loads(metadata["options"]))
            step = int(metadata["step"])
            note = {key: metadata[key] for key in ("target", "cache", "tokens_sha256")}
            history = DrafterHistory(*saved_history(out, step))
            vocabulary = None
            if options.config.draft_vocab_size is not None:
                vocabulary = file.get_tensor(VOCABULARY).long()
        target = FrozenTarget(Path(note["target"]))
        target.check_weights(options.config.target.sha256, out)
        features = [Feature.parse(name) for name in options.config.features]
        cache = FeatureCache.reopen(note, target, options.seq_len, features, out)
        run = cls(out, options, target, cache, vocabulary)
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
        indices = self.windows.batch_indices(self.step, o.batch_size)
        weights = o.position_weights(o.unrolled(self.step))
        outputs, targets = self._unroll(indices, len(weights), o.autocast)
        head = self._head.to(torch.bfloat16) if o.autocast else self._head
        total, _ = distillation_loss(outputs, targets, head, weights)
        return self._update(total, total)

    def _unroll(self, indices: Sequence[int], steps: int, autocast: bool) -> tuple[list[Tensor], Tensor]:
        """The drafter's outputs and the target's, for some windows."""
        embedded = self.target.embeddings[self.windows.rows(indices)]
        features = self._cache.rows(indices, self._features) if self._features else None
        targets = self.target.final_norm(self._cache.rows(indices, [self.target.last]))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return self.model.unroll(features, embedded, steps), targets

    @torch.no_grad()
    def evaluate(self) -> Acceptance:
        """Losses and acceptance on held-out windows, teacher-forced and in float32; added to the history."""
        weights = self.options.position_weights(CHAIN)
        kl = torch.zeros(CHAIN)
        matches = []
        count = 0
        for indices in self.windows.held_out_indices(self.options.batch_size, _HELD_OUT_WINDOWS):
            outputs, targets = self._unroll(indices, CHAIN, autocast=False)
            _, each = distillation_loss(outputs, targets, self._head, weights)
            kl += each * len(indices)
            count += len(indices)
            matches.append(chain_matches(outputs, targets, self.target.head, self._vocabulary))
        found = summarize(torch.cat(matches))
        figures = {
            "kl": (kl / count).tolist(),
            "match": list(found.match),
            "mean_accepted_length": found.mean_accepted_length,
        }
        self.history.held_out.append((self.step, figures))
        return found

    def save(self) -> None:
        """Write the history and the state to resume from, then the drafter (matrices in bfloat16)."""
        vocabulary = {} if self._vocabulary is None else {VOCABULARY: self._vocabulary.to(torch.int32)}
        self._save_state(json.dumps(self.options.to_dict()), vocabulary, self._cache.note())
        save_drafter(self.out, self.options.config, {**self.model.state_dict(), **vocabulary})
