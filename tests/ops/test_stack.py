"""verify_stack: the bits of one block after the other, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.block_reference import expect_reference
from ops.blocks import on_meta
from ops.cases import assert_same_bits, bits, int32
from ops.stacks import (
    MIXER,
    MLP,
    SMALL,
    WHOLE,
    block_by_block,
    by_name,
    cut,
    deferred_call,
    mixer_call,
    plain_call,
    pools,
    prefix_call,
    random_stack,
    with_pools,
)
from specdec import ops
from specdec.ops import (
    BlockEntries,
    BlockOutputs,
    BlockStack,
    BlockWeights,
    Factors,
    StackOutputs,
    StackPending,
    StackPrefix,
)
from specdec.ops.stack import entry_operands

F32, BF16, F16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
EARLIER = ["none", "pending", "prefix"]
# What there is of each block, and in which dtype its matrices are.
STACKS: list[tuple[tuple[str, ...], tuple[torch.dtype, ...]]] = [
    ((WHOLE, WHOLE, WHOLE), (F32,)),
    ((MLP, WHOLE, MIXER), (BF16,)),
    ((WHOLE, MLP, MLP, WHOLE), (INT8, F32, BF16)),
    ((MIXER, MIXER), (F32, INT8)),
    ((MLP,), (F32,)),
    ((WHOLE,), (BF16,)),
]


def expect_block_by_block(
    call: dict[str, Any], blocks: list[BlockWeights], weights: list[dict[str, Any]]
) -> StackOutputs:
    used, parts = with_pools(call), with_pools(call)
    got = ops.verify_stack(**used)
    assert_same_bits(by_name(got), by_name(block_by_block(parts, blocks, weights)))
    assert_same_bits(pools(used), pools(parts))
    if call.get("pending") is None:
        assert_same_bits(pools(used), pools(call))
    return got


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_bits_of_one_block_after_the_other(earlier: str, dtype: torch.dtype, tree: bool) -> None:
    """Rows of every length, one of them padding; NaN where nobody may read, slots in any order."""
    for seed, (parts, stored) in enumerate(STACKS):
        call, blocks, weights = random_stack(
            seed,
            parts,
            stored=stored,
            earlier=earlier,
            bias=(None, True, False)[seed % 3],
            dtype=dtype,
            tree=tree,
            gated=seed % 2 == 0,
            D=29 + seed,
            F=20 + seed,
            W=(4, 1, 2)[seed % 3],
            window_dtype=F32 if seed == 3 else None,
            **SMALL,
        )
        assert call["slots"][0] == -1
        strategy = ("serial", "hybrid", "exact")[seed % 3]
        expect_block_by_block({**call, "strategy": strategy}, blocks, weights)


@pytest.mark.parametrize("earlier", EARLIER)
def test_optional_rows(earlier: str) -> None:
    call, *rest = random_stack(4, (WHOLE, MIXER), earlier=earlier, ragged=False, **SMALL)
    B = len(call["slots"])
    expect_block_by_block({**call, "lengths": None}, *rest)
    expect_block_by_block({**call, "lengths": int32([0] * B)}, *rest)
    plain = {name: [pool[:B] for pool in call[name]] for name in ("states", "conv_states")}
    expect_block_by_block({**call, **plain, "slots": None, "parents": None, "scale": 0.3}, *rest)
    if earlier == "pending":
        for changes in (
            {"path_lengths": int32([0] * B)},
            {"path": None, "path_lengths": None},
            {"path": None, "path_lengths": int32([2, 0, 5, 1])},
        ):
            expect_block_by_block({**call, "pending": call["pending"]._replace(**changes)}, *rest)


@pytest.mark.parametrize(
    "shape",
    [
        {"B": 1, "N": 1, "ragged": False},  # decoding
        {"B": 9, "N": 2, "D": 130, "F": 257},
        {"B": 2, "N": 40, "NP": 24, "HK": 1, "HV": 1, "DV": 32},
        {"HK": 1, "HV": 3, "DK": 96, "DV": 32},  # grouped heads
    ],
    ids=str,
)
@pytest.mark.parametrize("earlier", ["pending", "prefix"])
def test_shapes(shape: dict[str, Any], earlier: str) -> None:
    expect_block_by_block(*random_stack(5, (WHOLE, MLP, WHOLE), earlier=earlier, **{**SMALL, **shape}))


@pytest.mark.parametrize(("rows", "nodes"), [(0, 3), (2, 0)])
def test_empty(rows: int, nodes: int) -> None:
    call, *rest = random_stack(9, B=2, ragged=False, tree=False, **SMALL)
    expect_block_by_block({**call, "x": call["x"][:rows, :nodes], "slots": call["slots"][:rows]}, *rest)


def test_an_empty_batch_with_pending() -> None:
    call, *rest = random_stack(9, B=2, ragged=False, tree=False, earlier="pending", **SMALL)
    entries, path, path_lengths = call["pending"]
    none = [BlockEntries(Factors(*(t[:0] for t in f)), mixed[:0]) for f, mixed in entries]
    pending = StackPending(none, path[:0], path_lengths[:0])
    expect_block_by_block({**call, "x": call["x"][:0], "slots": call["slots"][:0], "pending": pending}, *rest)


def test_rounds_go_on() -> None:
    """A round, its path pending in the next one, whose first nodes are the prefix of its last ones."""
    call, blocks, weights = random_stack(7, ragged=False, N=6, **SMALL)
    call = with_pools(call)
    first = expect_block_by_block(call, blocks, weights)
    path = int32([[0, 2, 4]] * 4)
    call["pending"] = StackPending(first.entries, path, int32([1, 3, 0, 2]))
    more = {**call, "x": call["x"] * 0.5, "parents": None}
    expect_block_by_block(more, blocks, weights)
    second = ops.verify_stack(**more)
    del more["pending"]
    head = {**more, "x": more["x"][:, 2:], "prefix": StackPrefix(cut(second.entries, slice(0, 2)))}
    tail = ops.verify_stack(**head)
    assert torch.equal(bits(tail.hidden[-1]), bits(second.hidden[-1][:, 2:].contiguous()))


@pytest.mark.parametrize("earlier", EARLIER)
def test_reference(earlier: str) -> None:
    """Every block of the stack against float64, of what the block before it made."""
    parts = (WHOLE, MLP, MIXER, WHOLE)
    call, blocks, weights = random_stack(3, parts, earlier=earlier, HV=2)
    used = with_pools(call)
    made = ops.verify_stack(**used)
    x, mixer = call["x"], 0
    for block, w, after in zip(blocks, weights, made.hidden, strict=True):
        if block.has_mixer:
            factors, mixed = made.entries[mixer]
            rows = {**mixer_call(call, mixer), "x": x, "weights": block}
            moved = {"state": used["states"][mixer], "conv_state": used["conv_states"][mixer]}
            expect_reference(rows, w, BlockOutputs(after, made.read[mixer], mixed, factors), moved)
            mixer += 1
        x = after
    assert mixer == 3


@pytest.mark.parametrize("earlier", EARLIER)
def test_what_is_beyond_a_row_is_not_read(earlier: str) -> None:
    call, *_ = random_stack(14, earlier=earlier, **SMALL)
    valid = ~call["x"][..., 0].isnan()  # [B, N]
    assert 0 < int(valid.sum()) < valid.numel()
    poisoned, numbers = with_pools(call), with_pools({**call, "x": call["x"].nan_to_num(7.0)})
    got, want = by_name(ops.verify_stack(**poisoned)), by_name(ops.verify_stack(**numbers))
    for name, tensor in got.items():
        assert tensor[valid].isfinite().all(), name
        assert torch.equal(bits(tensor[valid]), bits(want[name][valid])), name
    assert_same_bits(pools(poisoned), pools(numbers))


def test_slots_that_are_not_named_stay() -> None:
    call, *_ = random_stack(13, earlier="pending", **SMALL)
    before = with_pools(call)
    ops.verify_stack(**call)
    named = sorted(set(call["slots"].tolist()) - {-1})
    others = sorted(set(range(len(call["states"][0]))) - set(named))
    assert named
    assert others
    for name in ("states", "conv_states"):
        for now, then in zip(call[name], before[name], strict=True):
            assert torch.equal(bits(now[others]), bits(then[others]))
            assert not torch.equal(bits(now[named]), bits(then[named]))


# --- as torch sees it ---


@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(bias: bool) -> None:
    check, OPS = torch.library.opcheck, torch.ops.specdec
    call, *_ = random_stack(
        2,
        (WHOLE, MLP, MIXER),
        B=2,
        N=3,
        NP=3,
        ragged=False,
        tree=False,
        bias=bias,
        earlier="pending",
        **SMALL,
    )
    entries = entry_operands(
        [BlockEntries(factors, mixed.contiguous()) for factors, mixed in call["pending"].entries]
    )
    where = (call["conv_states"], call["states"])
    head = (call["x"].contiguous(), *call["weights"].operands, *where, int32([1, 0]))
    check(OPS.verify_stack.default, (*head, int32([[-1, 0, 0]] * 2), int32([2, 3]), [], None, None, 0))
    check(OPS.verify_stack.default, (*head, None, None, entries, None, 0.5, 1))
    path = (int32([[0, 2], [1, 2]]), int32([2, 1]))
    check(
        OPS.verify_stack_deferred.default,
        (*head, None, None, entries, *path, None, 0),
        # torch functionalizes no operator that writes and gives back lists.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compile() -> None:
    def stack(**call: Any) -> Tensor:
        made = ops.verify_stack(**call)
        return sum((t.sum() for t in by_name(made).values()), torch.zeros(()))

    for base in (plain_call, deferred_call, prefix_call):
        eager, compiled = with_pools(base()), with_pools(base())
        want = stack(**eager)
        assert torch.equal(torch.compile(stack, fullgraph=True, backend="aot_eager")(**compiled), want)
        assert_same_bits(pools(compiled), pools(eager))


@pytest.mark.parametrize("gated", [False, True])
def test_meta_shapes(gated: bool) -> None:
    call, _, weights = random_stack(
        2, (MLP, WHOLE, MIXER), B=2, N=3, ragged=False, tree=False, gated=gated, dtype=BF16, **SMALL
    )
    want = by_name(ops.verify_stack(**call))
    del call["weights"]
    meta = on_meta({name: t for name, t in call.items() if not isinstance(t, list)})
    meta.update({name: [pool.to("meta") for pool in call[name]] for name in ("states", "conv_states")})
    parts = [BlockWeights(**on_meta(given)) for given in weights]
    stack = BlockStack([parts[0].without_mixer(), *parts[1:]])
    got = by_name(ops.verify_stack(**meta, weights=stack))
    for name, tensor in want.items():
        assert (got[name].shape, got[name].stride()) == (tensor.shape, tensor.stride()), name
        assert got[name].dtype == tensor.dtype, name


def test_layers_without_states_take_no_entries() -> None:
    """MLPs alone: nothing to commit and nothing to read, whether or not a round is pending."""
    call, *rest = random_stack(1, (MLP, MLP), B=2, N=3, ragged=False, tree=False)
    want = expect_block_by_block(call, *rest)
    for changes in ({"pending": StackPending([])}, {"prefix": StackPrefix([])}):
        got = ops.verify_stack(**{**call, **changes})
        assert_same_bits(by_name(got), by_name(want))
