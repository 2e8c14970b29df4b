"""From a drafter's name to the drafter. Importing this module imports no torch; building does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from specdec._rules import RULES
from specdec.methods.spec import ADAPTIVE_TIERS, DEFAULT_DRAFTER, NOTHING, DrafterSpec

if TYPE_CHECKING:
    import torch

    from specdec.drafters.base import Drafter
    from specdec.methods import MethodOptions
    from specdec.models.base import CausalLM, SkippableLM, SkippingView
    from specdec.models.exit_adapter import ExitAdapters
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
    from specdec.models.llama import LlamaForCausalLM
    from specdec.models.recurrent_drafter import RecurrentDrafterModel
    from specdec.models.skip_file import SkipFile
    from specdec.models.skipping import SkipSet

    DrafterModel = CausalLM | RecurrentDrafterModel | ExitAdapters


def build_drafter(
    spec: DrafterSpec,
    target: CausalLM,
    options: MethodOptions,
    *,
    dtype: torch.dtype,
    continuations: Iterable[tuple[Sequence[int], Sequence[int]]] = (),
    model: DrafterModel | None = None,
) -> Drafter:
    """Makes a drafter for one loop.

    Args:
        spec: which one.
        target: the model that verifies.
        options: of the loop.
        dtype: of a drafter model's activations.
        continuations: (prompt, greedy continuation) of every prompt, for the oracle.
        model: what `load_drafter_model` gave, where it was called before; None calls it.

    Raises:
        ValueError: the drafter's model cannot be had (`load_drafter_model`) or has another vocabulary.
    """
    from specdec.drafters.ngram import NGramDrafter

    if spec.kind == "ngram":
        return NGramDrafter()
    if spec.kind == "oracle":
        from specdec.drafters.oracle import OracleDrafter

        return OracleDrafter(continuations, vocab_size=target.vocab_size, p=spec.p)
    from specdec.drafters.combined import CombinedDrafter
    from specdec.drafters.model import ModelDrafter
    from specdec.drafters.recurrent import RecurrentDrafter
    from specdec.models.exit_adapter import ExitAdapters
    from specdec.models.recurrent_drafter import RecurrentDrafterModel

    if spec.online:
        return _online(spec, target, options)
    if model is None:
        model = load_drafter_model(spec, target, dtype=dtype)
    if isinstance(model, ExitAdapters):
        return _tiers(spec, target, options, model)
    _check_vocabulary(spec, model, target)
    independent = RULES[options.acceptance].independent
    if isinstance(model, RecurrentDrafterModel):
        adapted = RecurrentDrafter(
            model,
            slots=options.slots,
            branching=spec.shape,
            drawn=spec.drawn_shape,
            replacement=independent,
            draw=spec.draws,
        )
        return CombinedDrafter(NGramDrafter(), adapted) if spec.combined else adapted
    if spec.kind == "skip":
        from specdec.drafters.draft_exit import parse_exit
        from specdec.drafters.layer_skip import LayerSkipDrafter

        end = parse_exit(spec.exit)
        return LayerSkipDrafter(
            cast("SkippingView", model),
            target.new_cache(options.slots),
            exit=end.exit,
            widen=end.widen,
            branching=spec.shape,
            drawn=spec.drawn_shape,
            replacement=independent,
        )
    return ModelDrafter(
        model,
        slots=options.slots,
        branching=spec.shape,
        drawn=spec.drawn_shape,
        replacement=independent,
    )


def _online(spec: DrafterSpec, target: CausalLM, options: MethodOptions) -> Drafter:
    """A drafter that begins with a set, or with nothing where none comes with the target, and changes it."""
    from specdec.drafters.draft_exit import parse_exit
    from specdec.drafters.online_skips import OnlineSkipDrafter

    skipped = skipped_by(spec, target)
    end = parse_exit(spec.exit)
    return OnlineSkipDrafter(
        cast("SkippableLM", target),
        skipped.skips,
        target.new_cache(options.slots),
        vocabulary=skipped.vocabulary,
        int8=skipped.int8,
        exit=end.exit,
        widen=end.widen,
        branching=spec.shape,
    )


def _tiers(spec: DrafterSpec, target: CausalLM, options: MethodOptions, adapters: ExitAdapters) -> Drafter:
    """Early exits of the target, read through these adapters."""
    from specdec.drafters.plan import Plan
    from specdec.methods.hispec import tiered_drafter

    model = _want_layers(spec, target)
    plan = None if spec.model == ADAPTIVE_TIERS else Plan.parse(spec.model)
    try:
        return tiered_drafter(
            model,
            plan,
            slots=options.slots,
            adaptive=options.adaptive,
            acceptance=options.acceptance,
            branching=spec.shape.branching,
            adapters=adapters,
            int8=bool(spec.int8),
        )
    except ValueError as error:
        raise ValueError(f"tiers: {error}") from None


def _want_layers(spec: DrafterSpec, target: CausalLM) -> GatedDeltaNetForCausalLM | LlamaForCausalLM:
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM
    from specdec.models.llama import LlamaForCausalLM

    if not isinstance(target, (GatedDeltaNetForCausalLM, LlamaForCausalLM)):
        raise ValueError(f"drafter: {spec.label} wants a model of layers, got a {type(target).__name__}")
    return target


def load_drafter_model(spec: DrafterSpec, target: CausalLM, *, dtype: torch.dtype) -> DrafterModel:
    """What an "adapted", "model", "exit" or "skip" drafter drafts with; of "tiers" the adapters of its exits.

    Args:
        spec: which one.
        target: the model that verifies.
        dtype: of a model's activations; an adapted drafter has its target's.

    Raises:
        ValueError: it cannot be read, was made for another target or has another vocabulary; the target comes
            with no drafter or set, or it has no more layers than the exit.
    """
    if spec.kind == "skip":
        return skipped_by(spec, target).view(cast("SkippableLM", target))
    if spec.kind == "model":
        from specdec.models import load_model

        try:
            model = load_model(spec.model, dtype=dtype)
        except ValueError as error:
            raise ValueError(f"drafter: {error}") from None
        _check_vocabulary(spec, model, target)
        return model
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

    if spec.kind == "tiers":
        from specdec.methods.hispec import exit_adapters

        return exit_adapters(_want_layers(spec, target), spec.adapters)
    if spec.kind == "adapted":
        if not isinstance(target, GatedDeltaNetForCausalLM):
            raise ValueError(f"drafter: {spec.label} wants a Gated DeltaNet, got a {type(target).__name__}")
        return _load_adapted(spec, target)
    layered = _want_layers(spec, target)
    most = layered.num_layers - 1
    if spec.layers > most:
        raise ValueError(
            f"drafter: got exit:{spec.layers}, want at most {most}, as the target has {most + 1} layers"
        )
    return layered.first_layers(spec.layers)


class Skipped(NamedTuple):
    """What a "skip" drafter drafts with, at first where it is online.

    Attributes:
        skips: the sub-layers that it leaves out.
        vocabulary: the only tokens that it drafts; None: all.
        int8: whether its matrices are int8 copies.
    """

    skips: SkipSet
    vocabulary: Sequence[int] | None
    int8: bool

    def view(self, model: SkippableLM) -> SkippingView:
        """The target as it drafts."""
        return model.skipping(self.skips, self.vocabulary, int8=self.int8)


def skipped_by(spec: DrafterSpec, target: CausalLM) -> Skipped:
    """What a "skip" drafter drafts with.

    Raises:
        ValueError: as `load_skip_file`; without a set an online drafter begins with nothing.
    """
    from specdec.models.skipping import SkipSet

    if spec.model == NOTHING:
        return Skipped(SkipSet(), None, spec.int8 is not False)
    file = find_skip_file(spec, target) if spec.online else load_skip_file(spec, target)
    if file is None:
        return Skipped(SkipSet(), None, spec.int8 is True)
    return Skipped(file.skips, file.vocabulary, file.int8 if spec.int8 is None else spec.int8)


def load_skip_file(spec: DrafterSpec, target: CausalLM) -> SkipFile:
    """Which sub-layers a "skip" drafter leaves out.

    Args:
        spec: which drafter.
        target: the model that verifies.

    Raises:
        ValueError: the file cannot be read or was made for another model, no set comes with this one, or it
            is of a kind that cannot skip anything.
    """
    file = find_skip_file(spec, target)
    if file is None:
        source = cast("SkippableLM", target).source
        raise ValueError(f"skip: no set comes with {source or 'this model'}, want one in a file")
    return file


def find_skip_file(spec: DrafterSpec, target: CausalLM) -> SkipFile | None:
    """The file of `load_skip_file`; None where no set is named and none comes with the target.

    Raises:
        ValueError: as there.
    """
    from specdec.models.checkpoint import weights_sha256
    from specdec.models.skip_file import shipped_skip_file

    if not hasattr(target, "skipping"):
        raise ValueError(f"skip: a {type(target).__name__} skips no sub-layers")
    model = cast("SkippableLM", target)
    digest = None if model.source is None else weights_sha256(model.source)
    path = spec.model or (None if digest is None else shipped_skip_file(digest))
    if path is None:
        return None
    file = read_skip_file(path)
    try:
        file.check_model(digest, model.num_layers, model.vocab_size)
    except ValueError as error:
        raise ValueError(f"skip: {error}") from None
    return file


def read_skip_file(path: str | Path) -> SkipFile:
    """The set in a file. Raises ValueError, naming the argument, where it cannot be read."""
    from specdec.models.skip_file import SkipFile

    try:
        return SkipFile.read(path)
    except ValueError as error:
        raise ValueError(f"skip: {error}") from None


def _load_adapted(spec: DrafterSpec, target: GatedDeltaNetForCausalLM) -> RecurrentDrafterModel:
    from specdec.models.checkpoint import shipped_drafter
    from specdec.models.recurrent_drafter import RecurrentDrafterModel

    directory = spec.model or shipped_drafter(target.source)
    if directory is None:
        raise ValueError(
            f"drafter: got {spec.name}, but no drafter comes with {target.source or 'this target'}; train "
            "one with `specdec train-drafter --target DIR --text FOLDER --out OUT` and name it adapted:OUT, "
            f"or take {DEFAULT_DRAFTER}"
        )
    try:
        return RecurrentDrafterModel.from_directory(directory, target)
    except ValueError as error:
        raise ValueError(f"drafter: {error}") from None


def _check_vocabulary(spec: DrafterSpec, model: CausalLM | RecurrentDrafterModel, target: CausalLM) -> None:
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"drafter: {spec.model} has a vocabulary of {model.vocab_size}, "
            f"want the target's {target.vocab_size}"
        )
