"""Attention over dense rows of compressed pages by the op of windows: its ranges of tokens, and on a CUDA device its
kernel, against the reference."""

import math

import pytest
import torch
from torch import Tensor

from shadowkv.ops.attend_coded import cuda_dense, reference
from shadowkv.ops.attend_selected.sources import DenseRows
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_window_attention import reference as windows

BEGIN = [0, 8, 64, 0, 72, 128, 0, 8]
END = [0, 8, 64, 8, 136, 640, 640, 584]
"""Rows without tokens, of less than a page, of pages in part, and of all pages."""
needs_cuda = pytest.mark.skipif(bool(cuda_dense.missing()), reason="no CUDA device, or the op was not built")


def problem(
    heads: int, group: int, dim: int, device: str, dtype: torch.dtype, rows_of_each: int = 1
) -> tuple[Tensor, DenseRows, DenseRows, Tensor, Tensor]:
    """Rows of 10 pages, of which ``rows_of_each`` share theirs; tokens that no row attends to are NaN."""
    batch, pages = len(END), 10
    begin, end = torch.tensor(BEGIN, device=device), torch.tensor(END, device=device)
    table = torch.randperm(2 * batch * pages, device=device)[: batch * pages].view(batch, pages)
    place = torch.arange(PAGE * pages, device=device)
    there = ((place >= begin[:, None]) & (place < end[:, None])).view(batch, pages, 1, PAGE, 1)
    stored = []
    for _ in "kv":
        rows = torch.full((2 * batch * pages, heads, PAGE, dim), math.nan, device=device, dtype=dtype)
        new = torch.randn(batch, pages, heads, PAGE, dim, device=device).to(dtype)
        rows[table] = new.masked_fill(~there, math.nan)
        stored.append(rows.unflatten(2, (PAGE // 8, 8)))
    table, begin, end = (x.repeat_interleave(rows_of_each, 0) for x in (table, begin, end))
    q = torch.randn(len(end), heads * group, dim, device=device).to(dtype)
    return q, DenseRows(stored[0], table), DenseRows(stored[1], table), begin, end


def expected(args: tuple[Tensor, DenseRows, DenseRows, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The reference's results in float32. NaNs of keys would be NaNs of masked scores, so rows have zeros instead."""
    q, keys, values, begin, end = args
    plain = (DenseRows(rows.rows.float().nan_to_num(), rows.pages) for rows in (keys, values))
    return reference.attend_coded(q.float(), *plain, begin, end)


def test_ranges_hold_the_tokens_of_rows() -> None:
    args = problem(2, 3, 16, "cpu", torch.float32)
    q, keys, values, begin, end = args
    ranges = cuda_dense.ranges_of_pages(begin, end, keys.pages.shape[1])
    assert (ranges[1] - ranges[0]).sum(1).tolist() == (end - begin).clamp(min=0).tolist()
    k, v = (rows.rows.flatten(2, 3).nan_to_num() for rows in (keys, values))
    out, lse = windows.paged_window_attention(q, k, v, keys.pages, *ranges)
    torch.testing.assert_close((out, lse), expected(args), rtol=1e-5, atol=1e-5)


def test_a_range_that_ends_before_it_begins_is_empty() -> None:
    starts, counts = cuda_dense.ranges_of_pages(torch.tensor([64]), torch.tensor([8]), 3)
    assert (starts == counts).all()


@needs_cuda
@pytest.mark.parametrize("rows_of_each", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 64), (3, 3, 128), (8, 4, 128), (2, 8, 64), (1, 8, 256)])
def test_cuda_equals_reference(heads: int, group: int, dim: int, rows_of_each: int) -> None:
    args = problem(heads, group, dim, "cuda", torch.bfloat16, rows_of_each)
    out, lse = cuda_dense.attend_coded(*args)
    exact, exact_lse = expected(args)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=5e-3)
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=5e-4)


def test_refuses_other_rows() -> None:
    q, keys, values, begin, end = problem(1, 1, 64, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="values have the keys' table"):
        cuda_dense.attend_coded(q, keys, DenseRows(values.rows, values.pages.clone()), begin, end)
