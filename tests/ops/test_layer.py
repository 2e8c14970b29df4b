"""verify_layer, for every backend: the bits of conv_verify, gated_delta_gates, verify and rms_norm one after
the other; where kernels make gates and norm themselves, bits of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.backends import BACKENDS, COMPILED, Backend
from ops.cases import EPS, assert_close, bits, int32, tolerance
from ops.layers import random_layer, with_pools
from specdec import ops
from specdec.ops import ConvPending, ConvPrefix, Factors, Pending, Prefix, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EARLIER = ["none", "pending", "prefix"]
backends = pytest.mark.parametrize("backend", COMPILED)


def own_gates(backend: Backend) -> bool:
    """Do the kernels make gates and norm with an exponential function of their own?"""
    return backend.name != "cpu"


def composed(
    backend: Backend,
    own: Tensor | None,
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    neg_eigval: bool,
    conv_state: Tensor,
    state: Tensor,
    pending: Pending | None = None,
    pending_mixed: Tensor | None = None,
    prefix: Prefix | None = None,
    prefix_mixed: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_gate: Tensor | None = None,
    scale: float | None = None,
    strategy: str = "exact",
    **tree: Any,
) -> tuple[Tensor, Factors]:
    """The ops that verify_layer stands for. `own`: the g of the backend, whose betas are plain."""
    _, HV, DV, DK = state.shape
    keys = (mixed.shape[-1] - HV * DV) // 2
    y = backend.conv_verify(
        mixed,
        conv_weight,
        conv_bias,
        conv_state=conv_state,
        pending=None if pending is None else ConvPending(pending_mixed, *pending[1:]),
        prefix=None if prefix is None else ConvPrefix(prefix_mixed, prefix.parents),
        **tree,
    )
    q, k = (y[..., i * keys : (i + 1) * keys].unflatten(-1, (-1, DK)) for i in (0, 1))
    v = y[..., 2 * keys :].unflatten(-1, (HV, DV))
    g, beta = ops.gated_delta_gates(a, b, A_log, dt_bias, neg_eigval)
    if own is not None:
        # Both sides: exp and log1p within 4 units in the last place, three roundings, and one of a + dt_bias.
        size, rate = float(g.nan_to_num(0.0).abs().max()), float(A_log.exp().max())
        x = float((a.float() + dt_bias).nan_to_num(0.0).abs().max())
        assert_close(own, g.nan_to_num(0.0), EPS[torch.float32] * (16 * size + rate * x), "g")
        g, beta = own, (1 + neg_eigval) * (0.5 + 0.5 * b.float().sign())
    out, factors = backend.verify(
        q,
        k,
        v,
        g,
        beta,
        state=state,
        pending=pending,
        prefix=prefix,
        scale=scale,
        qk_l2norm=True,
        strategy=strategy,
        **tree,
    )
    if norm_weight is not None:
        lengths = tree.get("lengths")
        for row in range(mixed.shape[0]):  # padding stays zero
            nodes = slice(0, mixed.shape[1] if lengths is None else int(lengths[row]))
            gate = None if norm_gate is None else norm_gate[row, nodes]
            if tree["slots"][row] >= 0:
                out[row, nodes] = ops.rms_norm(out[row, nodes], norm_weight, norm_eps, gate)
    return out, factors


def expect_composition(backend: Backend, call: dict[str, Any]) -> None:
    fused, parts = with_pools(call), with_pools(call)
    out, factors = backend.verify_layer(**fused)
    assert out.is_contiguous()
    own = own_gates(backend)
    want, want_factors = composed(backend, factors.g if own else None, **parts)
    if own and call.get("norm_weight") is not None:
        # Both sides: DV / 32 + 5 roundings of a sum at most, a dozen more, then one to the dtype; subnormals.
        roundings = EPS[torch.float32] * (out.shape[-1] / 32 + 17) + EPS[out.dtype] * (
            out.dtype != torch.float32
        )
        error = (out.double() - want.double()).abs()
        assert (error <= roundings * want.double().abs() + 2.0**-24).all(), f"out: off by {error.max()}"
        want = out
    for got, expected, name in [
        (out, want, "out"),
        *zip(factors, want_factors, ("k", "u", "g"), strict=True),
        (fused["state"], parts["state"], "state"),
        (fused["conv_state"], parts["conv_state"], "conv_state"),
    ]:
        assert torch.equal(bits(got), bits(expected)), name


@backends
@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_bits_of_the_composition(backend: Backend, earlier: str, dtype: torch.dtype, tree: bool) -> None:
    first = EARLIER.index(earlier) + 3 * DTYPES.index(dtype) + tree
    for seed in backend.some(range(first, first + 4)):
        wide_window = {"window_dtype": torch.float32} if seed % 3 == 2 else {}
        how = {"norm": seed % 4 != 0, "plain_beta": own_gates(backend), **wide_window}
        call = random_layer(seed, dtype=dtype, tree=tree, earlier=earlier, **how)
        expect_composition(backend, {**call, "strategy": "hybrid" if seed % 2 else "serial"})


@backends
@pytest.mark.parametrize(
    "shape",
    [
        {"HK": 1, "HV": 3, "DK": 96, "DV": 32},  # grouped heads
        {"HK": 3, "HV": 3, "DK": 64, "DV": 160},
        {"HK": 1, "HV": 2, "DK": 128, "DV": 32},
        {"HK": 1, "HV": 1, "DK": 256, "DV": 64, "N": 2},
        {"HK": 1, "HV": 1, "DK": 32, "DV": 512, "N": 2},  # heads of several tiles
        {"B": 1, "N": 1, "ragged": False},  # decoding
        {"B": 2, "N": 40, "NP": 24, "HK": 1, "HV": 1, "DV": 32},
        {"W": 1, "DV": 32},
        {"W": 2, "DV": 32},
        {"W": 5, "DV": 32},
        {"W": 16, "DV": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("earlier", ["pending", "prefix"])
def test_shapes(backend: Backend, shape: dict[str, Any], earlier: str) -> None:
    call = random_layer(5, earlier=earlier, **shape, plain_beta=own_gates(backend))
    DK, W = call["state"].shape[-1], call["conv_weight"].shape[-1]
    refused = ""
    if own_gates(backend) and DK not in (64, 128, 256):
        refused = f"state: got DK = {DK}, want 64, 128 or 256 for a layer on a GPU"
    elif own_gates(backend) and W > 4:
        refused = f"conv_weight: got W = {W}, want 1 to 4 for a layer on a GPU"
    if not refused:
        return expect_composition(backend, call)
    pools = with_pools(call)
    with pytest.raises(ValueError, match=f"^{refused}$"):
        backend.verify_layer(**pools)
    for name in ("state", "conv_state"):
        assert torch.equal(bits(pools[name]), bits(call[name]))


@backends
def test_optional_parts(backend: Backend) -> None:
    call = random_layer(7, earlier="pending", HV=2, DV=32, plain_beta=own_gates(backend))
    expect_composition(backend, {**call, "norm_gate": None})
    expect_composition(backend, {**call, "norm_gate": None, "norm_weight": None})
    unmoved = {**call, "pending": call["pending"]._replace(path_lengths=int32([0] * 4))}
    expect_composition(backend, unmoved)
    expect_composition(backend, {**call, "pending": call["pending"]._replace(path=None, path_lengths=None)})


@backends
def test_states_in_bfloat16(backend: Backend) -> None:
    call = random_layer(8, earlier="pending", HV=2, DV=32, plain_beta=own_gates(backend))
    expect_composition(backend, {**call, "state": call["state"].bfloat16()})


@backends
def test_empty(backend: Backend) -> None:
    call = random_layer(9, B=2, earlier="pending", HV=2, DV=32, ragged=False, tree=False)
    rows = {name: call[name][:, :0] for name in ("mixed", "a", "b", "norm_gate")}
    nothing, commits = with_pools({**call, **rows}), with_pools(call)
    out, _ = backend.verify_layer(**nothing)
    assert out.shape == (2, 0, 2, 32)
    backend.verify_layer(**commits)
    for name in ("state", "conv_state"):  # what is pending is settled all the same
        assert torch.equal(bits(nothing[name]), bits(commits[name]))


@pytest.mark.parametrize("B", [1, 5])
def test_threads(B: int, set_threads: Callable[[int], None]) -> None:
    """Enough work for two threads; with one row the heads and the window are shared between them."""
    call = random_layer(11, B=B, N=24, HK=1, HV=3, DK=64, DV=160, ragged=B > 1, earlier="pending")
    want_pools = with_pools(call)
    want, want_factors = ops.verify_layer(**want_pools)
    set_threads(2)
    for _ in range(5):  # which thread takes which part differs from call to call
        pools = with_pools(call)
        out, factors = ops.verify_layer(**pools)
        for got, expected in zip((out, *factors), (want, *want_factors), strict=True):
            assert torch.equal(bits(got), bits(expected))
        for name in ("state", "conv_state"):
            assert torch.equal(bits(pools[name]), bits(want_pools[name])), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("earlier", EARLIER)
def test_reference(backend: Backend, earlier: str) -> None:
    """Against float64. The convolution, the gates and the norms round no more often than a step does, so the
    tolerance is that of twice the steps; the norm of a head divides by its root mean square.
    """
    for norm in (False, True):
        call = random_layer(3, norm=norm, earlier=earlier)
        fused, exact = with_pools(call), with_pools(call)
        out, factors = backend.verify_layer(**fused)
        plain, _ = reference.verify_layer(
            **{**with_pools(call), "norm_weight": None, "norm_gate": None}, dtype=torch.float64
        )
        want, want_factors = reference.verify_layer(**exact, dtype=torch.float64)
        state = call["state"]
        atol = tolerance(torch.float32, 2 * (7 + 5), 64, want_factors.u, state)
        for got, expected, name in zip(factors, want_factors, ("k", "u", "g"), strict=True):
            if expected is not None:
                assert_close(got, expected.nan_to_num(0.0) if name == "g" else expected, atol, name)
        if norm:
            valid = plain.abs().sum(-1) > 0
            root = plain.square().mean(-1).sqrt()[valid].min()
            largest = call["norm_weight"].abs().max() * call["norm_gate"].nan_to_num(0.0).abs().max()
            atol *= 2 * float(largest / root)
        assert_close(out, want, atol, "out")
        assert_close(fused["state"].nan_to_num(0.0), exact["state"].nan_to_num(0.0), atol, "state")
        assert torch.equal(fused["conv_state"], exact["conv_state"])


def plain_call(**changes: Any) -> dict[str, Any]:
    return {**random_layer(2, B=2, N=3, HK=1, HV=2, ragged=False, tree=False), **changes}


def deferred_call(**changes: Any) -> dict[str, Any]:
    call = random_layer(2, B=2, N=3, HK=1, HV=2, NP=3, ragged=False, tree=False, earlier="pending")
    return {**call, **changes}


def test_opcheck() -> None:
    tokens = ("mixed", "a", "b", "conv_weight", "conv_bias", "A_log", "dt_bias", "neg_eigval")
    check, OPS = torch.library.opcheck, torch.ops.specdec
    call = {name: t.contiguous() if isinstance(t, Tensor) else t for name, t in deferred_call().items()}
    pools = (call["conv_state"], call["state"])
    tree = (int32([1, 0]), int32([[-1, 0, 0]] * 2), int32([2, 3]))
    head = (*(call[name] for name in tokens), *pools, *tree)
    tail = (call["norm_weight"], 1e-6, call["norm_gate"], None, 0)
    factors = call["pending"].factors
    check(OPS.verify_layer.default, (*head, *[None] * 5, *tail))
    chain = (*head[:-2], None, None)
    check(OPS.verify_layer.default, (*chain, *factors, None, call["pending_mixed"], None, 0.0, None, 0.5, 1))
    path = (int32([[0, 2], [1, 2]]), int32([2, 1]))
    check(OPS.verify_layer_deferred.default, (*head, *factors, *path, call["pending_mixed"], *tail))


def test_compile() -> None:
    def layer(**call: Any) -> Tensor:
        out, factors = ops.verify_layer(**call)
        return out + factors.u

    eager, compiled = with_pools(deferred_call()), with_pools(deferred_call())
    want = layer(**eager)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(**compiled)
    assert torch.equal(got, want)
    assert torch.equal(compiled["conv_state"], eager["conv_state"])


def test_meta_shapes() -> None:
    call = {k: t.to("meta") if isinstance(t, Tensor) else t for k, t in plain_call().items()}
    out, factors = ops.verify_layer(**{**call, "mixed": call["mixed"].bfloat16()})
    assert (out.shape, out.dtype) == ((2, 3, 2, 64), torch.bfloat16)
    assert [t.shape for t in factors if t is not None] == [(2, 3, 1, 64), (2, 3, 2, 64), (2, 3, 2)]


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def channels(C: int) -> dict[str, Any]:
    return {"mixed": f32(2, 3, C), "conv_weight": f32(C, 4), "conv_state": f32(4, 3, C)}


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("channels", channels(257), r"mixed: got 257 channels, want 2 HK DK \+ HV DV for HV = 2, DV"),
    ("heads", channels(512), r"mixed: got 512 channels, want 2 HK DK .* HK a divisor of HV"),
    ("mixed shape", {"mixed": f32(2, 256)}, r"mixed: got shape \[2, 256\], want \[B, N, C\]"),
    ("mixed stride", {"mixed": f32(2, 3, 512)[..., ::2]}, r"mixed: the last dimension has stride 2"),
    ("a shape", {"a": f32(2, 3, 3)}, r"a: got shape \[2, 3, 3\], want \[B, N, HV\] = \[2, 3, 2\]"),
    ("b dtype", {"b": f32(2, 3, 2).half()}, r"b: got dtype Half, want Float"),
    ("a channels", {"a": f32(2, 3, 2, 64)}, r"a: got shape \[2, 3, 2, 64\], want \[B, N, HV\]"),
    ("a stride", {"a": f32(2, 3, 4)[..., ::2]}, r"a: the last dimension has stride 2"),
    ("taps", {"conv_weight": f32(256, 17)}, r"conv_weight: got W = 17, want 1 to 16"),
    ("weight shape", {"conv_weight": f32(128, 4)}, r"conv_weight: got shape .* want \[C, W\] = \[256, any\]"),
    ("bias", {"conv_bias": f32(3)}, r"conv_bias: got shape \[3\], want \[C\] = \[256\]"),
    ("A_log", {"A_log": f32(3)}, r"A_log: got shape \[3\], want \[HV\] = \[2\]"),
    ("dt_bias", {"dt_bias": f32(2).half()}, r"dt_bias: got dtype Half, want Float"),
    (
        "window",
        {"conv_state": f32(4, 2, 256)},
        r"conv_state: got shape .* want \[S, W-1, C\] = \[any, 3,",
    ),
    (
        "window dtype",
        {"conv_state": f32(4, 3, 256).half()},
        r"conv_state: got dtype Half, want the dtype of mixed or float32",
    ),
    (
        "window slots",
        {"conv_state": f32(1, 3, 256)},
        r"slots: row . is ., want less than the 1 slots",
    ),
    ("state shape", {"state": f32(2, 64, 64)}, r"state: got shape .* want \[S, HV, DV, DK\]"),
    ("DK", {"state": f32(4, 2, 64, 48)}, r"state: got DK = 48, want 32, 64, 96, 128, 192 or 256"),
    ("DV", {"state": f32(4, 2, 48, 64)}, r"state: got DV = 48, want a multiple of 32 up to 512"),
    ("slots", {"slots": int32([1, 1])}, r"slots: slot 1 is named by two rows"),
    ("parents", {"parents": int32([[0, 0, 0]] * 2)}, r"parents: row 0 node 0"),
    ("norm_weight", {"norm_weight": f32(32)}, r"norm_weight: got shape \[32\], want \[DV\] = \[64\]"),
    ("norm_gate", {"norm_gate": f32(2, 3, 128)}, r"norm_gate: got shape .* want \[B, N, HV, DV\]"),
    ("gate dtype", {"norm_gate": f32(2, 3, 2, 64).half()}, r"norm_gate: got dtype Half, want Float"),
    ("gate alone", {"norm_weight": None}, r"norm_gate: got a tensor without norm_weight, want both or none"),
    ("strategy", {"strategy": "solve"}, r"strategy: got 'solve', want 'serial' or 'hybrid' or 'exact'"),
    (
        "pending_mixed alone",
        {"pending_mixed": f32(2, 3, 256)},
        r"pending_mixed: got a tensor without",
    ),
    ("prefix_mixed alone", {"prefix_mixed": f32(2, 3, 256)}, r"prefix_mixed: got a tensor without prefix"),
    (
        "nodes",
        {"mixed": f32(2, 65, 256), "a": f32(2, 65, 2), "b": f32(2, 65, 2), "norm_gate": f32(2, 65, 2, 64)},
        r"mixed: got 65 new nodes and 0 prefix nodes, want at most 64",
    ),
    ("grad", {"mixed": f32(2, 3, 256).requires_grad_()}, r"mixed: got a tensor that requires grad"),
]
PENDING_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("no mixed", {"pending_mixed": None}, r"pending_mixed: got None, want a tensor"),
    ("mixed dtype", {"pending_mixed": f32(2, 3, 256).half()}, r"pending_mixed: got dtype Half, want Float"),
    (
        "nodes",
        {"pending_mixed": f32(2, 4, 256)},
        r"pending_mixed: got 4 nodes, want the 3 of",
    ),
    ("both", {"prefix": Prefix(Factors(f32(1), f32(1)))}, r"prefix: got both pending and prefix"),
    (
        "no gate",
        {"pending": Pending(Factors(f32(2, 3, 1, 64), f32(2, 3, 2, 64)))},
        r"pending.factors.g: got none, want per head",
    ),
    (
        "gate of channels",
        {"pending": Pending(Factors(f32(2, 3, 1, 64), f32(2, 3, 2, 64), f32(2, 3, 2, 64)))},
        r"pending.factors.g: got per channel, want per head",
    ),
]
VALUES = ("window slots", "slots", "parents")  # what only a look into the tensors shows


@backends
@pytest.mark.parametrize(
    ("base", "name", "changes", "message"),
    [pytest.param(plain_call, *case, id=case[0]) for case in ERRORS]
    + [pytest.param(deferred_call, *case, id=case[0]) for case in PENDING_ERRORS],
)
def test_errors(
    backend: Backend, base: Callable[..., dict[str, Any]], name: str, changes: dict[str, Any], message: str
) -> None:
    if name in VALUES and not backend.checks_values:
        pytest.skip("what is in the tensors is not looked at")
    call = base(**changes)
    before = with_pools(call)
    with pytest.raises(ValueError, match=f"^{message}"):
        backend.verify_layer(**call)
    for name in ("state", "conv_state"):
        assert torch.equal(bits(call[name]), bits(before[name]))


def test_types() -> None:
    with pytest.raises(TypeError, match=r"^pending: got tuple, want Pending"):
        ops.verify_layer(**plain_call(pending=(1, 2), pending_mixed=f32(2, 3, 256)))
    with pytest.raises(TypeError, match=r"^mixed: got str, want a tensor"):
        ops.verify_layer(**plain_call(mixed="x"))


READ = [
    "mixed",
    "a",
    "b",
    "conv_weight",
    "A_log",
    "dt_bias",
    "slots",
    "pending_mixed",
    "norm_weight",
    "norm_gate",
]


@backends
@pytest.mark.parametrize("pool", ["state", "conv_state"])
@pytest.mark.parametrize("name", READ)
def test_written_memory_is_not_read(backend: Backend, pool: str, name: str) -> None:
    call = deferred_call()
    tensor = call[name]
    memory = torch.zeros(call[pool].numel() + tensor.numel())
    inside = memory[call[pool].numel() - 1 :][: tensor.numel()].view(tensor.dtype).view(tensor.shape)
    inside.copy_(tensor)
    call[pool] = memory[: call[pool].numel()].view(call[pool].shape)
    with pytest.raises(ValueError, match=rf"^{name}: got a tensor that shares memory with {pool}, which is"):
        backend.verify_layer(**{**call, name: inside})


@backends
def test_pools_are_apart(backend: Backend) -> None:
    call = deferred_call()
    memory = torch.zeros(call["state"].numel())
    window = memory[: call["conv_state"].numel()].view(call["conv_state"].shape)
    with pytest.raises(ValueError, match=r"^conv_state: got a tensor that shares memory with state"):
        backend.verify_layer(**{**call, "state": memory.view(call["state"].shape), "conv_state": window})


@backends
def test_pools_in_one_buffer(backend: Backend) -> None:
    """A block a slot, state and window in it: nothing is shared where a window fits between two states."""
    call = random_layer(2, B=2, N=3, HK=1, HV=2, NP=3, ragged=False, tree=False, earlier="pending")
    apart = with_pools(call)
    state, window = apart["state"], apart["conv_state"]
    block = state[0].numel() + window[0].numel()
    for last in (block, block - 1):  # a float too few for both
        buffer = torch.zeros(state.shape[0] * block)
        one = dict(apart)
        one["state"] = buffer.as_strided(state.shape, (last, *state.stride()[1:]))
        one["conv_state"] = buffer.as_strided(window.shape, (last, *window.stride()[1:]), state[0].numel())
        one["state"].copy_(state)
        one["conv_state"].copy_(window)
        if last < block:
            with pytest.raises(ValueError, match=r"^conv_state: got a tensor that shares memory with state"):
                backend.verify_layer(**one)
            continue
        out, _ = backend.verify_layer(**one)
        want, _ = backend.verify_layer(**with_pools(call))
        assert torch.equal(out, want)
