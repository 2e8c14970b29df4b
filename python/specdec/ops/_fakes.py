"""What `torch.compile` and `torch.export` see of the operators: shapes and dtypes of the outputs, no data.

Only devices are checked here; every other check needs the real call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.ops._operator import argument_names, named_tensors
from specdec.ops.types import MIXER_TENSORS

R = TypeVar("R")


def _fake(op: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """`torch.library.register_fake`, with every tensor on the device of the first argument."""
    names = argument_names(op)

    def register(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def checked(first: Tensor, *others: Any) -> R:
            for name, tensor in named_tensors(names[1:], others):
                if tensor.device.type != first.device.type:
                    raise ValueError(
                        f"{name}: got a tensor on {tensor.device}, want {first.device} as the first argument"
                    )
            return function(first, *others)

        torch.library.register_fake(f"specdec::{op}")(checked)
        return function

    return register


@_fake("verify")
@_fake("verify_deferred")
def _verify(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    factor_k = k.new_empty(k.shape, dtype=torch.float32)
    factor_u = v.new_empty(v.shape, dtype=torch.float32)
    factor_g = v.new_empty((0,) if g is None else g.shape, dtype=torch.float32)
    return out, factor_k, factor_u, factor_g


@_fake("verify_layer")
@_fake("verify_layer_deferred")
def _verify_layer(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    neg_eigval: bool,
    conv_state: Tensor,
    state: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, N, C = mixed.shape
    out = mixed.new_empty((B, N, *state.shape[1:3]))
    return (out, *_factors(mixed, C, state, N))


@_fake("verify_block")
@_fake("verify_block_deferred")
def _verify_block(
    x: Tensor,
    weights: list[Tensor],
    conv_bias: Tensor | None,
    gated: bool,
    eps: float,
    neg_eigval: bool,
    conv_state: Tensor,
    state: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (x.new_empty(x.shape), *_mixer(x, weights[2], gated, state))


def _mixer(
    x: Tensor, conv: Tensor, gated: bool, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a block's mixer read, its raw projections and its factors."""
    B, N = x.shape[:2]
    HV, DV = state.shape[1:3]
    C = conv.shape[0]
    # The raw projections are a part of all projections side by side.
    mixed = x.new_empty((B, N, C + gated * HV * DV + 2 * HV))[..., :C]
    return (x.new_empty((B, N, HV, DV)), mixed, *_factors(x, C, state, N))


def _factors(x: Tensor, C: int, state: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    HV, DV, DK = state.shape[1:]
    return (
        x.new_empty((x.shape[0], N, (C - HV * DV) // (2 * DK), DK), dtype=torch.float32),
        x.new_empty((x.shape[0], N, HV, DV), dtype=torch.float32),
        x.new_empty((x.shape[0], N, HV), dtype=torch.float32),
    )


@_fake("verify_stack")
@_fake("verify_stack_deferred")
def _verify_stack(
    x: Tensor,
    weights: list[Tensor],
    parts: list[int],
    conv_biases: list[Tensor],
    gated: bool,
    eps: float,
    neg_eigval: bool,
    conv_states: list[Tensor],
    states: list[Tensor],
    *_: object,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    read: list[Tensor] = []
    entries: list[Tensor] = []
    first = 0
    for count in parts:
        if count >= MIXER_TENSORS:
            o, mixed, k, u, g = _mixer(x, weights[first + 2], gated, states[len(read)])
            read.append(o)
            entries += (k, u, g, mixed)
        first += count
    return [x.new_empty(x.shape) for _ in parts], read, entries


def _continued(prefix: list[Tensor], nodes: int | torch.SymInt) -> list[Tensor]:
    """Entries of so many nodes."""
    return [part.new_empty((part.shape[0], nodes, *part.shape[2:])) for part in prefix]


@_fake("draft_step")
def _draft_step(
    tokens: Tensor,
    parents: Tensor | None,
    lengths: Tensor | None,
    outputs: Tensor,
    prefix: list[Tensor],
    *rest: Any,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    vocab: int = rest[-2]
    B, NP, D = outputs.shape
    nodes = NP + tokens.shape[1]
    # How many rows are nodes is in the data of `lengths`.
    rows = B * tokens.shape[1] if lengths is None else torch.library.get_ctx().new_dynamic_size()
    return (
        outputs.new_empty((rows, vocab), dtype=torch.float32),
        outputs.new_empty((B, nodes, D)),
        _continued(prefix, nodes),
    )


# Places of some arguments of draft_tree behind the logits; the prefix's entries come before its parents.
_DRAFT_TREE = [
    argument_names("draft_tree")[1:].index(name) for name in ("outputs", "prefix", "table", "temperature")
]


@_fake("draft_tree")
def _draft_tree(
    logits: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    # How far the trees grow, and whether they are chains, is in the data.
    context = torch.library.get_ctx()
    outputs, prefix, table, temperature = (rest[place] for place in _DRAFT_TREE)
    B, D, V = logits.shape[0], outputs.shape[2], table.shape[0]
    most, nodes = context.new_dynamic_size(), context.new_dynamic_size()
    rows = 0 if temperature is None else context.new_dynamic_size()  # that were drawn from
    return (
        logits.new_empty((B + 1,), dtype=torch.int64),
        logits.new_empty((B, 5, most), dtype=torch.int64),
        logits.new_empty((B, 2, most), dtype=torch.float64),
        logits.new_empty((rows, 0 if temperature is None else V)),
        logits.new_empty((B, context.new_dynamic_size()), dtype=torch.int32),
        outputs.new_empty((B, nodes, D)),
        _continued(prefix, nodes),
    )


@_fake("likeliest")
def _likeliest(logits: Tensor, count: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], count)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


@_fake("commit")
@_fake("conv_commit")
def _commit(state: Tensor, *_: object) -> None:
    del state


@_fake("prefill")
def _prefill(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_fake("conv_verify")
@_fake("conv_verify_deferred")
def _conv_verify(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_fake("linear")
@_fake("swiglu_linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@_fake("rms_norm_linear")
def _rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    *_: object,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@_fake("rms_norm")
def _rms_norm(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@_fake("rotate_heads")
def _rotate_heads(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_fake("swiglu")
def _swiglu(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@_fake("gated_delta_gates")
def _gated_delta_gates(a: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape, dtype=torch.float32), a.new_empty(a.shape, dtype=torch.float32)


@_fake("accept_greedy")
@_fake("accept_sampled")
def _accept(logits: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    B, N = logits.shape[:2]
    path = logits.new_empty((B, N), dtype=torch.int32)
    return path, logits.new_empty((B,), dtype=torch.int32), logits.new_empty((B,), dtype=torch.int64)


@_fake("tree_attention")
def _tree_attention(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@_fake("sampling_probs")
def _sampling_probs(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@_fake("draw_tokens")
def _draw_tokens(probs: Tensor, count: int, *_: object) -> Tensor:
    return probs.new_empty((probs.shape[0], count), dtype=torch.int64)
