"""likeliest: the order of a stable sort, probabilities of a softmax in float64. tests/cpp/likeliest_test.cpp
runs on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ops.cases import NAN, bits
from specdec import ops

INF = float("inf")
U = 2.0**-24  # unit roundoff of float32


def reference(logits: Tensor, count: int, scales: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [R, K], probabilities in float64 [R, K], and how much a float32 probability may be off by.

    An exponent s (x - top) has two roundings, so a weight errs by twice its size in units of U, and by
    another unit in the last place (2 U) of the exponential. The sum of V weights errs by their own errors,
    weighted as they are, and by V roundings at most, whatever the order; the quotient adds one. exp makes
    what is below float32's normal range, 2^-126, zero.
    """
    R, V = logits.shape
    tokens = torch.full((R, count), -1)
    probs, bounds = torch.zeros(R, count, dtype=torch.float64), torch.zeros(R, count, dtype=torch.float64)
    for r, row in enumerate(logits.double()):
        if row.isnan().any() or (row == INF).any() or not (row > -INF).any():
            continue
        order = torch.sort(row, descending=True, stable=True).indices  # of equal ones the smaller first
        order = order[row[order] > -INF][:count]
        scale = 1.0 if scales is None else float(scales[r])
        exponents = scale * (row - row.max())
        p = exponents.softmax(0)
        sizes = torch.where(p > 0, exponents.abs(), 0.0)
        relative = U * (2 * sizes[order] + 2 + 2 * (p * sizes).sum() + 2 + V + 1)
        tokens[r, : len(order)] = order
        probs[r, : len(order)] = p[order]
        bounds[r, : len(order)] = p[order] * relative * (1 + relative) + 2.0**-126
    return tokens, probs, bounds


def expect(logits: Tensor, count: int, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    before = logits.clone()
    tokens, probs = ops.likeliest(logits, count, scales)
    assert torch.equal(bits(logits), bits(before))
    assert (tokens.dtype, probs.dtype) == (torch.int64, torch.float32)
    want, want_probs, bounds = reference(logits, count, scales)
    assert torch.equal(tokens, want)
    error = (probs.double() - want_probs).abs()
    assert (error <= bounds).all(), f"off by {float((error - bounds).max()):.3g} more than the bound"
    return tokens, probs


def random_logits(seed: int, R: int, V: int) -> Tensor:
    """Steps of a quarter, so that there are ties, over a few hundred; some rows with many -inf."""
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(R, V, generator=rng) * (1 + seed % 9) * 4).round() / 4
    masked = torch.rand(R, V, generator=rng) < torch.rand(R, 1, generator=rng) * (seed % 2)
    return logits.masked_fill(masked, -INF)


@pytest.mark.parametrize("V", [1, 2, 7, 63, 64, 65, 100, 128, 129, 1000, 4097])
def test_reference(V: int) -> None:
    for seed, count in enumerate((1, 2, 3, 8, 33, 64)):
        rng = torch.Generator().manual_seed(seed)
        logits = random_logits(10 * V + seed, 5, V)
        expect(logits, count)
        expect(
            logits + 1e-3 * torch.randn(5, V, generator=rng), count, torch.rand(5, generator=rng) * 3 + 0.01
        )


def test_a_real_vocabulary() -> None:
    rng = torch.Generator().manual_seed(1)
    expect(torch.randn(3, 151_936, generator=rng) * 3, 4, torch.tensor([1.0, 0.7, 2.0]))


def test_equal_logits_come_by_token() -> None:
    V = 200
    tokens, probs = expect(torch.zeros(1, V), 64)
    assert tokens[0].tolist() == list(range(64))
    assert len(set(probs[0].tolist())) == 1
    expect(torch.full((2, V), -3e38), 3)
    row = torch.full((1, V), -1.0)
    row[0, [199, 64, 63, 130]] = torch.tensor([5.0, 5.0, 5.0, 6.0])
    assert expect(row, 5)[0][0].tolist() == [130, 63, 64, 199, 0]
    zeros = torch.zeros(1, V)
    zeros[0, ::2] = -0.0  # equal to 0
    assert expect(zeros, 3)[0][0].tolist() == [0, 1, 2]


def test_fewer_tokens_than_wanted() -> None:
    expect(torch.tensor([[0.5, 2.0, -INF]]), 64)
    expect(torch.full((2, 130), -INF), 2)
    row = torch.full((1, 300), -INF)
    for allowed in ([299], [0, 299], [128, 5, 64]):
        row[0, allowed] = -7.0
        expect(row, 5)
    expect(torch.zeros(2, 0), 2)
    assert [tuple(t.shape) for t in ops.likeliest(torch.zeros(0, 9), 2)] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("V", [5, 64, 203])
def test_rows_that_are_no_distributions(bad: float, V: int) -> None:
    """Wherever the number is, -1 and 0, and nothing of it in the rows beside."""
    places = sorted({0, 1, V // 2, V - 2, V - 1})
    logits = random_logits(2, 2 * len(places), V)
    plain = ops.likeliest(logits, 3)
    for i, place in enumerate(places):
        logits[2 * i, place] = bad
    tokens, probs = expect(logits, 3)
    assert (tokens[::2] == -1).all()
    assert not probs[::2].any()
    assert torch.equal(tokens[1::2], plain[0][1::2])
    assert torch.equal(probs[1::2], plain[1][1::2])
    expect(torch.full((1, V), bad), 2)
    mixed = torch.full((1, V), -INF)
    mixed[0, V // 2] = bad
    expect(mixed, 2)


def test_any_finite_logits() -> None:
    """The difference to the largest may overflow, and the rest may be too small to count."""
    expect(torch.tensor([[3e38, -3e38, 0.0, 3e38], [1e-40, 0.0, -1e-40, 2e-40], [90.0, -90.0, 0.0, 1e4]]), 4)
    expect(torch.randn(4, 90) * 1e3, 64, torch.tensor([1e-6, 1.0, 1e6, 1e30]))


def test_rows_are_alone_and_threads_do_not_count(set_threads: Callable[[int], None]) -> None:
    logits = random_logits(3, 40, 3001)
    scales = torch.rand(40, generator=torch.Generator().manual_seed(3)) + 0.5
    set_threads(1)
    alone = [ops.likeliest(logits[r : r + 1], 6, scales[r : r + 1]) for r in range(40)]
    for threads in (1, 2):
        set_threads(threads)
        tokens, probs = ops.likeliest(logits, 6, scales)
        assert torch.equal(tokens, torch.cat([pair[0] for pair in alone]))
        assert torch.equal(bits(probs), bits(torch.cat([pair[1] for pair in alone])))
    # More children are the same ones and more.
    for count in (1, 5, 64):
        more, chances = ops.likeliest(logits, count, scales)
        assert torch.equal(more[:, :6], tokens[:, :count])
        assert torch.equal(bits(chances[:, :6]), bits(probs[:, :count]))


def test_opcheck_and_compile() -> None:
    op, logits = torch.ops.specdec.likeliest.default, random_logits(4, 3, 70)
    torch.library.opcheck(op, (logits, 3, None))
    torch.library.opcheck(op, (logits, 3, torch.tensor([1.0, 2.0, 0.5])))
    compiled = torch.compile(lambda x: ops.likeliest(x * 2, 3)[1] + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits), ops.likeliest(logits * 2, 3)[1] + 1)
    tokens, probs = ops.likeliest(logits.to("meta"), 3)
    assert (tokens.shape, tokens.dtype, probs.dtype) == ((3, 3), torch.int64, torch.float32)


@pytest.mark.parametrize(
    ("logits", "count", "scales", "message"),
    [
        (torch.zeros(2, 9).half(), 2, None, r"logits: got dtype Half, want Float"),
        (torch.zeros(9), 2, None, r"logits: got shape \[9\], want \[R, V\]"),
        (torch.zeros(9, 2).T, 2, None, r"logits: got a non-contiguous tensor, want contiguous"),
        (torch.zeros(2, 9), 0, None, r"count: got 0, want 1 to 64"),
        (torch.zeros(2, 9), 65, None, r"count: got 65, want 1 to 64"),
        (torch.zeros(2, 9), 2, torch.ones(3), r"inverse_temperatures: got shape \[3\], want \[R\] = \[2\]"),
        (torch.zeros(2, 9), 2, torch.ones(2).double(), r"inverse_temperatures: got dtype Double, want Float"),
        (torch.zeros(2, 9), 2, torch.ones(4)[::2], r"inverse_temperatures: got a non-contiguous tensor"),
        (torch.zeros(2, 9).requires_grad_(), 2, None, r"logits: got a tensor that requires grad"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_errors(logits: Tensor, count: int, scales: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ops.likeliest(logits, count, scales)


def test_types() -> None:
    with pytest.raises(TypeError, match=r"^logits: got list, want a tensor"):
        ops.likeliest([[1.0]], 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^count: got str, want an integer"):
        ops.likeliest(torch.zeros(1, 2), "2")  # type: ignore[arg-type]
