"""Copies of rows are those of torch's indexing, whatever dtype, size and strides."""

from __future__ import annotations

import pytest
import torch

from specdec._rows import array_of, last_rows, take_rows, tensor_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 11), (3, 40), (0, 2)])
def test_take_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    table = torch.randn(50, 2, 128).mul(100).to(dtype)
    rows = torch.randint(0, 50, shape)
    found = take_rows(table, rows)
    assert found.dtype == dtype
    assert torch.equal(found, table[rows])


@pytest.mark.parametrize("count", [1, 100])
def test_a_row_that_is_not_there(count: int) -> None:
    with pytest.raises(IndexError):
        take_rows(torch.zeros(5, 256), torch.full((count,), 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_last_rows(dtype: torch.dtype) -> None:
    x = torch.randn(7, 9, 30).mul(100).to(dtype)[:, 1:, ::2]
    lengths = torch.randint(1, 9, (7,), dtype=torch.int32)
    assert torch.equal(last_rows(x, lengths), x[torch.arange(7), lengths.long() - 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_share_memory(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 5, dtype=dtype)
    new = torch.randn(5).mul(100).to(dtype)
    array_of(x)[2] = array_of(new)
    assert torch.equal(x[2], new)
    assert torch.equal(tensor_of(array_of(x)[[2, 0]], dtype), x[[2, 0]])
