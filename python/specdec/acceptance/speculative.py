"""Exact speculative sampling: whatever is drafted, the emitted tokens follow the target's distribution.

Convention, here and everywhere: `p_target` is what the target samples from, `p_draft` is what the drafter
sampled from, both after `process_logits` with the same parameters; row i is the distribution of the token
*after* node i.

The rules are written against `Decisions`. A sequence runs them with its seeded numbers; the proofs in
`tests/lossless` run the same code over every outcome and add up the exact probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.acceptance.history import TokenHistory
from specdec.acceptance.params import SamplingParams
from specdec.acceptance.processing import process_logits
from specdec.acceptance.rng import Stream, categorical, uniform

_Row = NDArray[np.floating]


class Decisions(Protocol):
    """Where the rules' random outcomes come from. `depth` counts a round's emitted tokens from 0."""

    def accept(self, depth: int, p: float, q: float) -> bool:
        """True with probability min(1, p / q); q > 0."""

    def sample(self, depth: int, weights: _Row) -> int:
        """An index with probability proportional to its weight; weights [V] are non-negative."""


class SeededDecisions:
    """The decisions of one sequence: `position` is that of the first token the round emits."""

    def __init__(self, seed: int, position: int) -> None:
        self._seed = seed
        self._position = position

    def accept(self, depth: int, p: float, q: float) -> bool:
        """Accept where `u q < p`, u from the position's ACCEPT stream."""
        return uniform(self._seed, self._position + depth, Stream.ACCEPT) * q < p

    def sample(self, depth: int, weights: _Row) -> int:
        """`categorical` at the position's SAMPLE stream."""
        return categorical(weights, uniform(self._seed, self._position + depth, Stream.SAMPLE))


class _Given:
    """Decisions from uniforms that the caller drew."""

    def __init__(self, accept: Sequence[float], sample: Sequence[float]) -> None:
        self._accept, self._sample = accept, sample

    def accept(self, depth: int, p: float, q: float) -> bool:
        return self._accept[depth] * q < p

    def sample(self, depth: int, weights: _Row) -> int:
        return categorical(weights, self._sample[depth])


class Accepted(NamedTuple):
    """What a round decided.

    Attributes:
        path: node indices from the root token's node 0 to the last accepted node.
        next_token: the token emitted after the path.
    """

    path: list[int]
    next_token: int


def walk_chain(
    p_target: Callable[[int], _Row], p_draft: Sequence[_Row] | _Row, drafts: Sequence[int], decide: Decisions
) -> Accepted:
    """Speculative sampling on a chain (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Draft x is accepted with probability min(1, p(x) / q(x)). The first rejection emits a token of
    norm([p - q]+) instead; if none is rejected a bonus token of p is emitted.

    Args:
        p_target: maps node i to its row [V]; called for nodes 0..n in order, only as far as the walk gets.
        p_draft: n rows [V]; row i is what draft i was drawn from. A row of zeros rejects its draft and emits
            from p.
        drafts: n tokens.
        decide: the random outcomes.
    """
    for i, x in enumerate(drafts):
        p, q = p_target(i), p_draft[i]
        if q[x] > 0.0 and decide.accept(i, float(p[x]), float(q[x])):
            continue
        residual = np.maximum(np.subtract(p, q, dtype=np.float64), 0.0)
        # [p - q]+ vanishes only where p == q up to rounding; there p is the residual's limit.
        return Accepted(list(range(i + 1)), decide.sample(i, residual if residual.any() else p))
    n = len(drafts)
    return Accepted(list(range(n + 1)), decide.sample(n, p_target(n)))


def walk_deterministic(
    p_target: Callable[[int], _Row], tokens: Sequence[int], parents: Sequence[int], decide: Decisions
) -> Accepted:
    """Sampling with drafts that were not drawn at random (n-gram, greedy drafter): any tree, exactly.

    At each node one token is drawn from p as plain decoding would draw it; the walk goes on into the child
    that carries it and ends where there is none. This has the law of testing the children one by one against
    a one-hot q (accept x with probability p(x), else zero x in p and renormalise, at last sample from what
    remains), and more: under one seed the text is token for token that of plain decoding, whatever is
    drafted. Repeated siblings share one draw.

    Args:
        p_target: maps node i to its row [V]; called only for nodes the walk visits.
        tokens: [N] token of each node; node 0 is the root token.
        parents: [N] parent of each node, smaller than the node; -1 for node 0.
        decide: the random outcomes; only `sample` is used.
    """
    here = [0]  # all nodes that spell the accepted text
    depth = 0
    while True:
        x = decide.sample(depth, p_target(here[0]))
        below = [j for j in range(here[0] + 1, len(tokens)) if tokens[j] == x and parents[j] in here]
        if not below:
            break
        here, depth = below, depth + 1
    node, path = here[0], []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return Accepted(path[::-1], x)


def accept_chain(
    p_target: _Row,
    p_draft: _Row | None,
    draft_tokens: Sequence[int],
    accept_uniforms: Sequence[float],
    sample_uniforms: Sequence[float],
) -> tuple[int, int]:
    """Exact acceptance of one chain from probability rows and given uniforms.

    Args:
        p_target: [n+1, V] target rows; row i is the distribution of draft i, row n that of the bonus token.
        p_draft: [n, V], row i is what draft i was drawn from; None for drafts that were not drawn at random.
        draft_tokens: [n].
        accept_uniforms: [n] uniforms in [0, 1), one an acceptance test; unused where p_draft is None.
        sample_uniforms: [n+1] uniforms in [0, 1), one a position where a token may be drawn.

    Returns:
        (number of accepted drafts, the token emitted after them).

    Raises:
        ValueError: the shapes disagree or a draft is outside the vocabulary.

    >>> p, q = np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.0, 1.0]])
    >>> accept_chain(p, q, [1], [0.4], [0.0, 0.0]), accept_chain(p, q, [1], [0.6], [0.0, 0.0])
    ((1, 0), (0, 0))
    """
    drafts = [int(x) for x in draft_tokens]
    n = len(drafts)
    if p_target.ndim != 2 or p_target.shape[0] != n + 1:
        raise ValueError(f"p_target: got {p_target.shape}, want [{n + 1}, V] for {n} drafts")
    _check_drafts(drafts, p_target.shape[1])
    decide = _Given(accept_uniforms, sample_uniforms)
    if p_draft is None:
        path, x = walk_deterministic(p_target.__getitem__, [-1, *drafts], range(-1, n), decide)
    else:
        _check_p_draft(p_draft, n, p_target.shape[1])
        path, x = walk_chain(p_target.__getitem__, p_draft, drafts, decide)
    return len(path) - 1, x


class _Tree(Protocol):
    @property
    def parents(self) -> Any: ...


class _Kind(Protocol):
    @property
    def name(self) -> str: ...


class ProposalLike(Protocol):
    """What acceptance reads of a drafter's proposal; the round's root token is not in it."""

    @property
    def tree(self) -> _Tree:
        """`parents`: n ints, -1 for a child of the root token."""

    @property
    def kind(self) -> _Kind:
        """DETERMINISTIC, IID or WITHOUT_REPLACEMENT."""

    @property
    def draft_probs(self) -> Tensor | None:
        """[n, V]: row j is the processed row that node j's token was drawn from; None if DETERMINISTIC."""


def accept_sampled(
    logits: Tensor,
    tokens: Sequence[int],
    proposal: ProposalLike | None,
    params: SamplingParams,
    history: TokenHistory | None,
    seed: int,
    position: int,
) -> Accepted:
    """Decide one sequence's round: which drafts are kept and which token follows.

    Args:
        logits: [N, V], any float dtype, the target's logits after each node; node 0 is the root token.
        tokens: [N] token of each node.
        proposal: the drafts that make up nodes 1..N-1 (its node j is node j + 1 here); None for a round
            without drafts.
        params: the sequence's parameters, those its drafts were drawn with.
        history: what the sequence has seen, the root token included; needed where there is a repetition
            penalty.
        seed: the sequence's seed (`resolve_seed`).
        position: index in the sequence, prompt included, of the first token this round emits.

    Raises:
        ValueError: shapes disagree, a token is outside the vocabulary, the kind of proposal has no exact rule
            for its topology yet, or the penalty lacks its history.
    """
    return decide_round(logits, tokens, proposal, params, history, SeededDecisions(seed, position))


def decide_round(
    logits: Tensor,
    tokens: Sequence[int],
    proposal: ProposalLike | None,
    params: SamplingParams,
    history: TokenHistory | None,
    decide: Decisions,
) -> Accepted:
    """`accept_sampled` with the random outcomes left to `decide`."""
    nodes = [int(t) for t in tokens]
    if logits.ndim != 2 or logits.shape[0] != len(nodes) or not nodes:
        raise ValueError(f"logits: got {tuple(logits.shape)}, want [N, V] for N = {len(nodes)} >= 1 tokens")
    vocab = logits.shape[1]
    _check_drafts(nodes[1:], vocab)
    parents = [-1] if proposal is None else [-1, *(int(j) + 1 for j in proposal.tree.parents)]
    if len(parents) != len(nodes):
        raise ValueError(f"tokens: got {len(nodes)}, want the root token and {len(parents) - 1} drafts")
    rows = _Rows(logits, nodes, parents, params, history)
    kind = "DETERMINISTIC" if proposal is None else proposal.kind.name
    if proposal is None or kind == "DETERMINISTIC":
        return walk_deterministic(rows, nodes, parents, decide)
    if kind not in ("IID", "WITHOUT_REPLACEMENT"):
        raise ValueError(f"proposal.kind: got {kind}, want DETERMINISTIC, IID or WITHOUT_REPLACEMENT")
    if parents != list(range(-1, len(nodes) - 1)):
        rule = "SpecInfer, arXiv 2305.09781" if kind == "IID" else "Sequoia, arXiv 2402.12374"
        raise ValueError(f"proposal: got a tree of kind {kind} ({rule}), want a chain or kind DETERMINISTIC")
    if proposal.draft_probs is None:
        raise ValueError(f"proposal.draft_probs: got None, want [{len(nodes) - 1}, {vocab}] for kind {kind}")
    p_draft = proposal.draft_probs.numpy()
    _check_p_draft(p_draft, len(nodes) - 1, vocab)
    return walk_chain(rows, p_draft, nodes[1:], decide)


_BLOCK = 32768  # elements of a softmax that torch leaves in one thread


class _Rows:
    """Target rows on demand, cheap ones a few at a time: most walks end early.

    A row has the same bits made alone or with others.
    """

    def __init__(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        parents: Sequence[int],
        params: SamplingParams,
        history: TokenHistory | None,
    ) -> None:
        self._logits, self._tokens, self._parents = logits, tokens, parents
        self._params, self._history = params, history
        alone = params.contextual or params.filtered
        self._height = 1 if alone else max(1, _BLOCK // logits.shape[1])
        self._blocks: dict[int, _Row] = {}

    def __call__(self, node: int) -> _Row:
        """Row [V] of the distribution after `node`."""
        start = node - node % self._height
        if start not in self._blocks:
            logits = self._logits[start : start + self._height]
            self._blocks[start] = process_logits(logits, self._params, self._before(node)).numpy()
        row: _Row = self._blocks[start][node - start]
        return row

    def _before(self, node: int) -> TokenHistory | None:
        if not self._params.contextual or self._history is None:
            return self._history
        path = []
        while node > 0:  # the root token is in the history
            path.append(self._tokens[node])
            node = self._parents[node]
        return self._history.with_path(path[::-1])


def _check_drafts(drafts: Sequence[int], vocab: int) -> None:
    for i, token in enumerate(drafts):
        if not 0 <= token < vocab:
            raise ValueError(f"draft {i}: got token {token}, want a token in [0, {vocab})")


def _check_p_draft(p_draft: _Row, drafts: int, vocab: int) -> None:
    if p_draft.shape != (drafts, vocab):
        raise ValueError(f"p_draft: got {p_draft.shape}, want [n, V] = [{drafts}, {vocab}]")
