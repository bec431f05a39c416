"""Paged attention against a softmax per head, and parts merged against one softmax over everything."""

import math
from itertools import pairwise

import pytest
import torch
from plain_formulas import SHAPES, assert_close, attend_rows, check, poison
from precision import assert_close_like_lowp

from shadowkv.ops.paged_attention import reference as paged_reference

DTYPES = [torch.float32, torch.bfloat16]
shapes = pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def paged_case(heads: int, group: int, dim: int, dtype: torch.dtype) -> tuple:
    """Shuffled pages with gaps, NaN in rows and pages without valid tokens; and the plain rows."""
    counts = torch.tensor(
        [
            [1, 0, 0, 0, 0],
            [0, 0, 0, 0, 64],
            [64, 64, 64, 64, 64],
            [64, 0, 7, 63, 0],
            [0, 33, 0, 1, 2],
        ]
    )
    counts[3, 3] = torch.randint(1, 65, ())
    page_ids = torch.randperm(40)
    pages = page_ids[:25].view(5, 5)
    # Views as a pool has them: keys and values of a page side by side, and some bytes between pages.
    pool = torch.randn(40, 3, heads, 64, dim).to(dtype)
    used = torch.zeros(40, 64, dtype=torch.bool)
    for row in range(5):
        for column in range(5):
            used[pages[row, column], : counts[row, column]] = True
    pool = poison(pool.permute(0, 3, 1, 2, 4), used).permute(0, 2, 3, 1, 4).contiguous()
    k, v = pool[:, 0], pool[:, 1]
    q = (2 * torch.randn(5, heads * group, dim)).to(dtype)
    rows = []
    for row in range(5):
        parts = [[x[pages[row, e], :, : counts[row, e]] for e in range(5)] for x in (k, v)]
        rows.append((q[row], *(torch.cat(part, dim=1) for part in parts)))
    return (q, k, v, pages, counts), rows


@shapes
@dtypes
def test_paged_attention_reads_only_the_valid_tokens(ops, seed, heads, group, dim, dtype):
    args, rows = paged_case(heads, group, dim, dtype)
    check(ops.paged_attention(*args), rows, dtype)


def test_paged_attention_of_one_token_is_its_value(ops, seed):
    k, v, q = torch.randn(3, 2, 64, 64), torch.randn(3, 2, 64, 64), torch.randn(1, 4, 64)
    out, lse = ops.paged_attention(q, k, v, torch.tensor([[2]]), torch.tensor([[1]]))
    assert_close(out[0], v[2, :, 0].repeat_interleave(2, 0))
    assert_close(lse[0], (q[0] * k[2, :, 0].repeat_interleave(2, 0)).sum(-1) / 8)


def test_paged_attention_survives_large_scores(ops, seed):
    (q, k, v, pages, counts), rows = paged_case(2, 3, 64, torch.float32)
    out, lse = ops.paged_attention(q * 200, k, v, pages, counts)
    exact, sums = attend_rows([(query * 200, *rest) for query, *rest in rows])
    assert_close(out, exact, atol=2e-3)
    assert_close(lse, sums, atol=2e-3)
    assert sums.abs().max() > 200  # exp of it overflows float32


@pytest.mark.parametrize("at_once", [1, 3, 14])
def test_paged_attention_may_gather_its_pages_in_any_number_of_steps(seed, monkeypatch, at_once):
    args, rows = paged_case(2, 3, 64, torch.float32)
    monkeypatch.setattr(paged_reference, "GATHERED_AT_ONCE", at_once)
    check(paged_reference.paged_attention(*args), rows, torch.float32)


@dtypes
def test_merged_parts_equal_one_softmax_over_all_of_them(ops, seed, dtype):
    q, (k, v) = torch.randn(3, 6, 64).to(dtype), torch.randn(2, 2, 50, 64).to(dtype)
    borders = [0, 0, 1, 30, 50]  # an empty part, one of length 1, two longer ones
    parts = []
    for start, end in pairwise(borders):
        out, lse = attend_rows([(query, k[:, start:end], v[:, start:end]) for query in q])
        parts.append((out.to(dtype), lse.float()))
    rows = [(query, k, v) for query in q]
    merged = ops.merge_attention(parts)
    assert merged.dtype == dtype
    if dtype == torch.float32:
        assert_close(merged, attend_rows(rows)[0])
    else:
        assert_close_like_lowp(merged, attend_rows(rows)[0], attend_rows(rows, dtype)[0])


def test_merge_weighs_parts_by_the_exponential_of_their_log_sum_exp(ops, seed):
    outs = torch.randn(3, 2, 5, 8)
    lse = torch.stack([torch.full((2, 5), value) for value in (900.0, 901.0, 890.0)])  # exp of each overflows
    lse[1, 0] = -math.inf
    weights = torch.tensor([[1, 0, math.exp(-10)], [1, math.e, math.exp(-10)]], dtype=torch.float64)
    weights /= weights.sum(1, keepdim=True)
    expected = torch.einsum("bp,pbhd->bhd", weights, outs.double())
    assert_close(ops.merge_attention(list(zip(outs, lse))), expected, atol=1e-5)


def test_merge_of_a_single_part_is_that_part(ops, seed):
    out = torch.randn(2, 3, 8)
    assert torch.equal(ops.merge_attention([(out, torch.randn(2, 3))]), out)
