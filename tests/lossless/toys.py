"""Order-1 models over a few tokens, and rounds of speculative decoding on them.

A round is `round(history, decide) -> emitted`: `history` is the prompt and what was emitted, `decide` makes
the random
decisions: `accept` and `sample` for the rule under proof, `draft` for the drafter.
    `lossless.enumeration.Branch` goes
through all of them, `lossless.statistics.Numbers` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from lossless.reference import distribution
from specdec.acceptance import Accepted, SamplingParams, TokenHistory, decide_round, process_logits

VOCAB = 4

Walk = Callable[..., Accepted]
Pick = Callable[[int, np.ndarray, Any], "int | None"]
Round = Callable[[tuple[int, ...], Any], list[int]]


class Kind(Enum):
    """How a proposal's tokens were chosen."""

    DETERMINISTIC = 0
    IID = 1
    WITHOUT_REPLACEMENT = 2


@dataclass
class Tree:
    """Parents of the drafts, -1 below the root token."""

    parents: list[int]


@dataclass
class Proposal:
    """What a drafter hands to acceptance."""

    tree: Tree
    kind: Kind
    draft_probs: torch.Tensor | None = None
    rows: tuple[int, ...] | None = None


@dataclass
class Toy:
    """A target and a drafter whose logits depend on the last token only: float64 [V, V]."""

    target: torch.Tensor
    draft: torch.Tensor
    params: SamplingParams

    @classmethod
    def random(cls, seed: int, params: SamplingParams) -> Toy:
        """Normal logits, about as far apart as a poor drafter is from its target."""
        g = torch.Generator().manual_seed(seed)
        return cls(*(1.5 * torch.randn(2, VOCAB, VOCAB, generator=g, dtype=torch.float64)), params)

    def law(self, prompt: tuple[int, ...], length: int) -> np.ndarray:
        """What plain decoding emits: the joint law of the first `length` tokens, from the naive reference."""
        law = np.ones((VOCAB,) * length)
        for text in product(range(VOCAB), repeat=length):
            for i, x in enumerate(text):
                before = (*prompt, *text[:i])
                law[text] *= distribution(self.target[before[-1]].tolist(), self.params, (), before)[x]
        return law

    @cached_property
    def p_rows(self) -> np.ndarray:
        """[V, V] processed target rows by last token; only where no row depends on the tokens before."""
        return self._rows(self.target)

    @cached_property
    def q_rows(self) -> np.ndarray:
        """[V, V] processed draft rows by last token; only where no row depends on the tokens before."""
        return self._rows(self.draft)

    def _rows(self, logits: torch.Tensor) -> np.ndarray:
        assert not self.params.contextual
        return process_logits(logits, self.params).numpy()


def chain_round(toy: Toy, length: int, pick: Pick | None = None, walk: Walk | None = None) -> Round:
    """Rounds whose drafts are drawn from the drafter one after the other.

    Args:
        toy: the models.
        length: drafts a round.
        pick: `pick(depth, q, decisions)` replaces the drafter's draw; None from it ends the draft.
        walk: a rule with the signature of `walk_chain`, run on rows made beforehand; None runs
            `decide_round`.
    """

    def draft_row(history: tuple[int, ...], drafts: list[int]) -> np.ndarray:
        last = drafts[-1] if drafts else history[-1]
        if not toy.params.contextual:
            return toy.q_rows[last]
        before = TokenHistory(VOCAB, (), history).with_path(drafts)
        return process_logits(toy.draft[last], toy.params, before).numpy()

    def round_(history: tuple[int, ...], decisions: Any) -> list[int]:
        drafts: list[int] = []
        rows: list[np.ndarray] = []
        for depth in range(length):
            q = draft_row(history, drafts)
            x = decisions.draft(depth, q) if pick is None else pick(depth, q, decisions)
            if x is None:
                break
            drafts.append(x)
            rows.append(q)
        nodes = [history[-1], *drafts]
        if walk is not None:
            path, x = walk(lambda i: toy.p_rows[nodes[i]], rows, drafts, decisions)
        elif drafts:
            chain = Tree(list(range(-1, len(drafts) - 1)))
            proposal = Proposal(chain, Kind.IID, torch.from_numpy(np.stack(rows)))
            path, x = _decide(toy, history, nodes, proposal, decisions)
        else:
            path, x = _decide(toy, history, nodes, None, decisions)
        return [*(nodes[j] for j in path[1:]), x]

    return round_


def tree_round(
    toy: Toy,
    parents: Sequence[int],
    tokens: Callable[[tuple[int, ...]], Sequence[int]],
    walk: Walk | None = None,
) -> Round:
    """Rounds with a deterministic tree.

    Args:
        toy: the models.
        parents: of the drafts, -1 below the root token.
        tokens: the drafts, a function of the history.
        walk: a rule with the signature of `walk_deterministic`, run on rows made beforehand; None runs
            `decide_round`.
    """
    proposal = Proposal(Tree(list(parents)), Kind.DETERMINISTIC)
    above = [-1, *(j + 1 for j in parents)]

    def round_(history: tuple[int, ...], decisions: Any) -> list[int]:
        nodes = [history[-1], *tokens(history)]
        if walk is not None:
            path, x = walk(lambda i: toy.p_rows[nodes[i]], nodes, above, decisions)
        else:
            path, x = _decide(toy, history, nodes, proposal, decisions)
        return [*(nodes[j] for j in path[1:]), x]

    return round_


def _decide(
    toy: Toy, history: tuple[int, ...], nodes: list[int], proposal: Proposal | None, decisions: Any
) -> Accepted:
    before = TokenHistory(VOCAB, (), history)
    return decide_round(toy.target[nodes], nodes, proposal, toy.params, before, decisions)
