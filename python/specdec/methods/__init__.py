"""Decoding methods and drafters by name. Importing this package imports no torch; building a method does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specdec._checks import check_number
from specdec._rules import FOLLOW, RULES

if TYPE_CHECKING:
    import torch

    from specdec.acceptance.proposal import ProposalKind
    from specdec.drafters.base import Drafter
    from specdec.loop import Loop
    from specdec.models.base import CausalLM


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
    """

    description: str
    drafts: bool
    build: Callable[[CausalLM, Drafter | None, MethodOptions], Loop]


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


METHODS: Mapping[str, Method] = {
    "autoregressive": Method("one token a round, the baseline", False, _autoregressive),
    "specla": Method("drafts verified over the frozen state, accepted paths folded in late", True, _specla),
}

DRAFTERS: Mapping[str, str] = {
    "ngram": "what followed the same tokens earlier in prompt and output",
    "model:DIR": "a smaller model of the same vocabulary",
    "exit:N": "the target's own first N layers, with its norm and head",
    "oracle": "for studies: the target's own next tokens, decoded beforehand, each right with probability p",
}

DEFAULT_DRAFTER = "ngram"


def choices(names: Iterable[str]) -> str:
    """Names as an error lists them."""
    return ", ".join(names)


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ValueError: there is none; the message lists those that are.
    """
    method = METHODS.get(name)
    if method is None:
        raise ValueError(f"method: got {name!r}, want one of {choices(METHODS)}")
    return method


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter that was asked for by name.

    Attributes:
        kind: "ngram", "model", "exit" or "oracle".
        model: the drafter's model, a directory or the name of an embedded model; empty except for "model".
        p: the oracle's chance that a token is right.
        layers: how many of the target's layers "exit" has; 0 for others.
        branching: children of each node by depth in what "model" and "exit" draft, see `TreeShape`.
    """

    kind: str
    model: str = ""
    p: float = 1.0
    layers: int = 0
    branching: tuple[int, ...] = (1,)

    @classmethod
    def parse(cls, text: str, *, p: float = 1.0, tree: str = "1") -> DrafterSpec:
        """Reads "ngram", "model:DIR", "exit:N" or "oracle".

        Args:
            text: the name.
            p: the oracle's chance that a token is right, in [0, 1]; other drafters ignore it.
            tree: children of each node by depth, such as "2,2,1"; "1" is a chain. Drafters whose shape is not
                up to the user ignore it.

        Raises:
            ValueError: no such drafter (the message lists them), p is no probability, or the tree no list.
        """
        kind, colon, rest = text.partition(":")
        if kind in ("model", "exit"):
            from specdec.drafters.shape import TreeShape

            branching = TreeShape.parse(tree).branching
            if kind == "model" and rest:
                return cls("model", rest, branching=branching)
            if rest.isdecimal() and int(rest) > 0:
                return cls("exit", layers=int(rest), branching=branching)
        if kind in ("ngram", "oracle") and not colon:
            check_number("oracle_p", p, 0.0, 1.0)
            return cls(kind, p=p if kind == "oracle" else 1.0)
        if kind == "exit":
            raise ValueError(f"drafter: got {text!r}, want exit:N, N from 1 to the target's layers less one")
        raise ValueError(f"drafter: got {text!r}, want one of {choices(DRAFTERS)}")

    @property
    def name(self) -> str:
        """What `parse` reads."""
        return {"model": f"model:{self.model}", "exit": f"exit:{self.layers}"}.get(self.kind, self.kind)

    @property
    def tree(self) -> str:
        """The shape of its drafts as `parse` reads it."""
        return ",".join(map(str, self.branching))

    @property
    def label(self) -> str:
        """How tables call it; an oracle always shows that it is one, and its p."""
        if self.kind == "oracle":
            return f"{self.name} p={self.p:g}"
        return self.name if self.branching == (1,) else f"{self.name} tree {self.tree}"

    @property
    def needs_continuations(self) -> bool:
        """Whether the prompts must be decoded greedily first."""
        return self.kind == "oracle"

    @property
    def draws(self) -> bool:
        """Whether it draws its tokens at random where the target does."""
        return self.kind in ("model", "exit")

    def check_acceptance(self, rule: str) -> None:
        """Refuses a rule that is not exact for what this drafter proposes to sampled requests.

        Raises:
            ValueError: naming the rule and the proposal.
        """
        from specdec.acceptance.rules import check_rule, resolve_rule

        check_rule(rule)
        resolve_rule(rule, self.proposes(rule), chain=set(self.branching) == {1})

    def proposes(self, rule: str) -> ProposalKind:
        """How its drafts come about where the target samples, under a rule of `RULES`. Siblings are drawn
        independently only for a rule that wants it, as they may repeat.
        """
        from specdec.acceptance.proposal import ProposalKind

        if not self.draws:
            return ProposalKind.DETERMINISTIC
        return ProposalKind.IID if RULES[rule].independent else ProposalKind.WITHOUT_REPLACEMENT

    def decided_by(self, rule: str) -> str:
        """What decides about its drafts where the target samples and `rule` of `RULES` was asked for: the
        name of a rule other than "auto", or `FOLLOW`.

        >>> DrafterSpec.parse("exit:1").decided_by("auto"), DrafterSpec.parse("ngram").decided_by("auto")
        ('block', 'follow')
        """
        from specdec.acceptance.rules import follows

        if follows(rule, self.proposes(rule)):
            return FOLLOW
        if rule in ("auto", "block", "traversal"):
            return "block" if set(self.branching) == {1} else "traversal"
        return rule


def build_drafter(
    spec: DrafterSpec,
    target: CausalLM,
    options: MethodOptions,
    *,
    dtype: torch.dtype,
    continuations: Iterable[tuple[Sequence[int], Sequence[int]]] = (),
    model: CausalLM | None = None,
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
    if spec.kind == "ngram":
        from specdec.drafters.ngram import NGramDrafter

        return NGramDrafter()
    if spec.kind == "oracle":
        from specdec.drafters.oracle import OracleDrafter

        return OracleDrafter(continuations, vocab_size=target.vocab_size, p=spec.p)
    from specdec.drafters.model import ModelDrafter

    if model is None:
        model = load_drafter_model(spec, target, dtype=dtype)
    _check_vocabulary(spec, model, target)
    return ModelDrafter(
        model,
        slots=options.slots,
        branching=spec.branching,
        replacement=RULES[options.acceptance].independent,
    )


def load_drafter_model(spec: DrafterSpec, target: CausalLM, *, dtype: torch.dtype) -> CausalLM:
    """The model that a "model" or "exit" drafter drafts with.

    Raises:
        ValueError: it cannot be read or has another vocabulary, or the target has no more layers than the
            exit.
    """
    if spec.kind == "model":
        from specdec.models import load_model

        try:
            model = load_model(spec.model, dtype=dtype)
        except ValueError as error:
            raise ValueError(f"drafter: {error}") from None
        _check_vocabulary(spec, model, target)
        return model
    from specdec.models.gated_deltanet import GatedDeltaNetForCausalLM

    if not isinstance(target, GatedDeltaNetForCausalLM):
        raise ValueError(f"drafter: {spec.label} wants a Gated DeltaNet, got a {type(target).__name__}")
    most = target.config.num_hidden_layers - 1
    if spec.layers > most:
        raise ValueError(
            f"drafter: got exit:{spec.layers}, want at most {most}, as the target has {most + 1} layers"
        )
    return target.first_layers(spec.layers)


def _check_vocabulary(spec: DrafterSpec, model: CausalLM, target: CausalLM) -> None:
    if model.vocab_size != target.vocab_size:
        raise ValueError(
            f"drafter: {spec.model} has a vocabulary of {model.vocab_size}, "
            f"want the target's {target.vocab_size}"
        )
