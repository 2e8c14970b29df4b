"""Random calls of verify_stack, and the operators that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.blocks import random_block
from specdec import ops
from specdec.ops import (
    BlockEntries,
    BlockStack,
    BlockWeights,
    Factors,
    Pending,
    Prefix,
    StackOutputs,
    StackPending,
    StackPrefix,
)

ROWS = ("slots", "parents", "lengths", "scale")  # arguments that all blocks share
SMALL = {"HK": 1, "HV": 2, "DK": 32, "DV": 32}  # a block's heads
WHOLE, MIXER, MLP = "whole", "mixer", "mlp"  # what there is of a block


def random_stack(
    seed: int,
    parts: Sequence[str] = (WHOLE, WHOLE, WHOLE),
    *,
    stored: Sequence[torch.dtype] = (torch.float32,),
    earlier: str = "none",
    bias: bool | None = None,
    **block: Any,
) -> tuple[dict[str, Any], list[BlockWeights], list[dict[str, Any]]]:
    """Keyword arguments of a call, its blocks, and the keyword arguments of each one's `BlockWeights`.

    Args:
        parts: what there is of each block.
        stored: dtypes of matrices, a block's each, over again.
        earlier: "pending", "prefix" or "none".
        bias: whether convolutions have one; None: where the seed is odd.
        block: as `random_block` takes it.
    """
    made = [
        # Every sixth seed has the same choices of bias, of eigenvalues and of the scale.
        random_block(seed + 6000 * i, earlier=earlier, stored=stored[i % len(stored)], **block)
        for i in range(len(parts))
    ]
    first = made[0][0]
    call = {name: first[name] for name in ("x", *ROWS) if name in first}
    call.update(conv_states=[], states=[])
    blocks, weights, entries = [], [], []
    for part, (mine, given) in zip(parts, made, strict=True):
        if bias is not None:
            given["conv_bias"] = torch.randn(len(given["conv_weight"])) if bias else None
        if part == MIXER:
            given = {name: w for name, w in given.items() if name not in ("mlp_norm", "gate_up", "down")}
        whole = BlockWeights(**given)
        blocks.append(whole.without_mixer() if part == MLP else whole)
        weights.append(given)
        if part != MLP:
            call["conv_states"].append(mine["conv_state"])
            call["states"].append(mine["state"])
            if earlier != "none":
                entries.append(BlockEntries(mine[earlier].factors, mine[f"{earlier}_mixed"]))
    if earlier == "pending":
        _, path, path_lengths = first["pending"]
        call["pending"] = StackPending(entries, path, path_lengths)
    if earlier == "prefix":
        call["prefix"] = StackPrefix(entries, first["prefix"].parents)
    call["weights"] = BlockStack(blocks)
    return call, blocks, weights


def with_pools(call: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with pools of its own."""
    return {**call, **{name: [pool.clone() for pool in call[name]] for name in ("conv_states", "states")}}


def mixer_call(call: dict[str, Any], mixer: int) -> dict[str, Any]:
    """Keyword arguments of `verify_block` for a mixer of the stack, but x and weights."""
    mine = {name: call[name] for name in (*ROWS, "strategy") if name in call}
    mine.update(conv_state=call["conv_states"][mixer], state=call["states"][mixer])
    if call.get("pending") is not None:
        entries, path, path_lengths = call["pending"]
        factors, mine["pending_mixed"] = entries[mixer]
        mine["pending"] = Pending(factors, path, path_lengths)
    if call.get("prefix") is not None:
        entries, parents = call["prefix"]
        factors, mine["prefix_mixed"] = entries[mixer]
        mine["prefix"] = Prefix(factors, parents)
    return mine


def block_by_block(
    call: dict[str, Any], blocks: Sequence[BlockWeights], weights: Sequence[dict[str, Any]]
) -> StackOutputs:
    """The operators that verify_stack stands for."""
    made = StackOutputs([], [], [])
    x = call["x"]
    for block, w in zip(blocks, weights, strict=True):
        if block.has_mixer:
            x, o, mixed, factors = ops.verify_block(x, block, **mixer_call(call, len(made.read)))
            made.read.append(o)
            made.entries.append(BlockEntries(factors, mixed))
        else:
            wide = ops.rms_norm_linear(x, w["mlp_norm"], w["eps"], w["gate_up"])
            x = ops.swiglu_linear(wide, w["down"], residual=x)
        made.hidden.append(x)
    return made


def by_name(made: StackOutputs) -> dict[str, Tensor]:
    """The tensors of a result."""
    found = {f"hidden[{i}]": t for i, t in enumerate(made.hidden)}
    found.update((f"read[{i}]", t) for i, t in enumerate(made.read))
    for i, ((k, u, g), mixed) in enumerate(made.entries):
        assert g is not None
        found.update({f"k[{i}]": k, f"u[{i}]": u, f"g[{i}]": g, f"mixed[{i}]": mixed})
    return found


def pools(call: dict[str, Any]) -> dict[str, Tensor]:
    """Of all mixers."""
    return {f"{name}[{i}]": pool for name in ("conv_states", "states") for i, pool in enumerate(call[name])}


def cut(entries: Sequence[BlockEntries], nodes: slice) -> list[BlockEntries]:
    """Some nodes of each mixer's entries."""
    return [
        BlockEntries(Factors(*(t[:, nodes].contiguous() for t in factors if t is not None)), mixed[:, nodes])
        for factors, mixed in entries
    ]


def plain_call(**changes: Any) -> dict[str, Any]:
    call, *_ = random_stack(2, B=2, N=3, ragged=False, tree=False, **SMALL)
    return {**call, **changes}


def deferred_call(**changes: Any) -> dict[str, Any]:
    call, *_ = random_stack(2, B=2, N=3, NP=3, ragged=False, tree=False, earlier="pending", **SMALL)
    return {**call, **changes}


def prefix_call(**changes: Any) -> dict[str, Any]:
    call, *_ = random_stack(2, B=2, N=3, NP=3, ragged=False, tree=False, earlier="prefix", **SMALL)
    return {**call, **changes}
