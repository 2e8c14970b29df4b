"""Drafters by name. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec._checks import check_number
from specdec._rules import FOLLOW, RULES

if TYPE_CHECKING:
    from specdec.acceptance.proposal import ProposalKind
    from specdec.drafters.shape import TreeShape

DRAFTERS: Mapping[str, str] = {
    "ngram": "what followed the same tokens earlier in prompt and output",
    "adapted": "the drafter that comes with the target and reads its features",
    "adapted:DIR": "one of specdec train-drafter",
    "adapted+ngram, adapted:DIR+ngram": "both in one tree",
    "model:DIR": "a smaller model of the same vocabulary",
    "exit:N": "the target's own first N layers, with its norm and head",
    "oracle": "for studies: the target's own next tokens, decoded beforehand, each right with probability p",
}

DEFAULT_DRAFTER = "ngram"
"""Of targets that come without a drafter of their own."""

DRAFT_EXIT = "adaptive"
"""When drafts of the method self-speculative end, where nothing else is said."""

ONLINE, NOTHING = "online", "none"
ADAPTIVE_TIERS = "auto"
"""Tiers of the method hispec, where nothing else is said: chosen for every round."""

_COMBINED = "+ngram"
# Children of each node by depth where the user does not say.
_TREES = {"model": "1", "exit": "1", "skip": "1", "tiers": "1", "adapted": "auto"}


def choices(names: Iterable[str]) -> str:
    """Names as an error lists them."""
    return ", ".join(names)


def _tree_of(kind: str, tree: str | None) -> str:
    """A drafter's tree in one spelling; its kind's default where there is none. Raises ValueError."""
    from specdec.drafters.shape import TreeShape

    parsed = TreeShape.parse(_TREES[kind] if tree is None else tree)
    return "auto" if parsed.tau is not None else ",".join(map(str, parsed.branching))


def default_drafter(model: str) -> str:
    """The drafter of a target, given as for `load_model`, where none is named: its own, if it comes with one.

    Raises:
        ValueError: there is no such model.
    """
    from specdec.models.checkpoint import resolve_model, shipped_drafter

    return DEFAULT_DRAFTER if shipped_drafter(resolve_model(model)) is None else f"adapted{_COMBINED}"


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter that was asked for by name.

    Attributes:
        kind: "ngram", "adapted", "model", "exit" or "oracle"; "skip" is the drafter of the method
            self-speculative, which has no name.
        model: of "model" the drafter's model, a directory or the name of an embedded model; of "adapted" the
            drafter's directory and of "skip" the file of its set, empty for those that come with the target;
            empty for others.
        p: the oracle's chance that a token is right.
        layers: how many of the target's layers "exit" has; 0 for others.
        tree: what drafts of "adapted", "model" and "exit" may look like, as `TreeShape.parse` reads it.
        combined: whether what "adapted" drafts is joined with what "ngram" does.
        exit: when drafts of "skip" end, as `parse_exit` reads it; empty for others.
        adapters: of the exits of "tiers": a directory, "none", or empty for those that come with the target.
        online: whether "skip" changes its set while it drafts.
        int8: whether "skip" drafts with int8 copies of the target's matrices; None: as its file says.
    """

    kind: str
    model: str = ""
    p: float = 1.0
    layers: int = 0
    tree: str = "1"
    combined: bool = False
    exit: str = ""
    adapters: str = ""
    online: bool = False
    int8: bool | None = None

    @classmethod
    def skipping(
        cls, file: str | None, *, exit: str, tree: str | None = None, int8: bool | None = None
    ) -> DrafterSpec:
        """The target itself without some of its sub-layers.

        Args:
            file: which ones, a file of `specdec.models.skip_file`; None: those that come with the target.
                "online" and "online:FILE" begin with these and change them while they draft, "none" leaves
                nothing out.
            exit: when drafts end, see `specdec.drafters.draft_exit.parse_exit`.
            tree: as of `parse`; None: chains.
            int8: draft with int8 copies of the matrices; None: where the file says so, and of "none".

        Raises:
            ValueError: `exit` or `tree` is no such text, `file` is empty, or `exit` widens a tree.
        """
        from specdec.drafters.draft_exit import parse_exit

        widen = parse_exit(exit).widen
        online, colon, path = (file or "").partition(":")
        if online != ONLINE:
            online, colon, path = "", "", file or ""
        if file == "" or (colon and not path):
            raise ValueError(f"skip: got {file!r}, want a file, {ONLINE}, {ONLINE}:FILE or {NOTHING}")
        if path == NOTHING and int8 is False and not online:
            raise ValueError(f"skip: got {file!r}, which drafts as dearly as it decodes without int8 weights")
        shape = _tree_of("skip", tree)
        spec = cls("skip", path, tree=shape, exit=exit.strip(), online=bool(online), int8=int8)
        if widen > 1 and not spec.shape.is_chain:
            raise ValueError(
                f"draft_exit: got {exit!r}, but only chains are widened, not the tree {spec.tree}"
            )
        return spec

    @classmethod
    def tiered(
        cls,
        tiers: str,
        *,
        adapters: str | None = None,
        int8: bool | None = None,
        tree: str | None = None,
    ) -> DrafterSpec:
        """The target's own first layers, in two or three tiers.

        Args:
            tiers: as `specdec.drafters.plan.Plan.parse` reads it, or "auto".
            adapters: of the exits, a directory of `specdec train-exits`; None: those that come with the
                target. "none" reads the exits as they are.
            int8: exits are read through a copy of the head in int8; None: they are not.
            tree: as of `parse`; None: chains.

        Raises:
            ValueError: `tiers` or `tree` is no such text, or `adapters` is empty.
        """
        from specdec.drafters.plan import Plan

        if adapters == "":
            raise ValueError(f"exit_adapters: got '', want a directory or {NOTHING}")
        tiers = tiers.strip()
        if tiers != ADAPTIVE_TIERS:
            tiers = str(Plan.parse(tiers))
        shape = _tree_of("tiers", tree)
        if shape == "auto":
            raise ValueError("draft_tree: got auto, want numbers of children by depth for tiers, such as 2,1")
        return cls("tiers", tiers, tree=shape, adapters=adapters or "", int8=int8)

    @classmethod
    def parse(cls, text: str, *, p: float = 1.0, tree: str | None = None) -> DrafterSpec:
        """Reads one of `DRAFTERS`.

        Args:
            text: the name.
            p: the oracle's chance that a token is right, in [0, 1]; other drafters ignore it.
            tree: children of each node by depth, such as "2,2,1"; "1" is a chain, "auto" a tree pruned by its
                chances. None: "auto" for "adapted", chains for others. Drafters whose shape is not up to the
                user ignore it.

        Raises:
            ValueError: no such drafter (the message lists them), p is no probability, or the tree no list.
        """
        alone = text.removesuffix(_COMBINED)
        kind, colon, rest = (alone if alone.startswith("adapted") else text).partition(":")
        if kind in _TREES and kind != "tiers":
            shape = _tree_of(kind, tree)
            if kind == "model" and rest:
                return cls(kind, rest, tree=shape)
            if kind == "adapted" and bool(colon) == bool(rest):
                return cls(kind, rest, tree=shape, combined=alone != text)
            if kind == "exit" and rest.isdecimal() and int(rest) > 0:
                return cls(kind, layers=int(rest), tree=shape)
        if kind in ("ngram", "oracle") and not colon:
            check_number("oracle_p", p, 0.0, 1.0)
            return cls(kind, p=p if kind == "oracle" else 1.0)
        if kind == "exit":
            raise ValueError(f"drafter: got {text!r}, want exit:N, N from 1 to the target's layers less one")
        raise ValueError(f"drafter: got {text!r}, want one of {choices(DRAFTERS)}")

    @property
    def name(self) -> str:
        """What `parse` reads."""
        if self.kind == "exit":
            return f"exit:{self.layers}"
        kind = f"{self.kind}:{ONLINE}" if self.online else self.kind
        name = f"{kind}:{self.model}" if self.model else kind
        return f"{name}{_COMBINED}" if self.combined else name

    @property
    def shape(self) -> TreeShape:
        """The shape of its drafts."""
        from specdec.drafters.shape import TreeShape

        return TreeShape.parse(self.tree)

    @property
    def is_chain(self) -> bool:
        """Whether no node of its drafts has two children."""
        from specdec.drafters.draft_exit import parse_exit

        if self.exit and parse_exit(self.exit).widen > 1:
            return False
        return not self.has_model or self.shape.is_chain

    @property
    def other_tree(self) -> str | None:
        """The shape of its drafts where it is not what such drafters have by default."""
        return self.tree if self.tree != _TREES.get(self.kind, self.tree) else None

    @property
    def label(self) -> str:
        """How tables call it; an oracle always shows that it is one, and its p."""
        if self.kind == "oracle":
            return f"{self.name} p={self.p:g}"
        parts = (("tree", self.other_tree), ("exit", self.exit), ("adapters", self.adapters))
        told = [self.name, *([] if self.int8 is None else ["int8" if self.int8 else "own weights"])]
        return " ".join([*told, *(f"{name} {value}" for name, value in parts if value)])

    @property
    def needs_continuations(self) -> bool:
        """Whether the prompts must be decoded greedily first."""
        return self.kind == "oracle"

    @property
    def has_model(self) -> bool:
        """Whether it drafts with a model, `load_drafter_model`, whose trees have a shape of the user's."""
        return self.kind in _TREES

    @property
    def draws(self) -> bool:
        """Whether it draws its tokens at random where the target does. Together with "ngram" it does not, as
        drawn tokens share no tree with others, and with a set that changes by the clock, as no seed would
        repeat them.
        """
        return self.has_model and not self.combined and not self.online

    def check_acceptance(self, rule: str) -> None:
        """Refuses a rule that is not exact for what this drafter proposes to sampled requests.

        Raises:
            ValueError: naming the rule and the proposal.
        """
        from specdec.acceptance.rules import check_rule, resolve_rule

        check_rule(rule)
        resolve_rule(rule, self.proposes(rule), chain=self.is_chain)

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
            return "block" if self.is_chain else "traversal"
        return rule
