"""Decoding methods and drafters by name. Importing this package imports no torch; building a method does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specdec.methods.building import build_drafter, load_drafter_model, load_skip_file, read_skip_file
from specdec.methods.spec import (
    ADAPTIVE_TIERS,
    DEFAULT_DRAFTER,
    DRAFT_EXIT,
    DRAFTERS,
    NOTHING,
    DrafterSpec,
    choices,
    default_drafter,
)

if TYPE_CHECKING:
    from specdec.drafters.base import Drafter
    from specdec.loop import Loop
    from specdec.models.base import CausalLM


__all__ = [
    "ADAPTIVE_TIERS",
    "DEFAULT_DRAFTER",
    "DRAFTERS",
    "DRAFT_EXIT",
    "METHODS",
    "NOTHING",
    "DrafterSpec",
    "Method",
    "MethodOptions",
    "build_drafter",
    "choices",
    "default_drafter",
    "get_method",
    "load_drafter_model",
    "load_skip_file",
    "read_skip_file",
]


@dataclass(frozen=True)
class MethodOptions:
    """What a method may be asked for; each takes what concerns it.

    Attributes:
        slots: sequences that are decoded at the same time.
        commit: when an accepted path is folded into the state.
        max_draft: most draft tokens a sequence gets in one round.
        adaptive: draft only as much as pays.
        acceptance: the rule that decides sampled rounds, see `specdec.acceptance.RULES`.
    """

    slots: int = 1
    commit: Literal["deferred", "eager"] = "deferred"
    max_draft: int = 16
    adaptive: bool = True
    acceptance: str = "auto"


@dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
        description: one line for help texts and errors.
        drafts: whether it takes a drafter.
        build: (model, drafter, options) -> a loop; the drafter is None exactly where `drafts` is False.
        skips: whether its drafter is always `DrafterSpec.skipping`.
        tiers: whether its drafter is always `DrafterSpec.tiered`.
    """

    description: str
    drafts: bool
    build: Callable[[CausalLM, Drafter | None, MethodOptions], Loop]
    skips: bool = False
    tiers: bool = False


def _autoregressive(model: CausalLM, drafter: Drafter | None, options: MethodOptions) -> Loop:
    from specdec.methods.autoregressive import autoregressive

    return autoregressive(model, slots=options.slots)


def _specla(model: CausalLM, drafter: Drafter | None, options: MethodOptions) -> Loop:
    from specdec.methods.specla import specla

    if drafter is None:
        raise ValueError("drafter: got None, want a drafter for the method specla")
    return specla(
        model,
        drafter,
        slots=options.slots,
        commit=options.commit,
        max_draft=options.max_draft,
        adaptive=options.adaptive,
        acceptance=options.acceptance,
    )


def _self_speculative(model: CausalLM, drafter: Drafter | None, options: MethodOptions) -> Loop:
    from specdec.drafters.layer_skip import LayerSkipDrafter
    from specdec.methods.own_memory import loop_of

    if not isinstance(drafter, LayerSkipDrafter):
        raise ValueError(
            f"drafter: got {getattr(drafter, 'name', None)}, want the target itself without some of its "
            "sub-layers for the method self-speculative"
        )
    return loop_of(
        model,
        drafter,
        commit=options.commit,
        max_draft=options.max_draft,
        adaptive=options.adaptive,
        acceptance=options.acceptance,
    )


def _hispec(model: CausalLM, drafter: Drafter | None, options: MethodOptions) -> Loop:
    from specdec.drafters.hierarchical import HierarchicalDrafter
    from specdec.methods.own_memory import loop_of

    if not isinstance(drafter, HierarchicalDrafter):
        raise ValueError(
            f"drafter: got {getattr(drafter, 'name', None)}, want early exits of the target itself for the "
            "method hispec"
        )
    return loop_of(
        model,
        drafter,
        commit=options.commit,
        max_draft=options.max_draft,
        adaptive=options.adaptive,
        acceptance=options.acceptance,
    )


METHODS: Mapping[str, Method] = {
    "autoregressive": Method("one token a round, the baseline", False, _autoregressive),
    "specla": Method("drafts verified over the frozen state, accepted paths folded in late", True, _specla),
    "self-speculative": Method(
        "the target itself drafts, some of its sub-layers skipped", True, _self_speculative, skips=True
    ),
    "hispec": Method(
        "early exits of the target draft, and check before it does, in two or three tiers",
        True,
        _hispec,
        tiers=True,
    ),
}


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: there is none; the message lists those that are.
    """
    method = METHODS.get(name)
    if method is None:
        raise ValueError(f"method: got {name!r}, want one of {choices(METHODS)}")
    return method
