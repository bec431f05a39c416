"""Attention over selected chunks of 8-bit floats in CUDA against the reference, on pages as the cache has them."""

import math
from dataclasses import replace

import pytest
import torch
from test_cuda_attend_selected import (
    DEVICE,
    SHAPES,
    YARN,
    attend,
    buffered,
    check,
    check_replay,
    log_weights,
    selections,
)
from test_cuda_attend_selected_cases import CASE

from shadowkv.kvcache.codecs.fp8 import Fp8Rows
from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected import cuda
from shadowkv.ops.attend_selected.sources import CentredKeys, CodedRows
from shadowkv.ops.codec import CodecId
from shadowkv.ops.page import PAGE

if cuda.missing():
    pytest.skip("needs a CUDA device and the attend_selected library", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("seed", "poisoned_outputs")


def problem(
    heads: int,
    group: int,
    dim: int,
    *,
    tokens: list[int],
    chunk: int = 8,
    count: int = 21,
    in_buffer: bool = False,
    mean: float | None = None,
    **rope: object,
) -> tuple:
    """q, keys, values and selected. Chunks that are not selected, and states of no row, are NaN. Keys and values have
    pages and states of their own. Keys are stored without their mean if ``mean`` gives its size."""
    codec, batch, chunks = Fp8Rows(), len(tokens), PAGE // chunk
    pages = max(1, max(-(-length // PAGE) for length in tokens))
    selected = selections(tokens, heads, count, chunk).to(DEVICE)
    row, head, i = (selected >= 0).nonzero(as_tuple=True)
    chosen = selected[row, head, i]
    fields = [Field(name, (heads, chunks, chunk, dim), torch.uint8) for name in ("keys", "values")]
    tier = Tier("device", 1, sum(field.nbytes for field in fields), 2 * batch * pages, DEVICE)
    tier.arena.fill_(-1)  # NaN
    page_ids = torch.tensor(tier.allocate(2 * batch * pages), device=DEVICE)
    sources = []
    for field in fields:
        states = torch.randperm(2 * batch, device=DEVICE)[:batch]
        state = torch.full((2 * batch, heads, 1), math.nan, device=DEVICE)
        state[states] = (1 + torch.rand(batch, heads, 1, device=DEVICE)) / 64
        rows = torch.randn(len(chosen), chunk, dim, device=DEVICE)
        codes, scale = codec.encode(rows, None, (state[states][row, head].unsqueeze(1),))
        table = page_ids[torch.randperm(len(page_ids), device=DEVICE)][: batch * pages].view(batch, pages)
        view = tier.views(fields)[field.name][0]
        view[table[row, chosen // chunks], head, chosen % chunks] = codes
        sources.append(CodedRows(view, scale, codec, dim, None, table, None, (state,), states))
    keys, values = sources
    if mean is not None:
        means = torch.full((2 * batch, heads, dim), math.nan, device=DEVICE)
        means[keys.states] = mean * torch.randn(batch, heads, dim, device=DEVICE)
        first = PAGE * torch.randint(0, 4, (batch,), device=DEVICE)
        rotary = RotaryTables(RopeConfig(dim, **rope), (pages + 3) * PAGE, DEVICE)
        keys = CentredKeys(**vars(keys), mean=means, first=first, rotary=rotary)
    q = (2 * torch.randn(batch, heads * group, dim, device=DEVICE)).bfloat16()
    return q, keys, buffered(values, selected) if in_buffer else values, selected


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("in_buffer", [False, True])
def test_ragged_selections(heads: int, group: int, dim: int, in_buffer: bool) -> None:
    for tokens in ([700, 0, 64, 129, 8], [1000]):
        args = problem(heads, group, dim, tokens=tokens, in_buffer=in_buffer)
        check(args, attend(args))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_every_chunk_size_with_weights(chunk: int, dim: int) -> None:
    args = problem(2, 4, dim, tokens=[1500, 77, 640, 0], chunk=chunk, count=640 // chunk)
    check(args, attend(args))
    args = (*args, log_weights(args[3]))
    check(args, attend(args))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("group", [4, 12])
def test_any_number_of_splits(monkeypatch: pytest.MonkeyPatch, splits: int, group: int) -> None:
    args = problem(2, group, 128, tokens=[3000, 5, 900], chunk=1, count=700)
    monkeypatch.setattr(cuda, "splits", lambda *_: splits)
    check(args, attend(args))


def test_every_number_is_read_exactly() -> None:
    """One selected token: the output is its value, whichever bytes it has, and the score the product with its key."""
    q, keys, values, selected = problem(1, 1, 256, tokens=[1], chunk=1, count=1)
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers[numbers % 128 == 127] = 0  # NaN
    for rows in (keys, values):
        rows.codes[rows.pages[0, 0], 0, 0, 0] = numbers[torch.randperm(256, device=DEVICE)]
        rows.state[0].fill_(0.5)
    out, lse = cuda.attend_selected(q, keys, values, selected)
    key, value = (
        0.5 * rows.codes[rows.pages[0, 0], 0, 0, 0].view(torch.float8_e4m3fn).float() for rows in (keys, values)
    )
    assert torch.equal(out[0, 0], value.bfloat16())
    torch.testing.assert_close(lse[0, 0], q[0, 0].float() @ key / 16, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
def test_keys_without_their_mean(heads: int, group: int, dim: int) -> None:
    for tokens in ([700, 0, 64, 129, 8], [1000]):
        args = problem(heads, group, dim, tokens=tokens, mean=1.0)
        check(args, attend(args))


@pytest.mark.parametrize("rotary", [32, 128])
@pytest.mark.parametrize("rope", [{}, YARN], ids=["no magnitude", "magnitude"])
def test_keys_without_a_large_mean(monkeypatch: pytest.MonkeyPatch, rotary: int, rope: dict[str, object]) -> None:
    args = problem(2, 4, 128, tokens=[900, 300], chunk=1, count=300, mean=4.0, rotary_dim=rotary, **rope)
    check(args, attend(args))
    monkeypatch.setattr(cuda, "splits", lambda *_: 3)
    args = (*args, log_weights(args[3]))
    check(args, attend(args))


@pytest.mark.parametrize("mean", [None, 1.0])
def test_captured_call_equals_the_eager_one(mean: float | None) -> None:
    check_replay(problem(2, 4, 128, tokens=[900, 300], mean=mean))


def test_only_rope_in_halves_rotates_a_mean() -> None:
    args = problem(2, 4, 128, tokens=[900, 300], mean=1.0, interleaved=True)
    with pytest.raises(ValueError, match="RoPE rotates 128 of 128 dimensions in neighbours"):
        cuda.attend_selected(*args)


def test_what_is_supported_is_told_beforehand() -> None:
    case = replace(CASE, rank=0, key_codec=CodecId.FP8, value_codec=CodecId.FP8)
    assert cuda.supports(case) == cuda.supports(replace(case, centred=True)) == []
    assert cuda.supports(replace(case, interleaved=True)) == []
    (told,) = cuda.supports(replace(case, centred=True, interleaved=True))
    assert "in neighbours" in told
    (told,) = cuda.supports(replace(case, value_codec=CodecId.DENSE))
    assert "no kernel for keys in codec 12 with values in codec 0" in told
