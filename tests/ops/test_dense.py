"""Dense ops: against float64 within derived bounds, and bit for bit whatever the rows around a row.

u = 2^-24 is the unit roundoff of float32. A sum of n float32 products in any order is off by at most
n u / (1 - n u) times the sum of magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1);
storing in a dtype adds its own unit roundoff, relative.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec.ops.dense import (
    PackedWeight,
    gated_delta_gates,
    gated_delta_gates_reference,
    linear,
    linear_reference,
    pack_weight,
    rms_norm,
    rms_norm_linear,
    rms_norm_linear_reference,
    rms_norm_reference,
    swiglu,
    swiglu_linear,
    swiglu_linear_reference,
    swiglu_reference,
)

U = 2.0**-24
# exp is good to about one last place, 2u; an addition, a division and a product around it each add u.
SILU = 8 * U
# Below these magnitudes exp and its quotients leave the normal range of float32 and flush towards zero.
TINY = 1e-34
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED = [torch.float32, torch.bfloat16, torch.int8]
ROUND = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # 24, 8 and 11 bits
SUBNORMAL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # absolute


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> int:
    count: int = request.param
    set_threads(count)
    return count


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inside_nan(x: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """x as a slice of a wider buffer of NaN: an over-read shows."""
    wide = torch.full((*x.shape[:-1], before + x.shape[-1] + after), float("nan"), dtype=x.dtype)
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def assert_within(got: Tensor, want: Tensor, bound: Tensor | float) -> None:
    """|got - want| <= bound + the rounding to got's dtype."""
    assert not got.isnan().any()
    error = (got.double() - want).abs()
    limit = bound + ROUND[got.dtype] * (want.abs() + bound) + SUBNORMAL[got.dtype]
    excess = (error - limit).max().item() if got.numel() else 0.0
    assert excess <= 0, f"error beyond its bound by {excess:.3e}; largest error {error.max().item():.3e}"


# --- linear ---

LINEAR_SIZES = [(256, 776), (512, 256), (576, 97), (1100, 33), (33, 31), (1, 1), (7, 129)]


@pytest.mark.parametrize(("inputs", "outputs"), LINEAR_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_against_float64(
    inputs: int, outputs: int, dtype: torch.dtype, stored: torch.dtype, with_bias: bool
) -> None:
    bias = randn(outputs, seed=3) if with_bias else None
    weight = pack_weight(randn(outputs, inputs, seed=1), stored, bias=bias)
    x = inside_nan(randn(2, 7, inputs, seed=2, dtype=dtype))
    magnitudes = x.double().abs() @ weight.unpack().double().abs().T
    if bias is not None:
        magnitudes = magnitudes + bias.double().abs()
    n = inputs + with_bias + 2 * (stored == torch.int8)  # the scale, in the operator and in `unpack`
    assert_within(linear(x, weight), linear_reference(x, weight), n * U / (1 - n * U) * magnitudes)


def test_int8_is_the_nearest_of_255_steps_of_each_output() -> None:
    weight = randn(70, 40, seed=1) * torch.logspace(-6, 3, 70)[:, None]
    weight[3], weight[5, 1:] = 0.0, 0.0
    packed = pack_weight([weight[:30], weight[30:]], torch.int8)
    assert (packed.dtype, packed.data.dtype, packed.data.shape) == (torch.int8, torch.int8, (3, 44, 32))
    assert packed.data[:, :40].min() >= -127
    got, step = packed.unpack(), weight.abs().amax(1, keepdim=True) / 127
    assert (got.dtype, got.shape) == (torch.float32, (70, 40))
    # Half a step, and the roundings of the step, of the quotient and of the product: of up to 127 steps each.
    assert ((got - weight).abs() <= step * (0.5 + 3 * 127 * U)).all()
    assert torch.equal(got[3], torch.zeros(40))
    torch.testing.assert_close(got.abs().amax(1), weight.abs().amax(1), rtol=4 * U, atol=0)
    assert torch.equal(pack_weight(got, torch.int8).unpack(), got)


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 776), (600, 40), (33, 31)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_linear_rows_do_not_see_each_other(
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    threads: int,
    set_threads: Callable[[int], None],
) -> None:
    weight = pack_weight(randn(outputs, inputs, seed=1), stored, bias=randn(outputs, seed=3))
    x = randn(33, inputs, seed=2, dtype=dtype)
    set_threads(1)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(33)])
    set_threads(threads)
    for rows in range(1, 34):
        assert torch.equal(linear(x[:rows], weight), alone[:rows]), f"{rows} rows"
    order = torch.randperm(33, generator=torch.Generator().manual_seed(5))
    assert torch.equal(linear(x[order], weight), alone[order])


def test_linear_many_rows_do_not_see_each_other(threads: int) -> None:
    weight = pack_weight(randn(200, 1030, seed=1), torch.bfloat16)  # several blocks, chunks
    x = randn(701, 1030, seed=2)
    y = linear(x, weight)
    for i in (0, 1, 11, 12, 83, 84, 350, 351, 699, 700):
        assert torch.equal(linear(x[i], weight), y[i]), f"row {i}"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_linear_keeps_a_bad_row_to_itself(bad: float) -> None:
    weight = pack_weight(randn(70, 40, seed=1))
    x = randn(9, 40, seed=2)
    want = linear(x, weight)
    x[4, 7] = bad
    got = linear(x, weight)
    keep = torch.arange(9) != 4
    assert torch.equal(got[keep], want[keep])
    assert not got[4].isfinite().any()


def test_linear_takes_any_strides() -> None:
    weight = pack_weight(randn(50, 24, seed=1))
    x = randn(3, 4, 24, seed=2)
    want = linear(x, weight)
    assert torch.equal(linear(x.transpose(0, 1).contiguous().transpose(0, 1), weight), want)
    assert torch.equal(linear(x.permute(2, 0, 1).contiguous().permute(1, 2, 0), weight), want)  # copied
    deep = randn(2, 3, 5, 24, seed=4)
    swapped = deep.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    want = linear(deep, weight)
    assert torch.equal(linear(swapped, weight), want)  # copied
    row = deep[0, 0, 0]
    assert torch.equal(linear(row.expand(6, 24), weight), linear(row, weight).expand(6, 50))


# --- linear with a row-wise op on its input, and a residual ---


@pytest.mark.parametrize(("heads", "D", "outputs"), [(1, 256, 97), (4, 64, 256), (6, 100, 33), (3, 7, 129)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_against_float64(heads: int, D: int, outputs: int, dtype: torch.dtype) -> None:
    n = heads * D
    weight = pack_weight(randn(outputs, n, seed=1), bias=randn(outputs, seed=2))
    x, gate = randn(2, 5, n, seed=3, dtype=dtype), inside_nan(randn(2, 5, n, seed=4, dtype=dtype))
    gate_up = inside_nan(randn(2, 5, 2 * n, seed=5, dtype=dtype))
    norm, residual = randn(D, seed=6), inside_nan(randn(2, 5, outputs, seed=7, dtype=dtype))
    absolute = pack_weight(weight.unpack().abs(), torch.float32, bias=weight.bias.abs())
    relative = (n + 2) * U / (1 - (n + 2) * U) + (D / 2 + 6) * U + SILU  # the sum, then the op on its input

    got = rms_norm_linear(x, norm, 1e-6, weight, gate=gate, residual=residual)
    want = rms_norm_linear_reference(x, norm, 1e-6, weight, gate=gate, residual=residual)
    x_heads, gate_heads = x.unflatten(-1, (heads, D)), gate.unflatten(-1, (heads, D))
    normed = rms_norm_reference(x_heads, norm, 1e-6, gate_heads).abs().flatten(-2)
    assert_within(got, want, relative * linear_reference(normed, absolute, residual=residual.abs()))

    got = swiglu_linear(gate_up, weight, residual=residual)
    want = swiglu_linear_reference(gate_up, weight, residual=residual)
    magnitudes = linear_reference(swiglu_reference(gate_up).abs(), absolute, residual=residual.abs())
    assert_within(got, want, relative * magnitudes)


def test_fused_gives_the_bits_of_the_parts() -> None:
    weight = pack_weight(randn(70, 600, seed=1), bias=randn(70, seed=2))  # two chunks of inputs
    x, gate, gate_up = randn(5, 600, seed=3), randn(5, 600, seed=4), randn(5, 1200, seed=5)
    norm, head_norm, residual = randn(600, seed=6), randn(100, seed=7), randn(5, 70, seed=8)
    assert torch.equal(linear(x, weight, residual=residual), residual + linear(x, weight))
    want = linear(rms_norm(x, norm, 1e-6), weight)
    assert torch.equal(rms_norm_linear(x, norm, 1e-6, weight), want)
    heads, head_gate = x.view(5, 6, 100), gate.view(5, 6, 100)
    want = linear(rms_norm(heads, head_norm, 1e-6, head_gate).flatten(1), weight, residual=residual)
    got = rms_norm_linear(x, head_norm, 1e-6, weight, gate=gate, residual=residual)
    assert torch.equal(got, want)
    want = linear(swiglu(gate_up), weight, residual=residual)
    assert torch.equal(swiglu_linear(gate_up, weight, residual=residual), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_rows_do_not_see_each_other(dtype: torch.dtype, threads: int) -> None:
    weight = pack_weight(randn(200, 600, seed=1))
    x, gate = randn(33, 600, seed=2, dtype=dtype), randn(33, 600, seed=3, dtype=dtype)
    gate_up, norm, residual = randn(33, 1200, seed=4, dtype=dtype), randn(100, seed=5), randn(33, 200, seed=6)
    residual = residual.to(dtype)

    def run(rows: slice) -> list[Tensor]:
        r = residual[rows]
        normed = rms_norm_linear(x[rows], norm, 1e-6, weight, gate=gate[rows], residual=r)
        return [normed, swiglu_linear(gate_up[rows], weight, residual=r)]

    alone = [torch.cat(ys) for ys in zip(*(run(slice(i, i + 1)) for i in range(33)), strict=True)]
    for rows in (2, 9, 13, 32, 33):
        for y, want in zip(run(slice(0, rows)), alone, strict=True):
            assert torch.equal(y, want[:rows])


# --- pack_weight ---


def test_pack_weight_chooses_the_smaller_lossless_dtype() -> None:
    rounded = randn(40, 20, seed=1).bfloat16()
    for given in (rounded, rounded.float()):
        assert pack_weight(given).dtype == torch.bfloat16
        assert torch.equal(pack_weight(given).unpack().float(), rounded.float())
    full = randn(40, 20, seed=1)
    assert pack_weight(full).dtype == torch.float32
    assert torch.equal(pack_weight(full).unpack(), full)
    assert torch.equal(pack_weight(full, torch.bfloat16).unpack(), rounded)
    assert torch.equal(pack_weight(rounded, torch.float32).unpack(), rounded.float())


def test_stored_dtypes_give_the_same_bits_where_both_are_exact() -> None:
    weight = randn(97, 60, seed=1).bfloat16()
    x = randn(5, 60, seed=2)
    assert torch.equal(linear(x, pack_weight(weight)), linear(x, pack_weight(weight, torch.float32)))


def test_stacked_weights_give_the_outputs_of_each() -> None:
    weights = [randn(n, 48, seed=n) for n in (33, 1, 64)]
    x = randn(3, 48, seed=9)
    fused = linear(x, pack_weight(weights))
    assert torch.equal(fused, torch.cat([linear(x, pack_weight(w)) for w in weights], dim=-1))


@pytest.mark.parametrize(
    ("weight", "dtype", "bias", "name"),
    [
        (torch.zeros(3), None, None, "weight"),
        (torch.zeros(3, 0), None, None, "weight"),
        ([torch.zeros(3, 4), torch.zeros(3, 5)], None, None, "weight"),
        ([], None, None, "weight"),
        (torch.zeros(3, 4, dtype=torch.float64), None, None, "weight"),
        (torch.zeros(3, 4), torch.float16, None, "dtype"),
        (torch.zeros(3, 4), None, torch.zeros(4), "bias"),
        (torch.zeros(3, 4), None, torch.zeros(3, device="meta"), "bias"),
    ],
)
def test_pack_weight_errors(
    weight: Tensor | list[Tensor], dtype: torch.dtype | None, bias: Tensor | None, name: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got .*, want "):
        pack_weight(weight, dtype, bias=bias)


# --- row-wise ops ---


@pytest.mark.parametrize("D", [1, 5, 16, 64, 100, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_rms_norm_against_float64(D: int, dtype: torch.dtype, gated: bool) -> None:
    x = inside_nan(randn(2, 3, 4, D, seed=1, dtype=dtype))
    gate = None
    if gated:
        gate = inside_nan(randn(2, 3, 4 * D, seed=2, dtype=dtype, scale=4)).unflatten(2, (4, D))
    weight = randn(D, seed=3)
    want = rms_norm_reference(x, weight, 1e-6, gate)
    # D additions under a square root, then a division, a root, an addition and three products.
    relative = (D / 2 + 6) * U + (SILU if gated else 0)
    assert_within(rms_norm(x, weight, 1e-6, gate), want, relative * want.abs() + TINY)


@pytest.mark.parametrize("F", [1, 15, 64, 512, 515])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_against_float64(F: int, dtype: torch.dtype) -> None:
    x = inside_nan(randn(3, 5, 2 * F, seed=1, dtype=dtype, scale=6))
    want = swiglu_reference(x)
    assert_within(swiglu(x), want, (SILU + U) * want.abs() + TINY)


@pytest.mark.parametrize("HV", [1, 4, 17, 48])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neg_eigval", [False, True])
def test_gates_against_float64(HV: int, dtype: torch.dtype, neg_eigval: bool) -> None:
    wide = inside_nan(randn(3, 5, 2 * HV, seed=1, dtype=dtype, scale=8))
    a, b = wide[..., :HV], wide[..., HV:]
    A_log, dt_bias = randn(HV, seed=2), randn(HV, seed=3)
    g, beta = gated_delta_gates(a, b, A_log, dt_bias, neg_eigval)
    want_g, want_beta = gated_delta_gates_reference(a, b, A_log, dt_bias, neg_eigval)
    # Rounding a + dt_bias moves the argument by u |x|, and softplus by no more than that in relative terms.
    x = (a.double() + dt_bias.double()).abs()
    assert_within(g, want_g, (x + 16) * U * want_g.abs() + TINY)
    assert_within(beta, want_beta, SILU * want_beta.abs() + TINY)


def test_gates_at_the_ends() -> None:
    a = torch.tensor([[-1e4, -200.0, -80.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 80.0, 200.0, 1e4]])
    zeros = torch.zeros(11)
    g, beta = gated_delta_gates(a, a, zeros, zeros)
    want_g, want_beta = gated_delta_gates_reference(a, a, zeros, zeros)
    assert_within(g, want_g, (a.abs().double() + 16) * U * want_g.abs() + TINY)
    assert_within(beta, want_beta, SILU * want_beta.abs() + TINY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_wise_ops_rows_do_not_see_each_other(dtype: torch.dtype, threads: int) -> None:
    D = 2 * 37
    x = randn(33, 400, D, seed=1, dtype=dtype)  # enough for threads
    gate = randn(33, 400, D, seed=2, dtype=dtype)
    weight, A_log = randn(D, seed=3), randn(D, seed=4)

    def run(rows: slice) -> list[Tensor]:
        g, beta = gated_delta_gates(x[rows], gate[rows], A_log, weight)
        return [rms_norm(x[rows], weight, 1e-5, gate[rows]), swiglu(x[rows]), g, beta]

    alone = [torch.cat(ys) for ys in zip(*(run(slice(i, i + 1)) for i in range(33)), strict=True)]
    for rows in (2, 9, 32, 33):
        for y, want in zip(run(slice(0, rows)), alone, strict=True):
            assert torch.equal(y, want[:rows])


def test_elements_do_not_depend_on_their_column() -> None:
    gate, up = randn(40, seed=1), randn(40, seed=2)
    want = swiglu(torch.cat([gate, up]))
    for i in range(40):
        assert torch.equal(swiglu(torch.stack([gate[i], up[i]])), want[i : i + 1]), f"column {i}"


# --- contracts ---


def test_no_rows() -> None:
    weight = pack_weight(randn(6, 4, seed=1))
    assert linear(torch.empty(0, 4), weight).shape == (0, 6)
    assert linear(torch.empty(2, 0, 4), weight).shape == (2, 0, 6)
    assert rms_norm(torch.empty(0, 3, 4), torch.ones(4), 1e-6, torch.empty(0, 3, 4)).shape == (0, 3, 4)
    assert swiglu(torch.empty(0, 4)).shape == (0, 2)
    g, beta = gated_delta_gates(torch.empty(0, 4), torch.empty(0, 4), torch.zeros(4), torch.zeros(4))
    assert g.shape == beta.shape == (0, 4)


WEIGHT = pack_weight(torch.ones(6, 4))
ONES, ROWS = torch.ones(4), torch.ones(2, 4)
META = torch.ones(6, device="meta")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: linear(torch.ones(2, 5), WEIGHT), "x"),
        (lambda: linear(ROWS.double(), WEIGHT), "x"),
        (lambda: linear(torch.tensor(1.0), WEIGHT), "x"),
        (lambda: linear(ROWS, PackedWeight(WEIGHT.data.half(), None, 4, 6)), "weight"),
        (lambda: linear(ROWS, PackedWeight(WEIGHT.data, None, 4, 60)), "weight"),
        (lambda: linear(ROWS, PackedWeight(WEIGHT.data[0, :, 0], None, 4, 6)), "weight"),
        (lambda: linear(ROWS, PackedWeight(WEIGHT.data.to(torch.int8), None, 4, 6)), "weight"),
        (lambda: linear(ROWS, PackedWeight(WEIGHT.data.int(), None, 4, 6)), "weight"),
        (lambda: linear(ROWS, PackedWeight(WEIGHT.data, torch.ones(5), 4, 6)), "bias"),
        (lambda: linear(ROWS, WEIGHT, residual=torch.ones(2, 5)), "residual"),
        (lambda: linear(ROWS, WEIGHT, residual=torch.ones(2, 6).half()), "residual"),
        (lambda: rms_norm_linear(ROWS, torch.ones(3), 1e-6, WEIGHT), "norm_weight"),
        (lambda: rms_norm_linear(ROWS, ONES.half(), 1e-6, WEIGHT), "norm_weight"),
        (lambda: rms_norm_linear(ROWS, ONES, 1e-6, WEIGHT, gate=ROWS[:1]), "gate"),
        (lambda: rms_norm_linear(ROWS, ONES, 1e-6, WEIGHT, gate=ROWS.half()), "gate"),
        (lambda: swiglu_linear(ROWS, WEIGHT), "x"),
        (lambda: rms_norm(ROWS, torch.ones(3), 1e-6), "weight"),
        (lambda: rms_norm(ROWS, ONES.bfloat16(), 1e-6), "weight"),
        (lambda: rms_norm(ROWS, ONES, 1e-6, ROWS[:1]), "gate"),
        (lambda: rms_norm(ROWS, ONES, 1e-6, ROWS.half()), "gate"),
        (lambda: swiglu(torch.ones(2, 3)), "x"),
        (lambda: swiglu(ROWS.int()), "x"),
        (lambda: gated_delta_gates(ROWS.double(), ROWS, ONES, ONES), "a"),
        (lambda: gated_delta_gates(ROWS, ROWS[:1], ONES, ONES), "b"),
        (lambda: gated_delta_gates(ROWS, ROWS, torch.ones(3), ONES), "A_log"),
        (lambda: gated_delta_gates(ROWS, ROWS, ONES, ONES.half()), "dt_bias"),
        # Of operands on two devices the operator's fake kernel would make an output of stray memory.
        (lambda: linear(ROWS, PackedWeight(WEIGHT.data, META, 4, 6)), "bias"),
        (lambda: linear(ROWS, WEIGHT, residual=META), "residual"),
        (lambda: rms_norm_linear(ROWS, ONES, 1e-6, WEIGHT, gate=META), "gate"),
        (lambda: swiglu_linear(torch.ones(2, 8), WEIGHT, residual=META), "residual"),
        (lambda: rms_norm(ROWS, META, 1e-6), "weight"),
        (lambda: rms_norm(ROWS, ONES, 1e-6, META), "gate"),
        (lambda: gated_delta_gates(ROWS, META, ONES, ONES), "b"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got .*want "):
        call()


def test_operators_are_well_formed() -> None:
    ops = torch.ops.specdec
    x = randn(2, 3, 8, seed=1)
    for stored in STORED:
        weight = pack_weight(randn(5, 8, seed=2), stored, bias=randn(5, seed=3))
        torch.library.opcheck(ops.linear.default, (x, weight.data, weight.bias, 5, x[..., :5]))
        arguments = (x, torch.ones(4), 1e-6, weight.data, None, 5, x, None)
        torch.library.opcheck(ops.rms_norm_linear.default, arguments)
        torch.library.opcheck(ops.swiglu_linear.default, (torch.cat([x, x], -1), weight.data, None, 5))
    gate = randn(3, 2, 8, seed=4).transpose(0, 1)
    torch.library.opcheck(ops.rms_norm.default, (x, torch.ones(8), 1e-6, gate))
    torch.library.opcheck(ops.swiglu.default, (x,))
    torch.library.opcheck(ops.gated_delta_gates.default, (x, x, torch.zeros(8), torch.zeros(8), True))


def test_compiles_without_graph_breaks() -> None:
    weight = pack_weight(randn(16, 8, seed=1))

    def layer(x: Tensor) -> Tensor:
        return swiglu(linear(rms_norm(x, torch.ones(8), 1e-6), weight))

    x = randn(3, 8, seed=2)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.skipif("SPECDEC_CPU_ISA" in os.environ, reason="this run is for one instruction set already")
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_narrower_instruction_sets(isa: str) -> None:
    names = "float64 and not 512 or see_each_other or ends or column or parts"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", names]
    run = subprocess.run(command, env={**os.environ, "SPECDEC_CPU_ISA": isa}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
