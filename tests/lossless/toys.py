"""Models whose logits depend on the last token, and rounds of speculative decoding on them.

A round is `round(text, decide) -> emitted`: `text` is the prompt and what was emitted, `decide` makes the
random decisions: `accept`, `keep` and `sample` for the rule under proof, `draft` for the drafter.
`lossless.enumeration.Branch` goes through all of them, `lossless.statistics.Numbers` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch

from lossless.reference import distribution
from specdec.acceptance import (
    ProposalKind,
    SamplingParams,
    TokenHistory,
    Typical,
    Verdict,
    decide_round,
    process_logits,
)
from specdec.acceptance.walking import path_to

PROMPT = (2, 0)

Text = tuple[int, ...]
Walk = Callable[..., Verdict]
Round = Callable[[Text, Any], list[int]]


@dataclass
class Tree:
    """Parents of the drafts, -1 below the root token."""

    parents: list[int]


@dataclass
class Proposal:
    """What a drafter hands to acceptance."""

    tree: Tree
    kind: ProposalKind
    draft_probs: torch.Tensor | None = None
    rows: tuple[int, ...] | None = None


@dataclass
class Toy:
    """A target and a drafter whose logits depend on the last token only: float64 [V, V]."""

    target: torch.Tensor
    draft: torch.Tensor
    params: SamplingParams
    _rows: dict[Hashable, np.ndarray] = field(default_factory=dict)

    @classmethod
    def random(cls, seed: int, params: SamplingParams, vocab: int = 4, scale: float = 1.5) -> Toy:
        """Normal logits, about as far apart as a poor drafter is from its target."""
        g = torch.Generator().manual_seed(seed)
        return cls(*(scale * torch.randn(2, vocab, vocab, generator=g, dtype=torch.float64)), params)

    @classmethod
    def constant(cls, p: Sequence[float], q: Sequence[float]) -> Toy:
        """p and q after every text."""
        rows = [torch.tensor([row] * len(row), dtype=torch.float64).log() for row in (p, q)]
        return cls(*rows, SamplingParams(temperature=1.0))

    @property
    def vocab(self) -> int:
        """V."""
        return self.target.shape[1]

    def context(self, text: Text) -> Hashable:
        """What of a text the rows after it depend on."""
        return (text[-1], *(sorted(text[len(PROMPT) :]) if self.params.contextual else ()))

    def history(self, text: Text) -> TokenHistory | None:
        """PROMPT and what was emitted after it, where rows depend on it."""
        if not self.params.contextual:
            return None
        return TokenHistory(self.vocab, PROMPT, text[len(PROMPT) :])

    def p(self, text: Text) -> np.ndarray:
        """[V] the processed row of the target after a text."""
        return self._row("target", text)

    def q(self, text: Text) -> np.ndarray:
        """[V] the processed row of the drafter after a text."""
        return self._row("draft", text)

    def _row(self, model: str, text: Text) -> np.ndarray:
        key = (model, self.context(text))
        if key not in self._rows:
            logits = getattr(self, model)[text[-1]]
            self._rows[key] = process_logits(logits, self.params, self.history(text)).numpy()
        return self._rows[key]

    def law(self, length: int) -> np.ndarray:
        """What plain decoding emits after PROMPT: the joint law of `length` tokens, from the naive twin."""
        law = np.ones(())
        for i in range(length):
            rows = np.empty((self.vocab,) * (i + 1))
            for text in product(range(self.vocab), repeat=i):
                logits = self.target[(*PROMPT, *text)[-1]].tolist()
                rows[text] = distribution(logits, self.params, PROMPT, text)
            law = law[..., None] * rows
        return law


class Drafts:
    """The nodes of one round, each drawn when it is first asked for.

    A node's law depends on its ancestors and, without replacement, its elder siblings alone, so whether the
    others are drawn before, after or not at all leaves the law of everything else as it is. Not drawing what
    no rule looks at keeps enumeration short.

    Args:
        toy: the models.
        text: the text before the round, the root token its last.
        parents: [N] of the nodes, -1 for node 0; grows with the drafts.
        decide: makes the draws.
        replacement: siblings are drawn independently.
    """

    def __init__(self, toy: Toy, text: Text, parents: list[int], decide: Any, replacement: bool) -> None:
        self._toy, self._parents, self._decide, self._replacement = toy, parents, decide, replacement
        self._texts: list[Text | None] = [text] + [None] * (len(parents) - 1)

    def text(self, node: int) -> Text:
        """The text up to a node, with its token."""
        known = self._texts[node]
        if known is not None:
            return known
        parent = self._parents[node]
        before = self.text(parent)
        elder = [j for j in range(1, node) if self._parents[j] == parent]
        taken = None if self._replacement else [self.text(j)[-1] for j in elder]
        q = self._toy.q(before)
        if taken is not None and len(taken) >= np.count_nonzero(q):
            token = 0  # none is left to draw: a draft of probability zero, which rules have to reject
        else:
            token = self._decide.draft(parent, len(elder), q, taken)
        self._texts[node] = known = (*before, token)
        return known

    def grow(self, parent: int) -> None:
        """One node more."""
        self._parents.append(parent)
        self._texts.append(None)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, node: int) -> int:
        return self.text(node)[-1]

    def p_target(self, node: int) -> np.ndarray:
        """[V] row of the target after the node."""
        return self._toy.p(self.text(node))

    def p_draft(self, node: int) -> np.ndarray:
        """[V] row that the node was drawn from."""
        return self._toy.q(self.text(self._parents[node]))


def nodes_of(drafts: Sequence[int]) -> list[int]:
    """Parents of a round's nodes from those of its drafts."""
    return [-1, *(j + 1 for j in drafts)]


def drawn_round(toy: Toy, drafts: Sequence[int], replacement: bool, walk: Walk) -> Round:
    """Rounds with a drawn tree, decided by `walk(p_target, p_draft, tokens, parents, decide)`.

    Args:
        toy: the models.
        drafts: parents of the drafts, -1 below the root token.
        replacement: siblings are drawn independently.
        walk: the rule.
    """
    parents = nodes_of(drafts)

    def round_(text: Text, decide: Any) -> list[int]:
        nodes = Drafts(toy, text, parents, decide, replacement)
        path, x = walk(nodes.p_target, nodes.p_draft, nodes, parents, decide)
        return [*nodes.text(path[-1])[len(text) :], x]

    return round_


def fixed_round(toy: Toy, drafts: Sequence[int], tokens: Callable[[int], Sequence[int]], walk: Walk) -> Round:
    """Rounds with a deterministic tree, decided by `walk(p_target, tokens, parents, decide)`.

    Args:
        toy: the models.
        drafts: parents of the drafts, -1 below the root token.
        tokens: the drafts, a function of the root token.
        walk: the rule.
    """
    parents = nodes_of(drafts)

    def round_(text: Text, decide: Any) -> list[int]:
        nodes = [text[-1], *tokens(text[-1])]
        texts = [(*text[:-1], *(nodes[j] for j in path_to(i, parents))) for i in range(len(nodes))]
        path, x = walk(lambda i: toy.p(texts[i]), nodes, parents, decide)
        return [*texts[path[-1]][len(text) :], x]

    return round_


def proposal_round(
    toy: Toy,
    drafts: Sequence[int],
    kind: ProposalKind,
    rule: str | Typical = "auto",
    tokens: Callable[[int], Sequence[int]] | None = None,
) -> Round:
    """Rounds from logits and a proposal through `decide_round`.

    Args:
        toy: the models.
        drafts: parents of the drafts, -1 below the root token.
        kind: how they come about.
        rule: the rule asked for.
        tokens: the drafts of a deterministic proposal, a function of the root token.
    """
    parents = nodes_of(drafts)
    eldest = [parents.index(parent) for parent in parents[1:]]

    def round_(text: Text, decide: Any) -> list[int]:
        rows: dict[int, int] = {}  # eldest sibling -> row
        if tokens is not None:
            nodes = [text[-1], *tokens(text[-1])]
            proposal = Proposal(Tree(list(drafts)), kind)
        else:
            drawn = Drafts(toy, text, parents, decide, kind is ProposalKind.IID)
            nodes = [drawn[j] for j in range(len(parents))]
            for j in reversed(eldest):  # rows in another order than nodes
                rows.setdefault(j, len(rows))
            probs = np.stack([drawn.p_draft(j) for j in rows]) if rows else np.empty((0, toy.vocab))
            proposal = Proposal(
                Tree(list(drafts)), kind, torch.from_numpy(probs), tuple(rows[j] for j in eldest)
            )
        path, x = decide_round(
            toy.target[nodes], nodes, proposal, toy.params, toy.history(text), decide, rule
        )
        assert path == path_to(path[-1], parents)
        return [*(nodes[j] for j in path[1:]), x]

    return round_
