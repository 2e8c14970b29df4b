"""From options to a drafter: tokens, the target's features, the run, and what it leaves in its directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from specdec._checks import check_integer
from specdec.models.checkpoint import resolve_model
from specdec.models.config import GatedDeltaNetConfig
from specdec.models.drafter_config import DrafterTarget, RecurrentDrafterConfig
from specdec.training import defaults
from specdec.training.corpus import TOKENS_NAME, TokenWindows, frequent_tokens
from specdec.training.drafter_loop import DrafterOptions, DrafterTraining
from specdec.training.features import FeatureCache, place_tokens
from specdec.training.optimization import multiplies_bfloat16
from specdec.training.running import check_unused
from specdec.training.target import FrozenTarget

CACHE_NAME = "features"


@dataclasses.dataclass(frozen=True)
class TrainingRequest:
    """What a new run is to be, as the command takes it.

    Attributes:
        target: name of an embedded model or directory.
        text: folder of text files.
        out: directory of the run.
        features: see `FrozenTarget.choose_features`.
        cache: directory of the features; None for `out`/features.
        text_tokens: most tokens of the text that are read, None for all.
        tokens: trained on in all, None for one pass over the text.
        batch_size, seq_len, unroll, lr, seed: see `DrafterOptions`.
        draft_vocab: number of the text's most frequent tokens that can be drafted, None for all.
    """

    target: str
    text: Path
    out: Path
    features: str = defaults.FEATURES
    cache: Path | None = None
    text_tokens: int | None = None
    tokens: int | None = None
    batch_size: int = defaults.BATCH_SIZE
    seq_len: int = defaults.SEQ_LEN
    unroll: int = defaults.UNROLL
    lr: float = defaults.LR
    draft_vocab: int | None = None
    seed: int = defaults.SEED


def prepare(
    request: TrainingRequest, note: Callable[[str], None]
) -> tuple[FeatureCache, Callable[[], DrafterTraining]]:
    """The features' cache, which may have to be computed yet, and what begins the run once it is.

    Args:
        request: what the run is to be.
        note: called with a line to be shown.

    Raises:
        ValueError: names the option, before anything is written; or the text is too short or the disk too
            full.
    """
    r = request
    if not r.text.is_dir():
        raise ValueError(f"text: {str(r.text)!r} is not a folder")
    check_unused(r.out)
    if r.text_tokens is not None:
        check_integer("text_tokens", r.text_tokens, 1)
    directory = resolve_model(r.target)
    target = FrozenTarget(directory)
    features = target.choose_features(r.features)
    if r.draft_vocab is not None:
        check_integer("draft_vocab", r.draft_vocab, 1, target.config.vocab_size)
    config = RecurrentDrafterConfig(
        features=tuple(map(str, features)),
        feature_size=sum(map(target.model.feature_size, features)),
        layer=_one_layer(target.config),
        draft_vocab_size=r.draft_vocab,
        target=DrafterTarget(
            directory.resolve().name or "model",
            target.sha256,
            target.config.vocab_size,
            target.config.hidden_size,
        ),
    )
    options = DrafterOptions(
        config,
        tokens=1 if r.tokens is None else r.tokens,
        batch_size=r.batch_size,
        seq_len=r.seq_len,
        unroll=r.unroll,
        lr=r.lr,
        seed=r.seed,
        autocast=multiplies_bfloat16(),
    )
    place = r.out / CACHE_NAME if r.cache is None else r.cache
    place.mkdir(parents=True, exist_ok=True)
    r.out.mkdir(parents=True, exist_ok=True)
    path = place / TOKENS_NAME
    total = place_tokens(r.target, r.text, path, seq_len=r.seq_len, seed=r.seed, most=r.text_tokens)
    windows = TokenWindows(path, r.seq_len, r.seed)
    if r.tokens is None:
        options = dataclasses.replace(options, tokens=windows.training_tokens)
    cache = FeatureCache(place, target, r.seq_len, features)
    cache.check_space()
    note(
        f"{total:,} tokens of text, trained on {options.tokens:,}; "
        f"a drafter of {config.num_parameters:,} numbers on {', '.join(config.features) or 'no features'}"
    )
    note(f"features: {cache.missing_bytes / 1e6:,.1f} MB to compute in {place}")

    def begin() -> DrafterTraining:
        vocabulary = None
        if r.draft_vocab is not None:
            vocabulary = frequent_tokens(
                path, windows.training_tokens, target.config.vocab_size, r.draft_vocab
            )
        return DrafterTraining(r.out, options, target, cache, vocabulary)

    return cache, begin


def _one_layer(config: GatedDeltaNetConfig) -> GatedDeltaNetConfig:
    """One of the target's layers, and nothing of the tokens."""
    return dataclasses.replace(
        config,
        num_hidden_layers=1,
        early_exit_layers=(),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
    )


def plot(run: DrafterTraining, path: Path) -> None:
    """Write losses and acceptance over steps as a PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, chances = figure.subplots(1, 2)
    losses.plot(
        *zip(*run.history.training, strict=True), linewidth=0.6, alpha=0.6, label="training, all steps"
    )
    steps = [step for step, _ in run.history.held_out]
    for name, axes in (("kl", losses), ("match", chances)):
        series = zip(*(figures[name] for _, figures in run.history.held_out), strict=True)
        for j, values in enumerate(series, 1):
            axes.plot(steps, values, marker="o", markersize=3, label=f"held out, position {j}")
        axes.set_xlabel("step")
        axes.legend(fontsize="small")
    losses.set_ylabel("KL(target || drafter), nats a token")
    losses.set_yscale("log")
    chances.set_ylabel("draft is the target's choice, given those before")
    figure.savefig(path, dpi=130)
