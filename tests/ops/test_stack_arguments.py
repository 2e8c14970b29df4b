"""verify_stack: what is refused, by name; and the pools of all layers move or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.blocks import random_block
from ops.cases import assert_same_bits, int32
from ops.stacks import (
    SMALL,
    by_name,
    deferred_call,
    plain_call,
    pools,
    prefix_call,
    random_stack,
    with_pools,
)
from specdec import ops
from specdec.ops import (
    BlockEntries,
    BlockStack,
    BlockWeights,
    Factors,
    StackPrefix,
    pack_weight,
)
from specdec.ops._operator import operator


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def with_grad(block: int, index: int) -> BlockStack:
    _, blocks, _ = random_stack(2, B=2, N=3, **SMALL)
    tensors = blocks[block].tensors
    tensors[index] = tensors[index].clone().requires_grad_()
    return BlockStack(blocks)


def one_other(name: str, at: int, other: Tensor) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A change of one pool."""

    def change(call: dict[str, Any]) -> dict[str, Any]:
        return {name: [other if i == at else pool for i, pool in enumerate(call[name])]}

    return change


def one_less(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {name: call[name][:-1]}


def pending_with(mixer: int, **parts: Tensor | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A change of one mixer's entries."""

    def change(call: dict[str, Any]) -> dict[str, Any]:
        entries = list(call["pending"].entries)
        factors, mixed = entries[mixer]
        named = {name: parts.get(name, getattr(factors, name)) for name in ("k", "u", "g")}
        entries[mixer] = BlockEntries(Factors(**named), parts.get("mixed", mixed))
        return {"pending": call["pending"]._replace(entries=entries)}

    return change


def set_to(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda _: changes


Change = Callable[[dict[str, Any]], dict[str, Any]]
C, POOL, WINDOW = 128, (4, 2, 32, 32), (4, 3, 128)
ERRORS: list[tuple[str, Change, str]] = [
    ("x shape", set_to(x=f32(2, 37)), r"x: got shape \[2, 37\], want \[B, N, D\]"),
    ("x width", set_to(x=f32(2, 3, 38)), r"x: got shape \[2, 3, 38\], want a last dimension of 37"),
    ("x dtype", set_to(x=f32(2, 3, 37).double()), r"x: got dtype Double, want float32, bfloat16 or float16"),
    ("too many nodes", set_to(x=f32(2, 65, 37)), r"mixed: got 65 new nodes and 0 prefix nodes, want at most"),
    ("slots", set_to(slots=int32([1, 1])), r"slots: slot 1 is named by two rows"),
    ("slot", set_to(slots=int32([1, 4])), r"slots: row 1 is 4, want less than the 4 slots of"),
    ("parents", set_to(parents=int32([[0, 0, 0]] * 2)), r"parents: row 0 node 0"),
    ("lengths", set_to(lengths=int32([1])), r"lengths: got shape \[1\], want \[B\] = \[2\]"),
    ("strategy", set_to(strategy="solve"), r"strategy: got 'solve', want 'serial' or 'hybrid' or 'exact'"),
    ("states", one_less("states"), r"states: got 2 tensors, want 3, one a mixer"),
    ("windows", one_less("conv_states"), r"conv_states: got 2 tensors, want 3, one a mixer"),
    ("grad", set_to(x=f32(2, 3, 37).requires_grad_()), r"x: got a tensor that requires grad"),
    ("grad of a weight", set_to(weights=with_grad(1, 8)), r"weights: got a tensor that requires grad"),
    (
        "grad of a state",
        one_other("states", 2, f32(*POOL).requires_grad_()),
        r"states: got a tensor that requires grad",
    ),
]
# What is wrong with a later layer alone, where an earlier one could have moved by then.
LATER: list[tuple[str, Change, str]] = [
    (
        "heads",
        one_other("states", 1, f32(4, 1, 32, 32)),
        r"states\[1\]: got Float \[4, 1, 32, 32\], want the",
    ),
    ("fewer slots", one_other("states", 2, f32(3, 2, 32, 32)), r"states\[2\]: got Float \[3, 2, 32, 32\]"),
    ("dtype", one_other("states", 1, f32(*POOL).bfloat16()), r"states\[1\]: got BFloat16 \[4, 2, 32, 32\]"),
    (
        "strides",
        one_other("states", 1, f32(2, 4, 32, 32).transpose(0, 1)),
        r"states\[1\]: got Float .*, want the dtype, shape and strides of states\[0\]",
    ),
    ("window", one_other("conv_states", 1, f32(4, 2, C)), r"conv_states\[1\]: got Float \[4, 2, 128\]"),
    (
        "window dtype",
        one_other("conv_states", 2, f32(*WINDOW).half()),
        r"conv_states\[2\]: got Half \[4, 3, 128\]",
    ),
    ("k", pending_with(2, k=f32(2, 4, 1, 32)), r"pending\[8\]: got Float \[2, 4, 1, 32\], want the dtype"),
    ("u", pending_with(2, u=f32(2, 3, 1, 32)), r"pending\[9\]: got Float \[2, 3, 1, 32\]"),
    ("g", pending_with(1, g=f32(2, 3, 2).double()), r"pending\[6\]: got Double \[2, 3, 2\]"),
    (
        "factor's stride",
        pending_with(2, u=f32(2, 3, 2, 64)[..., ::2]),
        r"pending\[9\]: got a non-contiguous tensor, want contiguous",
    ),
    ("mixed", pending_with(1, mixed=f32(2, 3, C + 1)), r"pending\[7\]: got Float \[2, 3, 129\]"),
    (
        "mixed's stride",
        pending_with(2, mixed=f32(2, 3, 2 * C)[..., ::2]),
        r"pending\[11\]: the last dimension has stride 2, want 1",
    ),
]
FIRST: list[tuple[str, Change, str]] = [
    ("no g", pending_with(2, g=None), r"entries\[2\].factors.g: got None, want a tensor"),
    ("nodes", pending_with(0, mixed=f32(2, 4, C)), r"pending\[7\]: got Float \[2, 3, 128\], want the dtype"),
    (
        "grad of an entry",
        pending_with(2, u=f32(2, 3, 2, 32).requires_grad_()),
        r"pending: got a tensor that requires grad",
    ),
    ("both", set_to(prefix=StackPrefix([])), r"prefix: got both pending and prefix, want one"),
    (
        "fewer entries",
        lambda call: {"pending": call["pending"]._replace(entries=call["pending"].entries[:2])},
        r"pending: got 8 tensors, want 12, k, u, g and the raw projections of each mixer",
    ),
    (
        "path",
        lambda call: {"pending": call["pending"]._replace(path=int32([[7], [0]]), path_lengths=None)},
        r"pending\.path: ",
    ),
    (
        "path lengths",
        lambda call: {"pending": call["pending"]._replace(path_lengths=int32([1]))},
        r"pending\.path_lengths: got shape \[1\], want",
    ),
]


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [pytest.param(plain_call, *case[1:], id=case[0]) for case in ERRORS]
    + [pytest.param(deferred_call, *case[1:], id=f"deferred {case[0]}") for case in ERRORS]
    + [pytest.param(deferred_call, *case[1:], id=f"later {case[0]}") for case in LATER]
    + [pytest.param(deferred_call, *case[1:], id=case[0]) for case in FIRST],
)
def test_errors_leave_every_pool(base: Callable[..., dict[str, Any]], change: Change, message: str) -> None:
    call = base()
    call.update(change(call))
    before = with_pools(call)
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.verify_stack(**call)
    assert_same_bits(pools(call), pools(before))


def test_prefix_of_other_mixers() -> None:
    call = prefix_call()
    call["prefix"] = call["prefix"]._replace(entries=call["prefix"].entries[:2])
    with pytest.raises(ValueError, match=r"^prefix: got 8 tensors, want 12, k, u, g and the raw projections"):
        ops.verify_stack(**call)


def test_types() -> None:
    for name, value, want in (("weights", [], "BlockStack"), ("pending", (1,), "StackPending")):
        with pytest.raises(TypeError, match=f"^{name}: got .*, want {want}"):
            ops.verify_stack(**plain_call(**{name: value}))
    with pytest.raises(TypeError, match=r"^prefix: got tuple, want StackPrefix"):
        ops.verify_stack(**plain_call(prefix=(1,)))
    with pytest.raises(TypeError, match=r"^x: got str, want a tensor"):
        ops.verify_stack(**plain_call(x="x"))


def carved(pool: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the pool, and one of the tensor that begins at the pool's last number."""
    memory = torch.zeros(pool.numel() + tensor.numel())
    first = memory[: pool.numel()].view(pool.shape).copy_(pool)
    inside = memory[pool.numel() - 1 :][: tensor.numel()].view(tensor.dtype).view(tensor.shape)
    inside.copy_(tensor)
    return first, inside


@pytest.mark.parametrize("pool", ["states", "conv_states"])
@pytest.mark.parametrize("name", ["x", "slots", "parents", "lengths", "path", "path_lengths", "pending[2]"])
def test_what_a_later_layer_writes_is_not_read(pool: str, name: str) -> None:
    """A later layer's pool lies over an input of all layers, or of an earlier one."""
    call = deferred_call(parents=int32([[-1, 0, 0]] * 2), lengths=int32([3, 2]))
    pending = call["pending"]
    operands = {**call, "path": pending.path, "path_lengths": pending.path_lengths}
    operands["pending[2]"] = pending.entries[0].factors.g
    call[pool][2], inside = carved(call[pool][2], operands[name])
    if name.startswith("path"):
        call["pending"] = pending._replace(**{name: inside})
        name = f"pending.{name}"
    elif name == "pending[2]":
        call.update(pending_with(0, g=inside)(call))
    else:
        call[name] = inside
    expect_shared(call, rf"{name.replace('[', '.').replace(']', '.')}", f"{pool}.2.")


def expect_shared(call: dict[str, Any], name: str, pool: str) -> None:
    before = with_pools(call)
    want = f"^{name}: got a tensor that shares memory with {pool}, which is written, want memory of its own"
    with pytest.raises(ValueError, match=want):
        ops.verify_stack(**call)
    assert_same_bits(pools(call), pools(before))


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize(("index", "name"), [(2, "conv"), (3, "A_log"), (4, "dt_bias"), (-1, "bias")])
def test_what_a_layer_writes_is_no_layers_weight(block: int, index: int, name: str) -> None:
    _, blocks, weights = random_stack(2, B=2, N=3, ragged=False, tree=False, bias=True, **SMALL)
    call = deferred_call()
    given = weights[block]
    key = {"conv": "conv_weight", "bias": "conv_bias"}.get(name, name)
    other = 2 - block  # so that of the two one writes before the other reads
    call["states"][other], given[key] = carved(call["states"][other], given[key])
    blocks[block] = BlockWeights(**given)
    call["weights"] = BlockStack(blocks)
    shown = f"conv_biases.{block}." if index < 0 else f"weights.{10 * block + index}."
    expect_shared(call, shown, f"states.{other}.")


def test_pools_of_two_layers_share_nothing() -> None:
    """The second is the first, or begins at its last number; a state is the other one's window."""
    for name in ("states", "conv_states"):
        call = deferred_call()
        call[name][2] = call[name][0]
        expect_shared(call, f"{name}.2.", f"{name}.0.")
        call = deferred_call()
        call[name][1], call[name][2] = carved(call[name][1], call[name][2])
        expect_shared(call, f"{name}.2.", f"{name}.1.")
    call = deferred_call()
    call["states"][0], call["conv_states"][1] = carved(call["states"][0], call["conv_states"][1])
    expect_shared(call, "conv_states.1.", "states.0.")
    call = deferred_call()
    call["states"][1], call["conv_states"][1] = carved(call["states"][1], call["conv_states"][1])
    expect_shared(call, "conv_states.1.", "states.1.")


def test_pools_between_each_others_slots() -> None:
    """All layers' records of a slot lie side by side in one buffer."""
    call, *_ = random_stack(6, earlier="pending", **SMALL)
    pool_names = [(name, i) for name in ("states", "conv_states") for i in range(3)]
    sizes = [call[name][i][0].numel() for name, i in pool_names]
    slots = len(call["states"][0])

    def interleaved() -> dict[str, Any]:
        memory = torch.full((slots, sum(sizes) + 7), torch.nan)
        placed, start = {"states": [], "conv_states": []}, 0
        for (name, i), size in zip(pool_names, sizes, strict=True):
            pool = call[name][i]
            placed[name].append(memory[:, start : start + size].unflatten(1, pool.shape[1:]))
            placed[name][-1].copy_(pool)
            start += size
        return {**call, **placed}

    used, apart = interleaved(), with_pools(call)
    assert used["states"][0].stride(0) == sum(sizes) + 7
    got, want = ops.verify_stack(**used), ops.verify_stack(**apart)
    assert_same_bits(by_name(got), by_name(want))
    assert_same_bits(pools(used), pools(apart))
    overlapping = interleaved()
    a, b = overlapping["states"][:2]
    overlapping["states"][1] = b.as_strided(b.shape, b.stride(), a.storage_offset() + sizes[0] - 1)
    before = {name: pool.clone() for name, pool in pools(overlapping).items()}
    with pytest.raises(ValueError, match=r"^states.1.: got a tensor that shares memory with states.0."):
        ops.verify_stack(**overlapping)
    assert_same_bits(pools(overlapping), before)


# --- BlockStack ---


def block(seed: int = 2, **options: Any) -> BlockWeights:
    weights: BlockWeights = random_block(seed, B=1, N=1, ragged=False, **{**SMALL, **options})[0]["weights"]
    return weights


def with_bias(given: bool) -> BlockWeights:
    return block(3 if given else 8)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "blocks: got none, want at least one"),
        ([block(), block(gated=False)], r"blocks\[1\]: got gated False, want True as in blocks\[0\]"),
        ([block(0), block(4)], r"blocks\[1\]: got neg_eigval True, want False as in blocks\[0\]"),
        ([block(), block(D=36)], r"blocks: mixer 1 has vectors of shapes \[\[36\], .*, want \[\[37\], "),
        ([block(), block(HV=1)], r"blocks: mixer 1 has vectors of shapes"),
        ([block(), block(W=2)], r"blocks: mixer 1 has vectors of shapes"),
        (
            [block().without_mlp(), block(D=36).without_mixer()],
            "blocks: got residual streams of several widths, want one",
        ),
        ([block(6), block(3)], r"blocks: got 1 with a conv_bias of 2, want all or none"),
    ],
    ids=["none", "gated", "eigenvalues", "width", "heads", "taps", "width of an MLP", "bias"],
)
def test_blocks_fit_each_other(blocks: list[BlockWeights], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BlockStack(blocks)


def test_blocks_are_blocks() -> None:
    with pytest.raises(TypeError, match=r"^blocks\[1\]: got PackedWeight, want BlockWeights"):
        BlockStack([block(), pack_weight(f32(2, 2))])  # type: ignore[list-item]


def test_parts_of_blocks() -> None:
    whole = block()
    stack = BlockStack([whole, whole.without_mlp(), whole.without_mixer()])
    assert (stack.mixers, stack.eps) == (2, whole.eps)
    tensors, parts, *_ = stack.operands
    assert parts == [10, 7, 3]
    assert all(a is b for a, b in zip(tensors, [*whole.tensors, *whole.tensors], strict=True))
    with pytest.raises(ValueError, match=r"^weights: got a block without an MLP, want one with it"):
        whole.without_mlp().without_mixer()


def test_the_lists_are_whole() -> None:
    """What the operator itself refuses, whoever calls it."""
    call = plain_call()
    tensors, parts, *options = call["weights"].operands
    rest = (call["conv_states"], call["states"], call["slots"], None, None, [], None, None, 0)
    op = operator("verify_stack")
    for tensors_, parts_, message in (
        (tensors[:-1], parts, "weights: got 29 tensors, want 30, those of all blocks"),
        (tensors, [10, 10, 9], "parts: got 9, want the number of a block's weights: 10, 7 without an MLP or"),
        (tensors, [10, 10, 10, -1], "parts: got -1, want"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            op(call["x"], tensors_, parts_, *options, *rest)
    with pytest.raises(ValueError, match=r"^conv_biases: got 1 tensors, want 3, one a mixer, or none"):
        op(call["x"], tensors, parts, [f32(C)], *options[1:], *rest)


@pytest.mark.parametrize("name", ["states", "conv_states"])
@pytest.mark.parametrize("make", [plain_call, deferred_call])
def test_a_pool_of_a_later_mixer_on_another_device_is_refused(make, name: str) -> None:
    call = make()
    call[name][1] = call[name][1].to("meta")
    with pytest.raises(ValueError, match=name):
        ops.verify_stack(**call)


def test_pending_on_another_device_is_refused() -> None:
    call = deferred_call()
    entries = list(call["pending"].entries)
    factors, mixed = entries[1]
    entries[1] = ops.BlockEntries(factors, mixed.to("meta"))
    call["pending"] = call["pending"]._replace(entries=entries)
    with pytest.raises(ValueError, match="pending"):
        ops.verify_stack(**call)


def test_a_pool_of_another_layout_is_refused_by_name() -> None:
    call = plain_call()
    call["states"][1] = call["states"][1].to_sparse()
    with pytest.raises(ValueError, match="states"):
        ops.verify_stack(**call)


def test_prefixes_of_several_lengths_are_refused() -> None:
    call = prefix_call()
    entries = list(call["prefix"].entries)
    (k, u, g), mixed = entries[1]
    k, u, g, mixed = (torch.cat([t, t], 1).contiguous() for t in (k, u, g, mixed))
    entries[1] = ops.BlockEntries(ops.Factors(k, u, g), mixed)
    call["prefix"] = call["prefix"]._replace(entries=entries)
    with pytest.raises(ValueError, match="prefix"):
        ops.verify_stack(**call)
