"""Attention over rows of 8-bit floats on a CUDA device against the reference."""

import math
from dataclasses import replace

import pytest
import torch
from ragged_rows import BEGIN, END, check_replays, with_rows
from torch import Tensor

from shadowkv.kvcache.codecs.fp8 import Fp8Rows
from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.attend_coded import cuda_fp8, reference
from shadowkv.ops.attend_selected.sources import CodedRows, DenseRows
from shadowkv.ops.page import PAGE

if cuda_fp8.missing():
    pytest.skip("no CUDA device, or the op was not built", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

SHAPES = [(2, 1, 64), (3, 3, 96), (8, 4, 128), (4, 7, 128), (2, 8, 96), (1, 8, 256), (2, 16, 128)]
"""kv heads, query heads of each (more than 8 take a wider block, or two), head dim."""

Problem = tuple[Tensor, CodedRows, CodedRows, Tensor, Tensor]


def problem(heads: int, group: int, dim: int, chunk: int = 8) -> Problem:
    """Rows of 10 pages, shuffled among other pages. Tokens that are not attended to, and states of no row, are NaN."""
    codec, batch, pages = Fp8Rows(), len(END), 10
    begin, end = torch.tensor(BEGIN, device="cuda"), torch.tensor(END, device="cuda")
    fields = [Field(name, (heads, PAGE // chunk, chunk, dim), torch.uint8) for name in "kv"]
    tier = Tier("device", 1, sum(field.nbytes for field in fields), 2 * batch * pages, torch.device("cuda"))
    tier.arena.fill_(-1)  # NaN
    page_ids = torch.tensor(tier.allocate(2 * batch * pages), device="cuda")
    place = torch.arange(64 * pages, device="cuda")
    dead = ((place < begin[:, None]) | (place >= end[:, None]))[:, None, :, None]
    sources = []
    for field in fields:
        states = torch.randperm(2 * batch, device="cuda")[:batch]
        state = torch.full((2 * batch, heads, 1), math.nan, device="cuda")
        state[states] = (1 + torch.rand(batch, heads, 1, device="cuda")) / 64
        rows = torch.randn(batch, heads, 64 * pages, dim, device="cuda")
        codes, scale = codec.encode(rows, None, (state[states].unsqueeze(2),))
        codes = codes.masked_fill(dead, 0x7F)
        table = page_ids[torch.randperm(len(page_ids), device="cuda")][: batch * pages].view(batch, pages)
        view = tier.views(fields)[field.name][0]
        view[table] = codes.unflatten(2, (pages, PAGE // chunk, chunk)).transpose(1, 2)
        table = table.masked_fill(PAGE * torch.arange(pages, device="cuda") >= end[:, None], 2**40)  # never looked at
        sources.append(CodedRows(view, scale, codec, dim, None, table, None, (state,), states))
    q = (2 * torch.randn(batch, heads * group, dim, device="cuda")).bfloat16()
    return q, sources[0], sources[1], begin, end


def check(found: tuple[Tensor, Tensor], args: Problem) -> None:
    q, keys, values, begin, end = args
    keys, values = (replace(rows, pages=rows.pages % 2**40) for rows in (keys, values))
    exact, lse = reference.attend_coded(q.float(), keys, values, begin, end)
    some = end > begin
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    assert (found[0][~some] == 0).all()
    assert (found[1][~some] == -math.inf).all()
    torch.testing.assert_close(found[1][some], lse[some], atol=2e-4, rtol=1e-5)
    rounded = exact.bfloat16().float()
    assert (found[0].float() - exact).norm() <= 1.5 * (rounded - exact).norm()
    torch.testing.assert_close(found[0].float(), exact, atol=2e-3 * exact.abs().max().item(), rtol=1e-2)


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_ragged_rows(seed: int, heads: int, group: int, dim: int, chunk: int) -> None:
    args = problem(heads, group, dim, chunk)
    check(cuda_fp8.attend_coded(*args), args)


@pytest.mark.parametrize("counts", [[1], [2], [4], [8], [3, 0, 1, 7, 8, 5]], ids=str)
@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
def test_rows_of_a_sequence(seed: int, heads: int, group: int, dim: int, counts: list[int]) -> None:
    args = with_rows(problem(heads, group, dim), counts)
    check(cuda_fp8.attend_coded(*args), args[:-1])


@pytest.mark.parametrize("split", [1, 2, 3, 7, 10])
def test_any_number_of_splits(seed: int, monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    monkeypatch.setattr(cuda_fp8, "splits", lambda *args: split)
    args = problem(2, 4, 128)
    check(cuda_fp8.attend_coded(*args), args)


def test_every_code_is_decoded(seed: int) -> None:
    """Of one token attention returns the value itself."""
    q, keys, values, _, _ = problem(2, 4, 128)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").masked_fill_(
        torch.arange(256, device="cuda") % 128 == 127, 0
    )
    values.codes[values.pages[1, 0]] = codes.view(2, 1, 1, 128)
    begin, end = torch.full((2, len(q)), 20, device="cuda")
    end = end + (torch.arange(len(q), device="cuda") == 1)
    out, _ = cuda_fp8.attend_coded(q, keys, values, begin, end)
    wanted = codes.view(2, 1, 128).view(torch.float8_e4m3fn).float() * values.state[0][values.states[1]].unsqueeze(1)
    assert torch.equal(out[1].view(2, 4, 128), wanted.bfloat16().expand(-1, 4, -1))


@pytest.mark.parametrize("split", [1, 5])
def test_what_is_not_a_number_shows(seed: int, monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    monkeypatch.setattr(cuda_fp8, "splits", lambda *args: split)
    q, keys, values, begin, end = problem(2, 4, 128)
    if torch.cuda.get_device_capability() >= (8, 9):  # older GPUs read numbers there
        values.codes[values.pages[1, 4], 1] = 0x7F
    q[0, 5, 9] = math.nan
    out, lse = cuda_fp8.attend_coded(q, keys, values, begin, end)
    assert out[0].isnan().any(-1).tolist() == lse[0].isnan().tolist() == [row == 5 for row in range(8)]
    if torch.cuda.get_device_capability() >= (8, 9):
        assert out[1].isnan().any(-1).tolist() == [row >= 4 for row in range(8)]


def test_captured_in_a_graph_it_gives_the_same_bits(seed: int) -> None:
    check_replays(cuda_fp8.attend_coded, problem(8, 4, 128))


def test_other_rows_dims_and_dtypes_are_refused(seed: int) -> None:
    q, keys, values, *lengths = problem(2, 4, 64)
    dense = DenseRows(keys.codes.bfloat16(), keys.pages)
    with pytest.raises(ValueError, match="takes fp8 rows, not DenseRows"):
        cuda_fp8.attend_coded(q, dense, values, *lengths)
    with pytest.raises(ValueError, match=r"head dim.*not 32"):
        cuda_fp8.attend_coded(q[..., :32], keys, values, *lengths)
    with pytest.raises(RuntimeError, match="q has dtype"):
        cuda_fp8.attend_coded(q.float(), keys, values, *lengths)
    with pytest.raises(RuntimeError, match="end has dtype"):
        cuda_fp8.attend_coded(q, keys, values, lengths[0], lengths[1].int())
