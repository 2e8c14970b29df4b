"""From options to exit adapters: tokens, the model's hidden states, the run, and its curves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from specdec._checks import check_integer, shown
from specdec.models.checkpoint import resolve_model
from specdec.models.exit_adapter import ExitAdaptersConfig
from specdec.training import defaults
from specdec.training.corpus import TOKENS_NAME, TokenWindows
from specdec.training.exit_loop import ExitOptions, ExitTraining, exit_features
from specdec.training.features import FeatureCache, place_tokens
from specdec.training.optimization import multiplies_bfloat16
from specdec.training.running import check_unused
from specdec.training.target import frozen_model

CACHE_NAME = "features"


@dataclasses.dataclass(frozen=True)
class ExitRequest:
    """What a new run is to be, as the command takes it.

    Attributes:
        model: name or directory of a model, or a GGUF file.
        text: folder of text files.
        out: directory of the run.
        exits: numbers of layers after which there is an exit, such as "2,5".
        width: inner width of an adapter; None for twice the width of the model.
        cache: directory of the hidden states; None for `out`/features.
        text_tokens: most tokens of the text that are read, None for all.
        tokens: trained on in all, None for one pass over the text.
        batch_size, seq_len, loss_vocab, lr, seed: see `ExitOptions`.
    """

    model: str
    text: Path
    out: Path
    exits: str
    width: int | None = None
    cache: Path | None = None
    text_tokens: int | None = None
    tokens: int | None = None
    batch_size: int = defaults.BATCH_SIZE
    seq_len: int = defaults.SEQ_LEN
    loss_vocab: int = defaults.LOSS_VOCAB
    lr: float = defaults.EXIT_LR
    seed: int = defaults.SEED


def prepare(
    request: ExitRequest, note: Callable[[str], None]
) -> tuple[FeatureCache, Callable[[], ExitTraining]]:
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
    exits = _parse_exits(r.exits)
    if r.width is not None:
        check_integer("width", r.width, 1)
    target = frozen_model(resolve_model(r.model))
    width = 2 * target.hidden_size if r.width is None else r.width
    config = ExitAdaptersConfig(
        dict.fromkeys(exits, width),
        target.name,
        target.sha256,
        target.num_layers,
        target.hidden_size,
        target.norm_eps,
    )
    options = ExitOptions(
        config,
        tokens=1 if r.tokens is None else r.tokens,
        batch_size=r.batch_size,
        seq_len=r.seq_len,
        loss_vocab=r.loss_vocab,
        lr=r.lr,
        seed=r.seed,
        autocast=multiplies_bfloat16(),
    )
    place = r.out / CACHE_NAME if r.cache is None else r.cache
    place.mkdir(parents=True, exist_ok=True)
    r.out.mkdir(parents=True, exist_ok=True)
    path = place / TOKENS_NAME
    total = place_tokens(
        r.model,
        r.text,
        path,
        seq_len=r.seq_len,
        seed=r.seed,
        most=r.text_tokens,
        eos_token_ids=target.eos_token_ids,
    )
    if r.tokens is None:
        windows = TokenWindows(path, r.seq_len, r.seed)
        options = dataclasses.replace(options, tokens=windows.training_tokens)
    cache = FeatureCache(place, target, r.seq_len, list(exit_features(config).values()))
    cache.check_space()
    note(
        f"{total:,} tokens of text, trained on {options.tokens:,}; "
        f"adapters of {config.num_parameters:,} numbers behind {_listed(exits)} of {config.layers} layers"
    )
    note(f"hidden states: {cache.missing_bytes / 1e6:,.1f} MB to compute in {place}")

    def begin() -> ExitTraining:
        run = ExitTraining(r.out, options, target, cache)
        run.evaluate()  # what the exits give without adapters
        return run

    return cache, begin


def _parse_exits(text: str) -> list[int]:
    try:
        exits = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"exits: got {shown(text)}, want numbers of layers such as 2,5") from None
    if len(set(exits)) < len(exits):
        raise ValueError(f"exits: got {shown(text)}, want each at most once")
    return sorted(exits)


def _listed(exits: list[int]) -> str:
    return ", ".join(map(str, exits))


def plot(run: ExitTraining, path: Path) -> None:
    """Write losses and agreement over steps as a PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    losses, shares = figure.subplots(1, 2)
    losses.plot(*zip(*run.history.training, strict=True), linewidth=0.6, alpha=0.6, label="training, mean")
    steps = [step for step, _ in run.history.held_out]
    for name, axes in (("kl", losses), ("agreement", shares)):
        for exit in run.history.held_out[0][1]:
            values = [figures[exit][name] for _, figures in run.history.held_out]
            axes.plot(steps, values, marker="o", markersize=3, label=f"held out, {exit} layers")
        axes.set_xlabel("step")
        axes.legend(fontsize="small")
    losses.set_ylabel("KL(last layer || exit), nats a token")
    losses.set_yscale("log")
    shares.set_ylabel("likeliest token is the last layer's (step 0: without adapter)")
    figure.savefig(path, dpi=130)
