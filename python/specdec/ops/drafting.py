"""Drafting with consecutive blocks, a level or a whole draft a call, and the likeliest tokens.

A level of drafts takes a tenth of a millisecond, less than Python needs for the choices between two of them.
Checked here is what the operators do not see: types, the sizes of packed weights, prices that are None.
Letters as in `specdec.ops.block`, V the vocabulary, V' the drafter's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.ops import _fakes  # noqa: F401  declares the operators' fakes
from specdec.ops._operator import operator, want_tensor, want_type
from specdec.ops.block import want_no_bias
from specdec.ops.dense import PackedWeight
from specdec.ops.layer import strategy_code
from specdec.ops.stack import BlockEntries, BlockStack, StackPrefix, entries_of, stack_prefix_operands

_draft_step = operator("draft_step")
_draft_tree = operator("draft_tree")
_likeliest = operator("likeliest")


class DraftAdapter(NamedTuple):
    """What stands between the blocks and the final norm, as an early exit's adapter does: an MLP behind a
    norm, added to the hidden state.

    Attributes:
        norm: float32 [D].
        gate_up: [2 F, D], the gate's rows first.
        down: [D, F].
        eps: of the norm.
    """

    norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    eps: float


class Drafting(NamedTuple):
    """What drafts. A token x whose parent's output was h enters as `table[x] + own(rmsnorm(h))` and passes
    the blocks and the adapter; norm and head make the logits of the token after.

    Attributes:
        table: [V, D] contiguous: what a token adds.
        own: norm float32 [D] and weight [D, D] of the parent's output; None where the token alone enters.
        weights: the blocks'.
        norm: float32 [D], with the blocks' eps.
        head: [V', D].
        adapter: None for none.
    """

    table: Tensor
    own: tuple[Tensor, PackedWeight] | None
    weights: BlockStack
    norm: Tensor
    head: PackedWeight
    adapter: DraftAdapter | None = None


class DraftPlace(NamedTuple):
    """Where drafts go on.

    Attributes:
        outputs: [B, NP, D] contiguous, the last block's for the prefix's nodes, NP at least 1; dtype of the
            table.
        prefix: the nodes run before, with parents counted over them.
        conv_states, states: of each mixer, as in `verify_layer`.
        slots, scale: as in `verify_layer`.
    """

    outputs: Tensor
    prefix: StackPrefix
    conv_states: Sequence[Tensor]
    states: Sequence[Tensor]
    slots: Tensor | None = None
    scale: float | None = None


class DraftStep(NamedTuple):
    """What `draft_step` gives back. All but the logits are of the prefix's nodes, then of the new ones.

    Attributes:
        logits: float32 [R, V'], a row for each new node, one row's after the other's.
        outputs: [B, NP + N, D] the last block's.
        entries: of each mixer.
    """

    logits: Tensor
    outputs: Tensor
    entries: list[BlockEntries]


def draft_step(
    tokens: Tensor,
    drafting: Drafting,
    place: DraftPlace,
    *,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    strategy: str = "exact",
) -> DraftStep:
    """One level of drafts, on a CPU: the same bits as the operators that it consists of. Drafting on the
    drafter's own outputs is EAGLE's (Li et al., 2024, arXiv:2401.15077).

    Args:
        tokens: int64 [B, N] contiguous.
        drafting: what drafts.
        place: where.
        parents: int32 [B, N], each node's parent among the nodes of the prefix; None where N is 1 and every
            row goes on where the prefix ended.
        lengths: int32 [B] nodes of each row; None for N.
        strategy: "serial", "hybrid" or "exact", the faster of the two.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride or value, or an input requires grad in grad
            mode.
        TypeError: an argument has the wrong type.
    """
    operands = _operands(drafting, place)
    code = strategy_code(strategy, tokens, place.states[0], parents is not None, True) if place.states else 0
    logits, outputs, entries = _draft_step(tokens, parents, lengths, *operands, code)
    return DraftStep(logits, outputs, entries_of(entries))


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
        threshold: nothing is drafted below a token that the drafter itself, before temperature and filters,
            gives a lower probability.
    """

    max_nodes: int
    max_depth: int
    root: int
    table: int = 0
    node_price: float | None = None
    inverse_temperature: float = 1.0
    threshold: float = 0.0


class DraftSampling(NamedTuple):
    """How drawn chains are drawn, as in `sampling_probs` and `draw_tokens`: an entry a row.

    Attributes:
        temperature, top_p, min_p: float32 [B].
        top_k: int32 [B].
        seeds: int64 [B].
        positions: int64 [B] of the round.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


class GrownTree(NamedTuple):
    """The nodes of a row of `draft_tree`, level by level: node 0 is the last emitted token, draft i is node
    i + 1.

    Attributes:
        tokens: of each draft.
        parents: node of each draft's parent.
        ranks: among its siblings, the likeliest first.
        columns: place of each draft among the row's nodes that were run, those of the prefix first; -1: it
            was not.
        rows: of `GrownTrees.probs`, that each was drawn from; -1: it was not.
        chances: that all of its path is kept.
        probabilities: of each draft in its parent's row.
    """

    tokens: list[int]
    parents: list[int]
    ranks: list[int]
    columns: list[int]
    rows: list[int]
    chances: list[float]
    probabilities: list[float]


class GrownTrees(NamedTuple):
    """What `draft_tree` gives back.

    Attributes:
        trees: a row's each.
        levels: how many there were; the first one reads the logits that are there and runs nothing.
        probs: float32 [R, V] the rows that tokens were drawn from; None where none was.
        parents: int32 [B, n] of the nodes that were run, the prefix's among them; None for chains.
        outputs: [B, n, D] the last block's.
        entries: of each mixer, of these nodes.
    """

    trees: list[GrownTree]
    levels: int
    probs: Tensor | None
    parents: Tensor | None
    outputs: Tensor
    entries: list[BlockEntries]


def draft_tree(
    logits: Tensor,
    requests: Sequence[TreeRequest],
    rules: TreeRules,
    drafting: Drafting,
    place: DraftPlace,
    *,
    sampling: DraftSampling | None = None,
) -> GrownTrees:
    """Grows the trees of the likeliest drafts, best first (SpecLA, arXiv:2607.16673), or drawn chains, on a
    CPU: `draft_step` and `likeliest`, or `sampling_probs` and `draw_tokens`, level by level, and between them
    the choices of `specdec.drafters.tree`, with the same numbers.

    Args:
        logits: float32 [B, V'] contiguous, after each row's last emitted token.
        requests: a row's each.
        rules: of all of them.
        drafting: what drafts.
        place: where.
        sampling: how chains are drawn; None: the likeliest tokens.

    Raises:
        ValueError: an argument has the wrong dtype, shape, stride or value, or an input requires grad in grad
            mode; siblings are to be drawn.
        TypeError: an argument has the wrong type.
    """
    operands = _operands(drafting, place)
    want_type("rules", rules, TreeRules)
    for price in [r.node_price for r in requests]:
        if price is not None and not price >= 0.0:  # NaN neither
            raise ValueError(f"requests: got node_price {price}, want at least 0, or None")
    even = sampling is not None or all(r.inverse_temperature == 1.0 for r in requests)
    sure = any(r.threshold > 0.0 for r in requests)
    counts, nodes, chances, probs, parents, outputs, entries = _draft_tree(
        logits,
        torch.tensor([r[:4] for r in requests], dtype=torch.int64).view(-1, 4),
        torch.tensor([-1.0 if r.node_price is None else r.node_price for r in requests], dtype=torch.float64),
        torch.tensor([r.threshold for r in requests], dtype=torch.float64) if sure else None,
        None if even else torch.tensor([r.inverse_temperature for r in requests], dtype=torch.float32),
        *(_NOT_DRAWN if sampling is None else sampling),
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
        *operands,
        0,  # serial: a level is a node or a few
    )
    *sizes, levels = counts.tolist()
    grown = zip(sizes, nodes.tolist(), chances.tolist(), strict=True)
    trees = [GrownTree(*[column[:size] for column in (*ints, *floats)]) for size, ints, floats in grown]
    return GrownTrees(
        trees,
        levels,
        None if sampling is None else probs,
        parents if parents.shape[1] else None,
        outputs,
        entries_of(entries),
    )


_NOT_DRAWN = (None,) * len(DraftSampling._fields)


def _operands(drafting: Drafting, place: DraftPlace) -> tuple[Any, ...]:
    """What drafts and where, as both operators take them."""
    want_type("drafting", drafting, Drafting)
    want_type("place", place, DraftPlace)
    table, own, weights, norm, head, adapter = drafting
    outputs, prefix, conv_states, states, slots, scale = place
    want_type("weights", weights, BlockStack)
    want_type("head", head, PackedWeight)
    want_tensor("outputs", outputs)
    want_no_bias("head", head)
    adapters, eps = _adapter_operands(adapter)
    return (
        outputs,
        *stack_prefix_operands(prefix),
        table,
        *_own_operands(own),
        *weights.operands,
        list(conv_states),
        list(states),
        slots,
        scale,
        adapters,
        eps,
        norm,
        head.data,
        head.out_features,
    )


def _adapter_operands(adapter: DraftAdapter | None) -> tuple[list[Tensor], float]:
    if adapter is None:
        return [], 0.0
    want_type("adapter", adapter, DraftAdapter)
    for name in ("gate_up", "down"):
        weight = getattr(adapter, name)
        want_type(f"adapter.{name}", weight, PackedWeight)
        want_no_bias(f"adapter.{name}", weight)
    D, F = adapter.gate_up.in_features, adapter.down.in_features
    for name, want in (("gate_up", [2 * F, D]), ("down", [D, F])):
        weight = getattr(adapter, name)
        got = [weight.out_features, weight.in_features]
        if got != want:
            raise ValueError(f"adapter.{name}: got {got}, want [out, in] = {want}")
    return [adapter.norm, adapter.gate_up.data, adapter.down.data], adapter.eps


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
