"""Paged decode attention on a CUDA device against the reference in float32."""

import math
from itertools import product

import pytest
import torch
from precision import assert_close_like_lowp
from ragged_rows import sequences_of
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.page import PAGE
from shadowkv.ops.paged_attention import cuda, reference
from shadowkv.ops.sequence_rows import SequenceRows

if cuda.missing():
    pytest.skip("no CUDA device, or the op was not built", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

SHAPES = [(2, 1, 64), (3, 3, 96), (8, 4, 128), (4, 7, 128), (2, 6, 64), (1, 8, 256), (2, 16, 128)]
"""kv heads, query heads of each (more than 8 take a wider block, or two), head dim."""

EDGES = (0, 0, 1, 8, 15, 16, 17, 33, 63, 64, 64, 64)
shapes = pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)


def case(heads: int, group: int, dim: int, counts: Tensor) -> tuple[Tensor, ...]:
    """Arguments on the device: shuffled pages of one arena among unused ones, NaN in every row no count covers."""
    used = counts.numel()
    fields = [Field(name, (heads, PAGE, dim), torch.bfloat16) for name in "kv"]
    tier = Tier("device", 1, sum(field.nbytes for field in fields), used + 5, torch.device("cuda"))
    tier.arena.fill_(-1)  # NaN
    k, v = (tier.views(fields)[name][0] for name in "kv")
    pages = torch.tensor(tier.allocate(used))[torch.randperm(used)].view(counts.shape)
    for page_id, count in zip(pages.flatten().tolist(), counts.flatten().tolist()):
        k[page_id, :, :count] = torch.randn(heads, count, dim, device="cuda").bfloat16()
        v[page_id, :, :count] = torch.randn(heads, count, dim, device="cuda").bfloat16()
    q = (2 * torch.randn(len(counts), heads * group, dim, device="cuda")).bfloat16()
    pages[counts == 0] = 2**40  # never looked at
    return q, k, v, pages.cuda(), counts.cuda()


def ragged(batch: int, entries: int) -> Tensor:
    """Counts at every edge of a tile, with rows of one token, full rows and empty rows."""
    counts = torch.tensor(EDGES)[torch.randint(len(EDGES), (batch, entries))]
    counts[0] = PAGE
    if batch > 2:
        counts[1], counts[2] = 0, 0
        counts[2, -1] = 1
    return counts


def check(out: tuple[Tensor, Tensor], args: tuple[Tensor, ...]) -> None:
    """Compares with the reference in float32. The reference's error in bfloat16 is the measure of rounding."""
    q, k, v, pages, counts = args
    full = counts.sum(1) > 0
    assert out[0].dtype == torch.bfloat16
    assert out[1].dtype == torch.float32
    assert (out[0][~full] == 0).all()
    assert (out[1][~full] == -math.inf).all()
    if not full.any():
        return
    # The reference takes contiguous pages in float32; the arena's views overlap.
    page_ids, places = pages[full][counts[full] > 0].unique(return_inverse=True)
    renamed = torch.zeros_like(pages[full]).masked_scatter_(counts[full] > 0, places)
    rows = [(x[full] if x is q else x[page_ids]) for x in (q, k, v)]
    exact = reference.paged_attention(*(x.float() for x in rows), renamed, counts[full])
    low = reference.paged_attention(*rows, renamed, counts[full])
    for found, truth, rounded in zip(out, exact, low):
        assert_close_like_lowp(found[full], truth.double(), rounded)


@shapes
@pytest.mark.parametrize(("batch", "entries"), [(1, 1), (1, 70), (5, 9), (48, 3)])
def test_any_number_of_valid_tokens_in_any_page(seed, heads, group, dim, batch, entries):
    args = case(heads, group, dim, ragged(batch, entries))
    check(cuda.paged_attention(*args), args)


@shapes
def test_every_count_of_one_page(seed, heads, group, dim):
    args = case(heads, group, dim, torch.arange(PAGE + 1)[:, None])
    check(cuda.paged_attention(*args), args)


def drafted(args: tuple[Tensor, ...], rows: list[int]) -> tuple[tuple[Tensor, ...], SequenceRows]:
    """Turns rows into sequences of several rows. The last row of a sequence has all tokens, and each row before it has
    one fewer."""
    _, k, v, pages, counts = args
    of_all = [rows[row % len(rows)] for row in range(len(counts))]
    row = torch.arange(len(counts), device="cuda").repeat_interleave(torch.tensor(of_all, device="cuda"))
    own = counts[row].cpu()
    fewer = [after for count in of_all for after in reversed(range(count))]
    for of_row, less in zip(own, fewer, strict=True):
        for entry in of_row.nonzero().flatten().flip(0).tolist():
            less -= (taken := min(less, int(of_row[entry])))
            of_row[entry] -= taken
    q = (2 * torch.randn(len(row), *args[0].shape[1:], device="cuda")).bfloat16()
    return (q, k, v, pages[row], own.cuda()), sequences_of(of_all, "cuda")


@shapes
@pytest.mark.parametrize("rows", [[1], [2], [4], [8], [3, 0, 1, 7, 8, 5]], ids=str)
@pytest.mark.parametrize("split", [1, 3])
def test_rows_of_a_sequence(seed, monkeypatch, heads, group, dim, rows, split):
    """Their ends are in one tile, in two, or in several pages, and a row can have no tokens at all."""
    monkeypatch.setattr(cuda, "splits", lambda *args: split)
    args, sequences = drafted(case(heads, group, dim, ragged(9, 7)), rows)
    check(cuda.paged_attention(*args, sequences), args)


def test_sequences_can_have_fewer_rows_than_there_is_room_for(seed):
    args, sequences = drafted(case(2, 4, 128, ragged(9, 7)), [2, 1, 0])
    wide = SequenceRows(sequences.starts, 16)
    check(cuda.paged_attention(*args, wide), args)


@pytest.mark.parametrize("split", [1, 2, 3, 7, 40, 90])
def test_any_number_of_splits(seed, monkeypatch, split):
    monkeypatch.setattr(cuda, "splits", lambda *args: split)
    args = case(2, 4, 128, ragged(6, 80))
    check(cuda.paged_attention(*args), args)


def test_tables_may_be_slices_of_larger_ones(seed):
    q, k, v, pages, counts = case(2, 4, 128, ragged(5, 9))
    args = (q, k, v, pages[1:, :7], counts[1:, :7])
    check(cuda.paged_attention(q[1:], *args[1:]), (q[1:], *args[1:]))


def test_large_scores(seed):
    q, *rest = case(2, 4, 128, ragged(5, 9))
    args = (q * 100, *rest)
    check(cuda.paged_attention(*args), args)


@pytest.mark.parametrize("split", [1, 5])
def test_what_is_not_a_number_shows(seed, monkeypatch, split):
    monkeypatch.setattr(cuda, "splits", lambda *args: split)
    q, *rest = case(2, 4, 128, torch.tensor([[64, 3, 0, 17, 1]]))
    q[0, 5, 9] = math.nan
    out, lse = cuda.paged_attention(q, *rest)
    assert out[0].isnan().any(-1).tolist() == lse[0].isnan().tolist() == [row == 5 for row in range(8)]


@pytest.mark.parametrize("entries", [3, 200])
def test_captured_in_a_graph_it_gives_the_same_bits(seed, entries):
    args = case(8, 4, 128, ragged(4, entries))
    other = torch.randint(PAGE + 1, args[4].shape, device="cuda").minimum(args[4])
    cuda.paged_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda.paged_attention(*args)
    for counts in (args[4].clone(), other):  # lengths are read on the device
        args[4].copy_(counts)
        graph.replay()
        for found, expected in zip(captured, cuda.paged_attention(*args)):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("dim", "dtype"), [(32, torch.bfloat16), (128, torch.float32), (128, torch.float16)])
def test_other_dtypes_and_dims_are_refused(seed, dim, dtype):
    q, k, v, pages, counts = case(2, 4, dim, ragged(3, 2))
    with pytest.raises((ValueError, RuntimeError), match=r"head dims.*not 32" if dim == 32 else "dtype"):
        cuda.paged_attention(q.to(dtype), k.to(dtype), v.to(dtype), pages, counts)


def test_wrong_arguments_are_refused(seed):
    q, k, v, pages, counts = case(2, 4, 128, ragged(3, 2))
    for wrong in (
        (q, k, v, pages.int(), counts),
        (q, k, v, pages, counts[:, :1]),
        (q[:, :7], k, v, pages, counts),
        (q, k, v[:, :1], pages, counts),
        (q, k.cpu(), v, pages, counts),
        (q, k.transpose(1, 2).contiguous().transpose(1, 2), v, pages, counts),
    ):
        with pytest.raises(RuntimeError):
            cuda.paged_attention(*wrong)


@pytest.mark.parametrize("dim", cuda.RESIDENT_BLOCKS)
def test_splits_are_neither_none_nor_more_than_the_pages(dim):
    for pairs, entries in product((1, 8, 56, 384, 5000), (1, 9, 960, 1952)):
        assert 1 <= cuda.splits(pairs, entries, dim, 132, cuda.RESIDENT_BLOCKS) <= entries
