"""Random calls of draft_step, and the operators that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.blocks import random_matrix
from ops.stacks import ROWS, WHOLE, block_by_block, random_stack
from specdec import ops
from specdec.ops import (
    BlockEntries,
    BlockWeights,
    DraftAdapter,
    Drafting,
    DraftPlace,
    DraftStep,
    Factors,
    StackPrefix,
)

VOCAB = 53
Made = tuple[dict[str, Any], list[BlockWeights], list[dict[str, Any]]]


def random_drafting(
    seed: int,
    parts: Sequence[str] = (WHOLE,),
    *,
    own: bool = True,
    adapter: bool = False,
    rows: int = VOCAB,
    N: int = 4,
    NP: int = 5,
    tree: bool = True,
    **block: Any,
) -> Made:
    """Keyword arguments of a call, those of `Drafting` and `DraftPlace` among them, its blocks, and those of
    each one's `BlockWeights`. Parents are nodes of the prefix, lengths 0 to N with both among
    them; tokens and parents beyond them are out of range.
    """
    call, blocks, weights = random_stack(seed, parts, N=N, NP=NP, tree=tree, earlier="prefix", **block)
    x = call.pop("x")
    B, _, D = x.shape
    stored = block.get("stored", (torch.float32,))[-1]
    rng = torch.Generator().manual_seed(seed + 2000)
    call["slots"][0] = next(s for s in range(B + 2) if s not in call["slots"][1:].tolist())
    call["table"] = torch.randn(rows, D, generator=rng).to(x.dtype)
    call["outputs"] = torch.randn(B, NP, D, generator=rng).to(x.dtype)
    call["tokens"] = torch.randint(0, rows, (B, N), generator=rng)
    call["parents"] = torch.randint(0, NP, (B, N), generator=rng).int() if tree else None
    if call.get("lengths") is not None:
        call["lengths"].clamp_(max=N)
    for row in range(B):
        length = lengths_of(call)[row]
        call["tokens"][row, length:] = 1 << 40
        if tree:
            call["parents"][row, length:] = 1 << 30
    norm = torch.rand(D, generator=rng) + 0.5
    call["own"] = (norm, random_matrix(rng, D, D, stored)) if own else None
    call["norm"] = torch.rand(D, generator=rng) + 0.5
    call["head"] = random_matrix(rng, rows - 3, D, stored)
    call["adapter"] = None
    if adapter:
        up, down = random_matrix(rng, 22, D, stored), random_matrix(rng, D, 11, stored)
        call["adapter"] = DraftAdapter(torch.rand(D, generator=rng) + 0.5, up, down, 1e-3)
    return call, blocks, weights


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call as `draft_step` takes it."""
    rest = {name: call[name] for name in ("tokens", "parents", "lengths", "strategy") if name in call}
    return {**rest, **drafting_of(call)}


def drafting_of(call: dict[str, Any]) -> dict[str, Any]:
    """What drafts, and where."""
    return {
        "drafting": Drafting(*(call[name] for name in Drafting._fields)),
        "place": DraftPlace(*(call.get(name) for name in DraftPlace._fields)),  # type: ignore[arg-type]
    }


def lengths_of(call: dict[str, Any]) -> list[int]:
    B, N = call["tokens"].shape
    return [N] * B if call.get("lengths") is None else call["lengths"].tolist()


def inputs(call: dict[str, Any]) -> Tensor:
    """[B, N, D] what enters the blocks; zero where there is no node."""
    outputs, table, (B, N) = call["outputs"], call["table"], call["tokens"].shape
    x = torch.zeros(B, N, table.shape[1], dtype=table.dtype)
    above = torch.zeros_like(x)
    for b, length in enumerate(lengths_of(call)):
        x[b, :length] = table[call["tokens"][b, :length]]
        parents = call["parents"]
        last = outputs.shape[1] - 1
        above[b, :length] = outputs[b, [last] * length if parents is None else parents[b, :length].long()]
    if call["own"] is None:
        return x
    norm, weight = call["own"]
    return ops.rms_norm_linear(above, norm, call["weights"].eps, weight, residual=x)


def readout(call: dict[str, Any], hidden: Tensor) -> Tensor:
    """float32 [..., V'] of what the blocks made."""
    if call["adapter"] is not None:
        norm, gate_up, down, eps = call["adapter"]
        wide = ops.rms_norm_linear(hidden, norm, eps, gate_up)
        hidden = ops.swiglu_linear(wide, down, residual=hidden)
    return ops.rms_norm_linear(hidden.float(), call["norm"], call["weights"].eps, call["head"])


def composed(made: Made) -> DraftStep:
    """The operators that draft_step stands for."""
    call, blocks, weights = made
    names = (*ROWS, "prefix", "conv_states", "states", "strategy")
    stack = {name: call[name] for name in names if name in call}
    found = block_by_block({**stack, "x": inputs(call)}, blocks, weights)
    hidden = found.hidden[-1]
    valid = [hidden[b, :length] for b, length in enumerate(lengths_of(call))]
    entries = []
    for old, new in zip(call["prefix"].entries, found.entries, strict=True):
        factors = zip(old.factors, new.factors, strict=True)
        mixed = torch.cat([old.mixed, new.mixed], dim=1)
        entries.append(BlockEntries(Factors(*(torch.cat(pair, dim=1) for pair in factors)), mixed))
    return DraftStep(readout(call, torch.cat(valid)), torch.cat([call["outputs"], hidden], dim=1), entries)


def tensors(step: DraftStep) -> dict[str, Tensor]:
    """Of a result."""
    found = {"logits": step.logits, "outputs": step.outputs}
    for i, ((k, u, g), mixed) in enumerate(step.entries):
        assert g is not None
        found.update({f"mixed[{i}]": mixed, f"k[{i}]": k, f"u[{i}]": u, f"g[{i}]": g})
    return found


def rows_of(call: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The call with some of its rows."""
    some = {
        name: call[name][rows]
        for name in ("tokens", "parents", "lengths", "outputs", "slots")
        if call.get(name) is not None
    }
    entries, parents = call["prefix"]
    cut = [BlockEntries(Factors(*(t[rows] for t in factors)), mixed[rows]) for factors, mixed in entries]
    return {**call, **some, "prefix": StackPrefix(cut, None if parents is None else parents[rows])}
