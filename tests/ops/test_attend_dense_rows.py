"""Attention over dense rows of compressed pages by the op of windows, against softmax attention in float64: its ranges
of tokens, and on a CUDA device its kernel."""

import math

import pytest
import torch
from plain_formulas import attend
from ragged_rows import with_rows
from torch import Tensor

from shadowkv.ops.attend_coded import cuda_dense
from shadowkv.ops.attend_selected.sources import DenseRows
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_window_attention import reference as windows

BEGIN = [0, 8, 64, 0, 72, 128, 0, 8]
END = [0, 8, 64, 8, 136, 640, 640, 584]
"""Rows without tokens, of less than a page, of pages in part, and of all pages."""
FLOAT32 = torch.finfo(torch.float32).eps
"""The most that an operation in float32 changes its result, relatively. Tensor cores cut digits off, so it is a whole
step."""

OTHERS = 8
"""Operations per score and per weight besides the sums: scales, differences, exponentials, and merged parts."""

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
needs_cuda = pytest.mark.skipif(bool(cuda_dense.missing()), reason="no CUDA device, or the op was not built")

Problem = tuple[Tensor, DenseRows, DenseRows, Tensor, Tensor]


def problem(heads: int, group: int, dim: int, device: str, dtype: torch.dtype) -> Problem:
    """Rows of 10 pages; tokens that no row attends to are NaN."""
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
    q = torch.randn(len(end), heads * group, dim, device=device).to(dtype)
    return q, DenseRows(stored[0], table), DenseRows(stored[1], table), begin, end


def check(found: tuple[Tensor, Tensor], args: Problem) -> None:
    """Compares results with those in float64. They may differ by what rounding changes in any order of sums: of scores,
    weights and sums in float32, and of weights and results to the dtype of ``q``."""
    q, keys, values, begin, end = (x.cpu() if isinstance(x, Tensor) else x for x in args)
    rounding = torch.finfo(q.dtype).eps / 2
    assert (found[0].dtype, found[1].dtype) == (q.dtype, torch.float32)
    for row, (query, out, lse) in enumerate(zip(q, *(x.cpu() for x in found), strict=True)):
        pages = (x.rows[x.pages[row]].transpose(0, 1).flatten(1, 3).cpu() for x in (keys, values))
        k, v = (x[:, begin[row] : end[row]].double() for x in pages)  # [H, n, d]
        if not k.shape[1]:
            assert (out == 0).all() and (lse == -math.inf).all()
            continue
        exact, exact_lse = attend(query, k, v)
        query, k, v = query.double(), *(x.repeat_interleave(len(query) // len(x), 0) for x in (k, v))
        scores, sizes = (
            torch.einsum("hd,hnd->hn", *x) / k.shape[2] ** 0.5 for x in ((query, k), (query.abs(), k.abs()))
        )
        of_scores = FLOAT32 * (k.shape[2] + OTHERS) * sizes.amax(1)
        of_sums = FLOAT32 * (k.shape[1] + OTHERS)
        assert ((lse - exact_lse).abs() <= of_scores + of_sums + FLOAT32 * exact_lse.abs()).all()
        size = torch.einsum("hn,hnd->hd", scores.softmax(1), v.abs())
        of_weights = 2 * (of_scores + of_sums) + rounding
        assert ((out - exact).abs() <= of_weights[:, None] * size + rounding * exact.abs()).all()


def test_ranges_hold_the_tokens_of_rows(seed: int) -> None:
    args = problem(2, 3, 16, "cpu", torch.float32)
    q, keys, values, begin, end = args
    ranges = cuda_dense.ranges_of_pages(begin, end, keys.pages.shape[1])
    assert (ranges[1] - ranges[0]).sum(1).tolist() == (end - begin).clamp(min=0).tolist()
    k, v = (rows.rows.flatten(2, 3) for rows in (keys, values))
    check(windows.paged_window_attention(q, k, v, keys.pages, *ranges), args)


def test_a_range_that_ends_before_it_begins_is_empty() -> None:
    starts, counts = cuda_dense.ranges_of_pages(torch.tensor([64]), torch.tensor([8]), 3)
    assert (starts == counts).all()


@needs_cuda
@pytest.mark.parametrize("counts", [None, [1], [2], [4], [8], [3, 0, 1, 7, 8, 5]], ids=str)
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 1, 64), (3, 3, 128), (8, 4, 128), (2, 8, 64), (1, 8, 256)])
def test_the_kernel_is_off_by_rounding_alone(
    seed: int, heads: int, group: int, dim: int, counts: list[int] | None
) -> None:
    """``counts`` are the numbers of rows of sequences; None for rows for themselves."""
    args = problem(heads, group, dim, "cuda", torch.bfloat16)
    call = (*args, None) if counts is None else with_rows(args, counts)
    check(cuda_dense.attend_coded(*call), call[:-1])


def test_refuses_other_rows(seed: int) -> None:
    q, keys, values, begin, end = problem(1, 1, 64, "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="values have the keys' table"):
        cuda_dense.attend_coded(q, keys, DenseRows(values.rows, values.pages.clone()), begin, end)
