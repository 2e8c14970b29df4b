"""verify_block: the bits of the operators that it consists of, on a CPU; and against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.block_reference import expect_reference
from ops.blocks import composed, on_meta, outputs_by_name, random_block, random_matrix
from ops.cases import assert_same_bits, bits, int32
from ops.layers import with_pools
from specdec import ops
from specdec.ops import BlockWeights, Factors, PackedWeight, Pending, Prefix, pack_weight
from specdec.ops._operator import operator

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EARLIER = ["none", "pending", "prefix"]
STORED = [torch.float32, torch.bfloat16, torch.int8]
STRATEGIES = ["serial", "hybrid", "exact"]


def expect_composition(call: dict[str, Any], weights: dict[str, Any]) -> None:
    fused, parts = with_pools(call), with_pools(call)
    got, want = ops.verify_block(**fused), composed(**{**parts, "weights": weights})
    assert_same_bits(outputs_by_name(got), outputs_by_name(want))
    assert got.x.is_contiguous()
    assert got.o.is_contiguous()
    assert_same_bits(pools(fused), pools(parts))
    if call.get("pending") is None:
        assert_same_bits(pools(fused), pools(call))


def pools(call: dict[str, Any]) -> dict[str, Tensor]:
    return {name: call[name] for name in ("state", "conv_state")}


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_bits_of_the_composition(earlier: str, dtype: torch.dtype, tree: bool) -> None:
    first = 2 * EARLIER.index(earlier) + 6 * DTYPES.index(dtype) + tree
    for seed in range(first, first + 6):
        call, weights = random_block(
            seed,
            dtype=dtype,
            stored=STORED[seed % 3],
            gated=seed % 2 == 0,
            mlp=seed % 5 != 0,
            tree=tree,
            earlier=earlier,
            D=30 + seed,
            F=20 + seed,
            W=(1, 2, 4, 5)[seed % 4],
            window_dtype=torch.float32 if seed % 4 == 3 else None,
        )
        expect_composition({**call, "strategy": STRATEGIES[seed // 2 % 3]}, weights)


@pytest.mark.parametrize(
    "shape",
    [
        {"HK": 1, "HV": 3, "DK": 96, "DV": 32},  # grouped heads
        {"HK": 3, "HV": 3, "DK": 64, "DV": 160},
        {"HK": 1, "HV": 1, "DK": 256, "DV": 64, "N": 2},
        {"HK": 1, "HV": 1, "DK": 32, "DV": 512, "N": 2},
        {"B": 1, "N": 1, "ragged": False},  # decoding
        {"B": 1, "N": 5, "ragged": False, "D": 1, "F": 1},
        {"B": 2, "N": 40, "NP": 24, "HK": 1, "HV": 1, "DV": 32},
        {"W": 16, "DV": 32},
        {"B": 9, "N": 3, "D": 300, "F": 513},
    ],
    ids=str,
)
@pytest.mark.parametrize("earlier", ["pending", "prefix"])
def test_shapes(shape: dict[str, Any], earlier: str) -> None:
    expect_composition(*random_block(5, earlier=earlier, **shape))


@pytest.mark.parametrize("earlier", EARLIER)
def test_optional_rows(earlier: str) -> None:
    call, weights = random_block(4, earlier=earlier, ragged=False)
    B = len(call["slots"])
    expect_composition({**call, "lengths": None}, weights)
    expect_composition({**call, "lengths": int32([0] * B)}, weights)
    # Every slot in order; the prefix, if any, a chain below which these are.
    plain = {"slots": None, "parents": None, "state": call["state"][:B], "conv_state": call["conv_state"][:B]}
    expect_composition({**call, **plain, "scale": 0.3}, weights)
    if earlier == "pending":
        pending = call["pending"]._replace(path_lengths=int32([0] * B))
        expect_composition({**call, "pending": pending}, weights)
        expect_composition({**call, "pending": pending._replace(path=None, path_lengths=None)}, weights)


def test_states_in_bfloat16() -> None:
    call, weights = random_block(8, earlier="pending", HV=2, DV=32)
    expect_composition({**call, "state": call["state"].bfloat16()}, weights)


@pytest.mark.parametrize(("rows", "nodes"), [(0, 3), (2, 0)])
def test_empty(rows: int, nodes: int) -> None:
    call, weights = random_block(9, B=2, ragged=False, tree=False)
    changes = {"x": call["x"][:rows, :nodes], "slots": call["slots"][:rows]}
    expect_composition({**call, **changes}, weights)


def test_any_strides() -> None:
    """The residual stream transposed, and every second of its numbers."""
    call, weights = random_block(10, tree=False, ragged=False)
    x = call["x"]
    want = outputs_by_name(ops.verify_block(**call))
    wide = torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(2)
    for other in (x.transpose(0, 1).contiguous().transpose(0, 1), wide[..., ::2]):
        expect_composition({**call, "x": other}, weights)
        assert_same_bits(outputs_by_name(ops.verify_block(**{**call, "x": other})), want)


def test_without_mlp() -> None:
    """The mixer alone, and what it gives is what the MLP takes; nothing is copied."""
    for gated in (False, True):
        call, weights = random_block(12, gated=gated)
        block = call["weights"]
        mixer = block.without_mlp()
        assert [a is b for a, b in zip(mixer.tensors, block.tensors, strict=False)] == [True] * 7
        alone = {name: w for name, w in weights.items() if name not in ("mlp_norm", "gate_up", "down")}
        expect_composition({**call, "weights": mixer}, alone)
        x = ops.verify_block(**{**call, "weights": mixer}).x
        wide = ops.rms_norm_linear(x, weights["mlp_norm"], weights["eps"], weights["gate_up"])
        want = ops.swiglu_linear(wide, weights["down"], residual=x)
        assert torch.equal(bits(ops.verify_block(**call).x), bits(want))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, BlockWeights):
        return [*value.tensors, *_tensors(value.conv_bias)]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


@pytest.mark.parametrize("earlier", EARLIER)
def test_nothing_but_outputs_is_written(earlier: str) -> None:
    """Inputs stay as they were whatever they are; pools too, but for the slots of what is pending."""
    call, _ = random_block(13, earlier=earlier)
    given = [tensor for value in call.values() for tensor in _tensors(value)]
    before = [tensor.clone() for tensor in given]
    out = ops.verify_block(**call)
    named = set(call["slots"].tolist()) - {-1}
    for tensor, old in zip(given, before, strict=True):
        if earlier == "pending" and any(tensor is pool for pool in pools(call).values()):
            others = [slot for slot in range(len(tensor)) if slot not in named]
            assert torch.equal(bits(tensor[others]), bits(old[others]))
            assert not torch.equal(bits(tensor), bits(old))
        elif tensor.is_floating_point():
            assert torch.equal(bits(tensor.contiguous()), bits(old.contiguous()))
        else:
            assert torch.equal(tensor, old)
    ours = {tensor.untyped_storage().data_ptr() for tensor in outputs_by_name(out).values()}
    assert not ours & {tensor.untyped_storage().data_ptr() for tensor in given}


@pytest.mark.parametrize("earlier", EARLIER)
def test_what_is_beyond_a_row_is_not_read(earlier: str) -> None:
    """Whether NaN is there, which may not spread, or numbers; factors and `o` are zero there."""
    call, _ = random_block(14, earlier=earlier)
    clean = {**call, "x": call["x"].nan_to_num(7.0)}
    valid = ~call["x"][..., 0].isnan()  # [B, N]
    assert 0 < int(valid.sum()) < valid.numel()
    poisoned, numbers = with_pools(call), with_pools(clean)
    got, want = outputs_by_name(ops.verify_block(**poisoned)), outputs_by_name(ops.verify_block(**numbers))
    for name, tensor in got.items():
        assert tensor[valid].isfinite().all(), name
        assert torch.equal(bits(tensor[valid]), bits(want[name][valid])), name
        if name not in ("x", "mixed"):
            assert not tensor[~valid].any(), name
    assert_same_bits(pools(poisoned), pools(numbers))


# --- against float64 ---


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("earlier", EARLIER)
def test_reference(earlier: str, gated: bool) -> None:
    call, weights = random_block(3, earlier=earlier, gated=gated)
    used = with_pools(call)
    expect_reference(call, weights, ops.verify_block(**used), pools(used))


# --- as torch sees it ---


def plain_call(**changes: Any) -> dict[str, Any]:
    call, _ = random_block(2, B=2, N=3, HK=1, HV=2, ragged=False, tree=False)
    return {**call, **changes}


def deferred_call(**changes: Any) -> dict[str, Any]:
    call, _ = random_block(2, B=2, N=3, HK=1, HV=2, NP=3, ragged=False, tree=False, earlier="pending")
    return {**call, **changes}


def test_opcheck() -> None:
    check, OPS = torch.library.opcheck, torch.ops.specdec
    call = deferred_call()
    mixed = call["pending_mixed"].contiguous()
    tree = (int32([1, 0]), int32([[-1, 0, 0]] * 2), int32([2, 3]))
    where = (call["conv_state"], call["state"])
    head = (call["x"].contiguous(), *call["weights"].operands, *where, *tree)
    factors = call["pending"].factors
    check(OPS.verify_block.default, (*head, *[None] * 5, None, 0))
    chain = (*head[:-2], None, None)
    check(OPS.verify_block.default, (*chain, *factors, None, mixed, 0.5, 1))
    path = (int32([[0, 2], [1, 2]]), int32([2, 1]))
    check(OPS.verify_block_deferred.default, (*head, *factors, *path, mixed, None, 0))


def test_compile() -> None:
    def block(**call: Any) -> Tensor:
        x, o, mixed, factors = ops.verify_block(**call)
        return x.sum() + o.sum() + mixed.sum() + factors.u.sum()

    eager, compiled = with_pools(deferred_call()), with_pools(deferred_call())
    want = block(**eager)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(**compiled)
    assert torch.equal(got, want)
    assert_same_bits(pools(compiled), pools(eager))


@pytest.mark.parametrize("gated", [False, True])
def test_meta_shapes(gated: bool) -> None:
    call, weights = random_block(2, B=2, N=3, HK=1, HV=2, ragged=False, tree=False, gated=gated)
    want = outputs_by_name(ops.verify_block(**call))
    meta = on_meta({name: value for name, value in call.items() if name != "weights"})
    got = outputs_by_name(ops.verify_block(**meta, weights=BlockWeights(**on_meta(weights))))
    for name, tensor in want.items():
        assert (got[name].shape, got[name].stride()) == (tensor.shape, tensor.stride()), name
        assert got[name].dtype == tensor.dtype, name


# --- errors ---


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def with_grad(index: int) -> BlockWeights:
    weights = plain_call()["weights"]
    weights.tensors[index] = weights.tensors[index].clone().requires_grad_()
    return weights


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("x shape", {"x": f32(2, 37)}, r"x: got shape \[2, 37\], want \[B, N, D\]"),
    ("x width", {"x": f32(2, 3, 38)}, r"x: got shape \[2, 3, 38\], want a last dimension of 37"),
    ("x dtype", {"x": f32(2, 3, 37).double()}, r"x: got dtype Double, want float32, bfloat16 or float16"),
    ("state dim", {"state": f32(4, 64, 64)}, r"state: got shape .* want \[S, HV, DV, DK\] = \[any, 2, 64,"),
    ("state HV", {"state": f32(4, 1, 64, 64)}, r"state: got shape .* want \[S, HV, DV, DK\] = \[any, 2, 64,"),
    # As many channels, with one key head in place of two.
    ("state DV", {"state": f32(4, 2, 32, 64)}, r"state: got shape .* want \[S, HV, DV, DK\] = \[any, 2, 64,"),
    ("DK", {"state": f32(4, 2, 64, 128)}, r"mixed: got 256 channels, want 2 HK DK \+ HV DV"),
    ("state dtype", {"state": f32(4, 2, 64, 64).half()}, r"state: got dtype Half, want float32 or bfloat16"),
    ("window", {"conv_state": f32(4, 2, 256)}, r"conv_state: got shape .* want \[S, W-1, C\]"),
    ("window dtype", {"conv_state": f32(4, 3, 256).half()}, r"conv_state: got dtype Half, want the dtype"),
    ("slots", {"slots": int32([1, 1])}, r"slots: slot 1 is named by two rows"),
    ("slots dtype", {"slots": torch.tensor([0, 1])}, r"slots: got dtype Long, want Int"),
    ("parents", {"parents": int32([[0, 0, 0]] * 2)}, r"parents: row 0 node 0"),
    ("lengths", {"lengths": int32([1])}, r"lengths: got shape \[1\], want \[B\] = \[2\]"),
    ("nodes", {"x": f32(2, 65, 37)}, r"mixed: got 65 new nodes and 0 prefix nodes, want at most 64"),
    ("strategy", {"strategy": "solve"}, r"strategy: got 'solve', want 'serial' or 'hybrid' or 'exact'"),
    (
        "pending_mixed alone",
        {"pending_mixed": f32(2, 3, 256)},
        r"pending_mixed: got a tensor without pending",
    ),
    ("prefix_mixed alone", {"prefix_mixed": f32(2, 3, 256)}, r"prefix_mixed: got a tensor without prefix"),
    (
        "prefix without mixed",
        {"prefix": Prefix(Factors(f32(2, 3, 1, 64), f32(2, 3, 2, 64), f32(2, 3, 2)))},
        r"prefix_mixed: got None, want a tensor",
    ),
    ("grad", {"x": f32(2, 3, 37).requires_grad_()}, r"x: got a tensor that requires grad"),
    ("grad of a weight", {"weights": with_grad(8)}, r"weights: got a tensor that requires grad"),
]
SHARED_ERRORS = [case for case in ERRORS if not case[0].startswith(("pending", "prefix"))]
PENDING_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("no mixed", {"pending_mixed": None}, r"pending_mixed: got None, want a tensor"),
    ("mixed dtype", {"pending_mixed": f32(2, 3, 256).half()}, r"pending_mixed: got dtype Half, want Float"),
    ("nodes", {"pending_mixed": f32(2, 4, 256)}, r"pending_mixed: got 4 nodes, want the 3 of"),
    ("both", {"prefix": Prefix(Factors(f32(1), f32(1)))}, r"prefix: got both pending and prefix"),
    (
        "no gate",
        {"pending": Pending(Factors(f32(2, 3, 1, 64), f32(2, 3, 2, 64)))},
        r"pending.factors.g: got none, want per head",
    ),
]


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [pytest.param(plain_call, *case[1:], id=case[0]) for case in ERRORS]
    # With a pending round nothing may have moved by then.
    + [pytest.param(deferred_call, *case[1:], id=f"deferred {case[0]}") for case in SHARED_ERRORS]
    + [pytest.param(deferred_call, *case[1:], id=case[0]) for case in PENDING_ERRORS],
)
def test_errors(base: Callable[..., dict[str, Any]], changes: dict[str, Any], message: str) -> None:
    call = base(**changes)
    before = with_pools(call)
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.verify_block(**call)
    assert_same_bits(pools(call), pools(before))


def test_types() -> None:
    with pytest.raises(TypeError, match=r"^weights: got list, want BlockWeights"):
        ops.verify_block(**plain_call(weights=[]))
    with pytest.raises(TypeError, match=r"^pending: got tuple, want Pending"):
        ops.verify_block(**plain_call(pending=(1, 2), pending_mixed=f32(2, 3, 256)))
    with pytest.raises(TypeError, match=r"^x: got str, want a tensor"):
        ops.verify_block(**plain_call(x="x"))


def test_the_list_of_weights_is_whole() -> None:
    call = plain_call()
    tensors, *options = call["weights"].operands
    rest = (call["conv_state"], call["state"], call["slots"], *[None] * 8, 0)
    for count in (0, 3, 6, 8, 9):
        with pytest.raises(
            ValueError, match=rf"^weights: got {count} tensors, want 10,( or)? 7 without an MLP"
        ):
            operator("verify_block")(call["x"], tensors[:count], *options, *rest)


@pytest.mark.parametrize("pool", ["state", "conv_state"])
@pytest.mark.parametrize("name", ["x", "slots", "pending_mixed"])
def test_written_memory_is_not_read(pool: str, name: str) -> None:
    call = deferred_call()
    tensor = call[name]
    memory = torch.zeros(call[pool].numel() + tensor.numel())
    inside = memory[call[pool].numel() - 1 :][: tensor.numel()].view(tensor.dtype).view(tensor.shape)
    inside.copy_(tensor)
    call[pool] = memory[: call[pool].numel()].view(call[pool].shape)
    before = call[pool].clone()
    with pytest.raises(ValueError, match=rf"^{name}: got a tensor that shares memory with {pool}, which is"):
        ops.verify_block(**{**call, name: inside})
    assert torch.equal(bits(call[pool]), bits(before))


def parts(**changes: Any) -> dict[str, Any]:
    _, weights = random_block(2, B=2, N=3, HK=1, HV=2, ragged=False, tree=False)
    return {**weights, **changes}


def matrix(outputs: int, inputs: int) -> PackedWeight:
    return random_matrix(torch.Generator().manual_seed(1), outputs, inputs)


FLOAT = r"want contiguous torch\.float32"
WEIGHT_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"mixer_norm": f32(37).bfloat16()}, rf"mixer_norm: got torch\.bfloat16 \[37\] on cpu, {FLOAT} \[any\]"),
    ({"mixer_norm": f32(74)[::2]}, rf"mixer_norm: got torch\.float32 \[37\] on cpu, not contiguous, {FLOAT}"),
    ({"mixer_norm": f32(1)}, r"projections: got \[388, 37\], want \[out, in\] = \[388, 1\]"),
    ({"conv_weight": f32(256)}, rf"conv_weight: got torch\.float32 \[256\] on cpu, {FLOAT} \[any, any\]"),
    ({"conv_bias": f32(4)}, rf"conv_bias: got torch\.float32 \[4\] on cpu, {FLOAT} \[256\]"),
    ({"A_log": f32(2).double()}, rf"A_log: got torch\.float64 \[2\] on cpu, {FLOAT} \[any\]"),
    ({"A_log": None}, r"A_log: got None, want a tensor"),
    ({"dt_bias": f32(3)}, rf"dt_bias: got torch\.float32 \[3\] on cpu, {FLOAT} \[2\]"),
    ({"head_norm": f32(32)}, r"projections: got \[388, 37\], want \[out, in\] = \[324, 37\]"),
    ({"projections": matrix(387, 37)}, r"projections: got \[387, 37\], want \[out, in\] = \[388, 37\]"),
    ({"gated": False}, r"projections: got \[388, 37\], want \[out, in\] = \[260, 37\]"),
    ({"out": matrix(37, 64)}, r"out: got \[37, 64\], want \[out, in\] = \[37, 128\]"),
    ({"out": pack_weight(f32(37, 128), bias=f32(37))}, r"out: got a weight with a bias, want one without"),
    ({"mlp_norm": f32(1)}, rf"mlp_norm: got torch\.float32 \[1\] on cpu, {FLOAT} \[37\]"),
    ({"mlp_norm": None}, r"mlp_norm: got None, want a tensor"),
    ({"gate_up": matrix(57, 37)}, r"gate_up: got \[57, 37\], want \[out, in\] = \[58, 37\]"),
    ({"down": matrix(36, 29)}, r"down: got \[36, 29\], want \[out, in\] = \[37, 29\]"),
]


@pytest.mark.parametrize(("changes", "message"), WEIGHT_ERRORS, ids=[case[1][:20] for case in WEIGHT_ERRORS])
def test_weights_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BlockWeights(**parts(**changes))


@pytest.mark.parametrize("name", ["projections", "out", "gate_up", "down"])
def test_matrices_are_packed(name: str) -> None:
    for wrong, got in ((f32(37, 37), "Tensor"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"^{name}: got {got}, want PackedWeight"):
            BlockWeights(**parts(**{name: wrong}))


def test_another_epsilon() -> None:
    call, weights = random_block(15, earlier="pending")
    weights["eps"] = 0.3
    expect_composition({**call, "weights": BlockWeights(**weights)}, weights)
