"""Paged decode attention within a window on a CUDA device against the reference in float32."""

import math

import pytest
import torch
from precision import assert_close_like_lowp
from test_cuda_paged_attention import SHAPES, case

from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_attention.cuda import paged_attention
from shadowkv.ops.paged_window_attention import cuda, reference

if cuda.missing():
    pytest.skip("no CUDA device, or the op was not built", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
EDGES = (0, 1, 7, 15, 16, 17, 40, 63, 64)


def windowed(batch: int, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and counts with every edge of a tile: of a window in the middle of pages, of none, and of one token."""
    edges = torch.tensor(EDGES)
    starts, counts = edges[torch.randint(len(EDGES), (2, batch, entries))]
    starts[0], counts[0] = 0, PAGE
    starts[0, 0] = 37
    if batch > 2:
        starts[1], counts[1] = 5, 5
        starts[2], counts[2], starts[2, -1], counts[2, -1] = 9, 3, 62, 63
    return starts, counts


def check(heads: int, group: int, dim: int, starts: torch.Tensor, counts: torch.Tensor) -> None:
    q, k, v, pages, counts = case(heads, group, dim, counts)
    starts, token = starts.cuda(), torch.arange(PAGE, device="cuda")
    for page_id, start, count in zip(pages.flatten().tolist(), starts.flatten().tolist(), counts.flatten().tolist()):
        if count:  # and NaN before a start
            k[page_id, :, : min(start, count)] = v[page_id, :, : min(start, count)] = math.nan
    out, lse = cuda.paged_window_attention(q, k, v, pages, starts, counts)
    full = ((token >= starts[..., None]) & (token < counts[..., None])).any(-1).any(-1)
    assert (out[~full] == 0).all() and (lse[~full] == -math.inf).all()
    if not full.any():
        return
    page_ids, places = pages[full][counts[full] > 0].unique(return_inverse=True)
    renamed = torch.zeros_like(pages[full]).masked_scatter_(counts[full] > 0, places)
    rows = [q[full], *((x[page_ids]) for x in (k, v))]
    exact = reference.paged_window_attention(*(x.float() for x in rows), renamed, starts[full], counts[full])
    low = reference.paged_window_attention(*rows, renamed, starts[full], counts[full])
    for found, truth, rounded in zip((out, lse), exact, low):
        assert_close_like_lowp(found[full], truth.double(), rounded)


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize(("batch", "entries"), [(1, 1), (1, 18), (5, 4), (48, 3)])
def test_any_span_of_any_page(seed, heads, group, dim, batch, entries):
    check(heads, group, dim, *windowed(batch, entries))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_span_of_one_page(seed, dim):
    starts, counts = torch.meshgrid(torch.arange(PAGE + 1), torch.arange(PAGE + 1), indexing="ij")
    check(2, 4, dim, starts.reshape(-1, 1).contiguous(), counts.reshape(-1, 1).contiguous())


def test_windows_from_the_start_are_what_counts_say(seed):
    q, k, v, pages, counts = case(4, 4, 128, torch.randint(0, PAGE + 1, (7, 9)))
    found = cuda.paged_window_attention(q, k, v, pages, torch.zeros_like(counts), counts)
    for x, y in zip(found, paged_attention(q, k, v, pages, counts), strict=True):
        assert torch.equal(x, y)
