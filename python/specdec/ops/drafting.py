"""Drafting with a one-block recurrent drafter, a level or a whole tree a call, and the likeliest tokens.

A level of drafts takes a tenth of a millisecond, less than Python needs for the choices between two of them.
Thin wrappers: every check of an argument is in C++. Letters as in `specdec.ops.block`, V the vocabulary, V'
the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._earlier import prefix_operands
from specdec.ops._operator import operator, want_type
from specdec.ops.block import BlockWeights, want_no_bias
from specdec.ops.dense import PackedWeight
from specdec.ops.layer import strategy_code
from specdec.ops.types import Factors, Prefix

_draft_step = operator("draft_step")
_draft_tree = operator("draft_tree")
_likeliest = operator("likeliest")


class DraftStep(NamedTuple):
    """What `draft_step` gives back. All but the logits are of the prefix's nodes, then of the new ones.

    Attributes:
        logits: float32 [R, V'], a row for each new node, one row's after the other's.
        outputs: [B, NP + N, D] the block's.
        mixed: [B, NP + N, C] raw projections of q, k, v.
        factors: of the recurrence.
    """

    logits: Tensor
    outputs: Tensor
    mixed: Tensor
    factors: Factors


def draft_step(
    tokens: Tensor,
    *,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    outputs: Tensor,
    table: Tensor,
    own: tuple[Tensor, PackedWeight] | None,
    weights: BlockWeights,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor | None = None,
    prefix: Prefix,
    prefix_mixed: Tensor,
    norm: Tensor,
    head: PackedWeight,
    scale: float | None = None,
    strategy: str = "exact",
) -> DraftStep:
    """One level of drafts through a one-block drafter, on a CPU: a token x whose parent's output was h enters
    as `table[x] + own(rmsnorm(h))`, passes the block, and norm and head make the logits of the token after.

    The same bits as the operators that it consists of. Drafting on the drafter's own outputs is EAGLE's (Li
    et al., 2024, arXiv:2401.15077).

    Args:
        tokens: int64 [B, N] contiguous.
        parents: int32 [B, N], each node's parent among the nodes of the prefix; None where N is 1 and every
            row goes on where the prefix ended.
        lengths: int32 [B] nodes of each row; None for N.
        outputs: [B, NP, D] contiguous, the block's for the prefix's nodes, NP at least 1.
        table: [V, D] contiguous, dtype of outputs: what a token adds.
        own: norm float32 [D] and weight [D, D] of the parent's output; None where the token alone enters.
        weights: the block's.
        conv_state, state, slots, scale: as in `verify_layer`.
        prefix: the nodes run before, with parents counted over them.
        prefix_mixed: [B, NP, C] their raw projections.
        norm: float32 [D].
        head: [V', D].
        strategy: "serial", "hybrid" or "exact", the faster of the two.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride or value, or an input requires grad in grad
            mode.
        TypeError: an argument has the wrong type.
    """
    drafter = _drafter_operands(
        outputs, table, own, weights, conv_state, state, slots, prefix, prefix_mixed, norm, head, scale
    )
    logits, outputs, mixed, k, u, g = _draft_step(
        tokens,
        parents,
        lengths,
        *drafter,
        strategy_code(strategy, tokens, state, parents is not None, True),
    )
    return DraftStep(logits, outputs, mixed, Factors(k, u, g))


class TreeRules(NamedTuple):
    """What the trees of one call of `draft_tree` have in common.

    Attributes:
        branching: children of a node by depth, 1 to 64; the last number goes on.
        tau: of a pruned tree how far below the best node's log-probability a node may be, in nats; None: a
            fixed tree.
        ratios: float64 [tables, 3, bins] contiguous, by a probability's bin and a child's rank (0, 1, all
            others): the chance that a child is kept over its probability.
        edges: float64 [bins - 1] between the bins, ascending.
        most_chance: of a child, given its parent.
        child_chance: hoped of a node's best child.
        level_price: expected tokens that a level must bring, of all rows with a price together.
        most_run: nodes of a pruned tree that are run.
        most_nodes: nodes of a row that are run, those of the prefix among them; cuts pruned trees alone.
        ends: int64 [E] tokens that end a text: drafted, but nothing below them.
        vocabulary: int64 [V'] the tokens that the columns of the logits stand for; None: the columns.
    """

    branching: Sequence[int]
    tau: float | None
    ratios: Tensor
    edges: Tensor
    most_chance: float
    child_chance: float
    level_price: float
    most_run: int
    most_nodes: int
    ends: Tensor
    vocabulary: Tensor | None = None


class TreeRequest(NamedTuple):
    """What a row of `draft_tree` asks for.

    Attributes:
        max_nodes: most drafts of the proposal. A pruned tree grows to more of them, of which the best stay.
        max_depth: levels.
        root: the prefix's node of the last emitted token.
        table: of the rules' ratios.
        node_price: expected tokens that a node must bring; None: all that is allowed is drafted.
        inverse_temperature: multiplies the row's logits.
    """

    max_nodes: int
    max_depth: int
    root: int
    table: int = 0
    node_price: float | None = None
    inverse_temperature: float = 1.0


class GrownTree(NamedTuple):
    """The nodes of a row of `draft_tree`, level by level: node 0 is the last emitted token, draft i is node
    i + 1.

    Attributes:
        tokens: of each draft.
        parents: node of each draft's parent.
        ranks: among its siblings, the likeliest first.
        chances: that all of its path is kept.
        probabilities: of each draft in its parent's row.
    """

    tokens: list[int]
    parents: list[int]
    ranks: list[int]
    chances: list[float]
    probabilities: list[float]


def draft_tree(
    logits: Tensor,
    requests: Sequence[TreeRequest],
    rules: TreeRules,
    *,
    outputs: Tensor,
    table: Tensor,
    own: tuple[Tensor, PackedWeight] | None,
    weights: BlockWeights,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor | None = None,
    prefix: Prefix,
    prefix_mixed: Tensor,
    norm: Tensor,
    head: PackedWeight,
    scale: float | None = None,
) -> tuple[list[GrownTree], int]:
    """Grows the trees of the likeliest drafts, best first (SpecLA, arXiv:2607.16673), on a CPU: `draft_step`
    and `likeliest` level by level, and between them the choices of `specdec.drafters.tree`, with the same
    numbers.

    Args:
        logits: float32 [B, V'] contiguous, after each row's last emitted token.
        requests: a row's each.
        rules: of all of them.
        outputs, table, own, weights, conv_state, state, slots, prefix, prefix_mixed, norm, head, scale: as
            in `draft_step`; the prefix's parents int32 [B, NP], or None for chains.

    Returns:
        A row's tree each, and the number of levels.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride or value, or an input requires grad in grad
            mode.
        TypeError: an argument has the wrong type.
    """
    drafter = _drafter_operands(
        outputs, table, own, weights, conv_state, state, slots, prefix, prefix_mixed, norm, head, scale
    )
    want_type("rules", rules, TreeRules)
    for price in [r.node_price for r in requests]:
        if price is not None and not price >= 0.0:  # NaN neither
            raise ValueError(f"requests: got node_price {price}, want at least 0, or None")
    even = all(r.inverse_temperature == 1.0 for r in requests)
    counts, nodes, chances = _draft_tree(
        logits,
        torch.tensor([r[:4] for r in requests], dtype=torch.int64).view(-1, 4),
        torch.tensor([-1.0 if r.node_price is None else r.node_price for r in requests], dtype=torch.float64),
        None if even else torch.tensor([r.inverse_temperature for r in requests], dtype=torch.float32),
        rules.ratios,
        rules.edges,
        rules.most_chance,
        rules.child_chance,
        rules.level_price,
        rules.branching,
        rules.tau,
        rules.most_run,
        rules.most_nodes,
        rules.ends,
        rules.vocabulary,
        *drafter,
        0,  # serial: a level is a node or a few
    )
    *sizes, levels = counts.tolist()
    grown = zip(sizes, nodes.tolist(), chances.tolist(), strict=True)
    trees = [GrownTree(*[column[:size] for column in (*ints, *floats)]) for size, ints, floats in grown]
    return trees, levels


def _drafter_operands(
    outputs: Tensor,
    table: Tensor,
    own: tuple[Tensor, PackedWeight] | None,
    weights: BlockWeights,
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor | None,
    prefix: Prefix,
    prefix_mixed: Tensor,
    norm: Tensor,
    head: PackedWeight,
    scale: float | None,
) -> tuple[Any, ...]:
    """The drafter and where its sequences stand, as both operators take them."""
    want_type("weights", weights, BlockWeights)
    want_type("head", head, PackedWeight)
    want_type("prefix", prefix, Prefix)
    want_no_bias("head", head)
    where = (conv_state, state, slots, *prefix_operands(prefix), prefix_mixed)
    own_operands = _own_operands(own)
    return (
        outputs,
        table,
        *own_operands,
        *weights.operands,
        *where,
        norm,
        head.data,
        head.out_features,
        scale,
    )


def _own_operands(own: tuple[Tensor, PackedWeight] | None) -> tuple[Tensor | None, Tensor | None]:
    if own is None:
        return None, None
    norm, weight = own
    want_type("own[1]", weight, PackedWeight)
    want_no_bias("own[1]", weight)
    if weight.out_features != weight.in_features:
        got = [weight.out_features, weight.in_features]
        raise ValueError(f"own[1]: got {got}, want [out, in] = [D, D]")
    return norm, weight.data


def likeliest(
    logits: Tensor, count: int, inverse_temperatures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row and their probabilities, on a CPU.

    Args:
        logits: float32 [R, V] contiguous.
        count: K, 1 to 64.
        inverse_temperatures: float32 [R], what each row is multiplied with; None for 1.

    Returns:
        Tokens int64 [R, K], descending, of equal ones the smaller first, and their probabilities float32 [R,
        K] in softmax(logits * inverse_temperatures). -1 and 0 where no token is left above -inf, and all
        over where a row has a NaN or +inf.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride, device or value.
        TypeError: an argument has the wrong type.
    """
    return _likeliest(logits, count, inverse_temperatures)  # type: ignore[no-any-return]
