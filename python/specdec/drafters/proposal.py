"""What a drafter proposes for a round, and the batch that the target verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec._checks import shown
from specdec.acceptance.proposal import ProposalKind
from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one sequence.

    Attributes:
        tree: the drafts. The last emitted token, below which the roots hang, is not in it.
        kind: how the tokens came about.
        draft_probs: float32 [R, V], distributions that nodes were drawn from, after the same logits
            processing as the target's; None for DETERMINISTIC. The proposals of a round may share one tensor.
        rows: [n] the row of `draft_probs` that each node was drawn from; None: node i from row i. Siblings of
            a WITHOUT_REPLACEMENT proposal were all drawn from one row, which still holds the tokens that were
            taken out of it.
        chances: [n] the estimated chance that a node is accepted, its whole path with it. They do not
            increase, so the best tree of n nodes is the first n. None: the drafter has no idea.

    Raises:
        ValueError: `tree` or `kind` is something else, or `draft_probs`, `rows` or `chances` does not fit
            them.

    Example: two children of the last token and one grandchild, drawn from two distributions.
        >>> q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.4, 0.0]])
        >>> tree = TokenTree([1, 2, 0], parents=[-1, -1, 0])
        >>> Proposal(tree, ProposalKind.WITHOUT_REPLACEMENT, q, rows=(0, 0, 1)).truncate(2).rows
        (0, 0)
    """

    tree: TokenTree
    kind: ProposalKind
    draft_probs: Tensor | None = None
    rows: tuple[int, ...] | None = None
    chances: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tree, TokenTree):
            raise ValueError(f"tree: got {shown(self.tree)}, want a TokenTree")
        if not isinstance(self.kind, ProposalKind):
            raise ValueError(f"kind: got {shown(self.kind)}, want a ProposalKind, such as ProposalKind.IID")
        probs, rows, nodes = self.draft_probs, self.rows, len(self.tree)
        chances = self.chances
        if chances is not None:
            if len(chances) != nodes:
                raise ValueError(f"chances: got {len(chances)} numbers, want {nodes}, one for each node")
            if any(not 0.0 <= b <= a <= 1.0 for a, b in zip((1.0, *chances), chances, strict=False)):
                raise ValueError(f"chances: got {chances}, want numbers from 1 to 0 that do not increase")
        if self.kind is ProposalKind.DETERMINISTIC:
            if probs is not None or rows is not None:
                name, got = ("rows", shown(rows)) if probs is None else ("draft_probs", _describe(probs))
                raise ValueError(f"{name}: got {got}, want None for {self.kind.name}")
            return
        if not isinstance(probs, Tensor) or probs.dtype != torch.float32 or probs.ndim != 2:
            raise ValueError(f"draft_probs: got {_describe(probs)}, want float32 [R, V] for {self.kind.name}")
        if rows is None:
            if len(probs) != nodes:
                raise ValueError(
                    f"draft_probs: got {_describe(probs)}, want [{nodes}, V], a row a node, as rows is None"
                )
        elif len(rows) != nodes or (nodes and not 0 <= min(rows) <= max(rows) < len(probs)):
            raise ValueError(f"rows: got {rows}, want {nodes} numbers from 0 to {len(probs) - 1}")
        if self.kind is ProposalKind.WITHOUT_REPLACEMENT:
            self._check_siblings(range(nodes) if rows is None else rows)

    def _check_siblings(self, rows: Sequence[int]) -> None:
        taken: dict[int, tuple[int, set[int]]] = {}  # by parent: row, tokens
        for node, (token, parent) in enumerate(zip(self.tree.tokens, self.tree.parents, strict=True)):
            row, tokens = taken.setdefault(parent, (rows[node], set()))
            if rows[node] != row:
                raise ValueError(
                    f"rows: got row {rows[node]} for node {node}, want {row}, that of its siblings, as "
                    "they were drawn without replacement"
                )
            if token in tokens:
                raise ValueError(
                    f"tree: got token {token} for node {node} and for a sibling, want another, as they were "
                    "drawn without replacement"
                )
            tokens.add(token)

    @staticmethod
    def empty() -> Proposal:
        """No drafts: the round is a plain decode step."""
        return _EMPTY

    def gain(self, price: float) -> float:
        """Tokens that the drafts are expected to bring above a price a node, those left out that bring less;
        0 where the drafter states no chances.
        """
        return sum([c - price for c in self.chances or () if c > price])

    def truncate(self, nodes: int) -> Proposal:
        """The proposal of the first `nodes` nodes (all, where it has no more)."""
        if nodes >= len(self.tree):
            return self
        if nodes == 0:
            return _EMPTY
        probs, rows = self.draft_probs, self.rows
        if rows is not None:
            rows = rows[:nodes]
        elif probs is not None:
            probs = probs[:nodes]
        chances = None if self.chances is None else self.chances[:nodes]
        return Proposal(self.tree.truncate(nodes), self.kind, probs, rows, chances)


def _describe(probs: object) -> str:
    if not isinstance(probs, Tensor):
        return shown(probs)
    return f"{str(probs.dtype).removeprefix('torch.')} {list(probs.shape)}"


_EMPTY = Proposal(TokenTree(()), ProposalKind.DETERMINISTIC)


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """The nodes of a round. Node 0 of every row is the sequence's last emitted token, draft i is node i + 1.

    Attributes:
        tokens: int64 [B, N], N = 1 + the most drafts of a row; 0 beyond a row's length.
        parents: int32 [B, N], -1 for node 0 and beyond a row's length; None where all rows are chains.
        lengths: int32 [B], nodes of each row.
        draft_probs: float32 [R, V], what the drawn nodes were drawn from; None where nothing was drawn. The
            proposals' own tensor, not a copy, where they share one.
        draft_rows: int32 [B, N], each node's row of `draft_probs`, 0 where it was not drawn; None like those.
    """

    tokens: Tensor
    parents: Tensor | None
    lengths: Tensor
    draft_probs: Tensor | None = None
    draft_rows: Tensor | None = None


def batch_proposals(root_tokens: Sequence[int], proposals: Sequence[Proposal]) -> ProposalBatch:
    """Puts each sequence's drafts below its last emitted token.

    Args:
        root_tokens: [B] last emitted token of each sequence.
        proposals: [B] its drafts.

    Raises:
        ValueError: the two differ in length, or drawn proposals in their vocabulary.
    """
    if len(root_tokens) != len(proposals):
        raise ValueError(f"proposals: got {len(proposals)}, want {len(root_tokens)}, one for each root token")
    lengths = [1 + len(p.tree) for p in proposals]
    nodes = max(lengths, default=1)
    tokens = [
        [root, *p.tree.tokens, *(0,) * (nodes - length)]
        for root, p, length in zip(root_tokens, proposals, lengths, strict=True)
    ]
    parents = None
    if not all(p.tree.is_chain for p in proposals):
        rows = [
            [-1, *(above + 1 for above in p.tree.parents), *(-1,) * (nodes - length)]
            for p, length in zip(proposals, lengths, strict=True)
        ]
        parents = torch.from_numpy(np.array(rows, np.int32))
    draft_probs, draft_rows = _batch_rows(proposals, nodes)
    # numpy reads nested lists about three times as fast as torch.tensor does.
    return ProposalBatch(
        torch.from_numpy(np.array(tokens, np.int64).reshape(len(proposals), nodes)),
        parents,
        torch.from_numpy(np.array(lengths, np.int32)),
        draft_probs,
        draft_rows,
    )


def _batch_rows(proposals: Sequence[Proposal], nodes: int) -> tuple[Tensor | None, Tensor | None]:
    """Distributions of all proposals one below the other, each tensor once; the rows of [B, N] nodes."""
    first: dict[int, int] = {}  # by tensor: its first row
    parts: list[Tensor] = []
    count = 0
    rows = np.zeros((len(proposals), nodes), np.int32)
    for row, proposal in zip(rows, proposals, strict=True):
        probs, drafts = proposal.draft_probs, len(proposal.tree)
        if probs is None or drafts == 0:
            continue
        if id(probs) not in first:
            first[id(probs)] = count
            parts.append(probs)
            count += len(probs)
        row[1 : 1 + drafts] = range(drafts) if proposal.rows is None else proposal.rows
        row[1 : 1 + drafts] += first[id(probs)]
    if not parts:
        return None, None
    widths = {p.shape[1] for p in parts}
    if len(widths) > 1:
        raise ValueError(f"draft_probs: got vocabularies of {sorted(widths)}, want one for all proposals")
    return parts[0] if len(parts) == 1 else torch.cat(parts), torch.from_numpy(rows)
