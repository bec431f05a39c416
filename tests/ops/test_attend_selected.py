"""Packing of coded rows bit by bit, and the reference against plain formulas per token."""

import gc
import math
import weakref

import pytest
import torch
from plain_formulas import SHAPES, assert_close, attend_rows, rope
from torch import Tensor

from shadowkv.kvcache.codecs.latents import DenseLatents, Int8Latents
from shadowkv.kvcache.codecs.rotated import ROTATED_ROWS
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected import cuda
from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import BufferedRows, CodedRows, DenseRows, LatentKeys

WIDTHS = [(4, 64), (4, 96), (4, 128), (4, 256), (3, 64), (3, 128), (3, 256), (2, 64), (2, 96), (2, 128), (2, 256)]


def orthogonal(dim: int) -> Tensor:
    return torch.linalg.qr(torch.randn(dim, dim))[0]


def code_of(row: list[int], bits: int, dim: int, i: int, half: int, g: int) -> int:
    """The code of dimension 16 i + 8 half + g, read from the packed bytes as the kernel's lane g reads it."""
    if bits == 4:
        return row[g * dim // 16 + i] >> 4 * half & 15
    low = row[g * dim // 32 + i // 2] >> 4 * (i % 2) + 2 * half & 3
    if bits == 2:
        return low
    return low | (row[dim // 4 + g * dim // 64 + i // 4] >> 2 * (i % 4) + half & 1) << 2


@pytest.mark.parametrize(("bits", "dim"), WIDTHS)
def test_codes_are_where_the_layout_says(seed, bits, dim):
    x, rotation = torch.randn(5, dim), orthogonal(dim)
    codes, scale = ROTATED_ROWS[bits].encode(x, rotation)
    assert codes.dtype == torch.uint8 and codes.shape == (5, dim * bits // 8)
    assert scale.dtype == torch.float16 and scale.shape == (5, 1)
    rotated = ROTATED_ROWS[bits].decode(codes, scale, None, dim)
    for row in range(5):
        for at in range(dim):
            code = code_of(codes[row].tolist(), bits, dim, at // 16, at // 8 % 2, at % 8)
            assert rotated[row, at] == scale[row, 0].float() * (code - (2**bits - 1) / 2)


@pytest.mark.parametrize(("bits", "dim"), WIDTHS)
def test_coded_rows_come_back_close(seed, bits, dim):
    x, rotation = torch.randn(200, dim) * torch.rand(200, 1) * 10, orthogonal(dim)
    codec = ROTATED_ROWS[bits]
    back = codec.decode(*codec.encode(x, rotation), rotation, dim)
    error = ((back - x).norm() / x.norm()).item()
    # Of a unit Gaussian the optimal uniform quantizer leaves these mean squares (Max, 1960).
    assert error == pytest.approx({4: 0.01154, 3: 0.03744, 2: 0.1188}[bits] ** 0.5, rel=0.15)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_codes_are_the_nearest_levels_and_the_scale_the_least_squares_one(seed, bits):
    x = torch.randn(9, 64)
    codes, scale = ROTATED_ROWS[bits].encode(x, torch.eye(64))
    levels = ROTATED_ROWS[bits].decode(codes, torch.ones(9, 1), None, 64)
    step = {4: 0.3352, 3: 0.5860, 2: 0.9957}[bits] * x.norm(dim=1, keepdim=True) / 8
    inside = (x / step).abs() < 2 ** (bits - 1) - 1e-3
    assert ((levels - x / step).abs()[inside] <= 0.501).all()
    torch.testing.assert_close(scale[:, 0].float(), (x * levels).sum(1) / levels.square().sum(1), rtol=1e-3, atol=0)


def test_zero_rows_stay_zero():
    codec = ROTATED_ROWS[4]
    codes, scale = codec.encode(torch.zeros(2, 64), torch.eye(64))
    assert torch.equal(scale, torch.zeros(2, 1, dtype=torch.float16))
    assert torch.equal(codec.decode(codes, scale, torch.eye(64), 64), torch.zeros(2, 64))


@pytest.mark.parametrize(("bits", "dim"), [(4, 72), (3, 96), (2, 80)])
def test_widths_that_do_not_fit_are_refused(bits, dim):
    with pytest.raises(ValueError, match="multiple"):
        ROTATED_ROWS[bits].encode(torch.randn(1, dim), torch.eye(dim))


def selections(batch: int, heads: int) -> Tensor:
    """Chunks of three pages of eight, -1s last; the last row selects nothing."""
    selected = torch.rand(batch, heads, 24).argsort(-1)[..., :5]
    selected[0, 0, 3:] = -1
    selected[-1] = -1
    return selected


@pytest.mark.parametrize(("heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("latents", ["float", "int8"])
@pytest.mark.parametrize("mean", [True, False])
def test_low_rank_keys_and_coded_values(seed, ops, heads, group, dim, latents, mean):
    batch, rank, chunk = 3, 12, 8
    pages = torch.randperm(20)[: batch * 3].view(batch, 3)
    stored = torch.randn(20, 8, chunk, rank)
    if latents == "int8":
        stored = (stored * 40).clamp(-127, 127).to(torch.int8)
    config = RopeConfig(dim, scaling="yarn", factor=4.0, original_max_position=64)
    basis, means = torch.randn(7, rank, heads, dim) / 30, torch.randn(7, heads, dim)
    states = torch.randperm(7)[:batch]
    codec, first = Int8Latents() if latents == "int8" else DenseLatents(), 64 * torch.arange(batch)
    rotary = RotaryTables(config, 192 + 64 * batch)
    keys = LatentKeys(stored, codec, basis, means if mean else None, states, pages, first, rotary)
    rotation = orthogonal(dim)
    codes, scale = ROTATED_ROWS[4].encode(torch.randn(20, heads, 8, chunk, dim), rotation)
    values = CodedRows(codes, scale.flatten(2, 3), ROTATED_ROWS[4], dim, rotation, pages)
    selected, q = selections(batch, heads), torch.randn(batch, heads * group, dim)
    plain = ROTATED_ROWS[4].decode(codes, scale, rotation, dim)
    rows = []
    for b in range(batch):
        k, v = [], []
        for h in range(heads):
            positions = [c * chunk + i for c in selected[b, h].tolist() if c >= 0 for i in range(chunk)]
            k.append(torch.empty(len(positions), dim))
            v.append(torch.empty(len(positions), dim))
            for n, position in enumerate(positions):
                where = pages[b, position // 64], position % 64 // chunk, position % chunk
                key = stored[where].double() @ basis[states[b], :, h].double() + mean * means[states[b], h].double()
                k[h][n] = rope(key, 64 * b + position, config)
                v[h][n] = plain[where[0], h, where[1], where[2]]
        rows.append((q[b], k, v))
    out, lse = ops.attend_selected(q, keys, values, selected)
    exact, sums = attend_rows(rows)
    assert_close(out, exact, atol=1e-4, rtol=1e-4)
    assert_close(lse, sums, atol=1e-4, rtol=1e-4)
    assert (out[-1] == 0).all()
    assert (lse[-1] == -math.inf).all()


def test_dense_rows_are_gathered_where_they_lie(seed):
    rows, pages = torch.randn(9, 2, 8, 8, 16).bfloat16(), torch.randperm(9)[:6].view(2, 3)
    selected = torch.randint(0, 24, (2, 2, 4))
    found = gather_selected(DenseRows(rows, pages), selected)
    assert found.dtype == torch.bfloat16
    for b in range(2):
        for h in range(2):
            expected = [rows[pages[b, c // 8], h, c % 8] for c in selected[b, h].tolist()]
            assert torch.equal(found[b, h], torch.cat(expected))


def test_no_chunks_at_all_give_zero(ops):
    rows = DenseRows(torch.randn(3, 2, 8, 8, 16), torch.zeros(2, 1, dtype=torch.int64))
    q, none = torch.randn(2, 4, 16), torch.zeros(2, 2, 0, dtype=torch.int64)
    out, lse = ops.attend_selected(q, rows, rows, none)
    assert torch.equal(out, torch.zeros(2, 4, 16))
    assert torch.equal(lse, torch.full((2, 4), -math.inf))


def test_rows_that_select_nothing_leave_the_others_what_they_are(seed, ops):
    batch, heads, dim = 5, 2, 64
    pages, states = torch.randperm(20)[: batch * 3].view(batch, 3), torch.randperm(7)[:batch]
    rotary = RotaryTables(RopeConfig(dim), 192)
    latents, basis, first = (
        torch.randn(20, 8, 8, 12),
        torch.randn(7, 12, heads, dim),
        torch.zeros(batch, dtype=torch.int64),
    )
    keys = LatentKeys(latents, DenseLatents(), basis, None, states, pages, first, rotary)
    rotation = orthogonal(dim)
    codes, scale = ROTATED_ROWS[3].encode(torch.randn(20, heads, 8, 8, dim), rotation)
    elsewhere = torch.randperm(20)
    scale, where = scale.flatten(2, 3)[elsewhere], elsewhere.argsort()[pages]
    coded = CodedRows(codes, scale, ROTATED_ROWS[3], dim, rotation, pages, where)
    everywhere = torch.rand(batch, heads, 24).argsort(-1)[..., :5]
    selected = everywhere.clone()
    selected[0] = selected[3] = -1
    q, weight = torch.randn(batch, 4, dim), torch.randn(batch, heads, 5)
    entries = torch.rand(batch, heads, 9).argsort(-1)[..., :5]
    exact = torch.randn(20, heads, 8, 8, dim)
    slots, buffer = states.flip(0), codes[:7, :, 0:1].repeat(1, 1, 9, 1, 1)
    for values in (coded, BufferedRows(coded, buffer, slots, entries)):
        for used in (keys, DenseRows(exact, pages)):
            out, lse = ops.attend_selected(q, used, values, selected, weight)
            assert not out[[0, 3]].any()
            assert (lse[[0, 3]] == -math.inf).all()
            expected, sums = ops.attend_selected(q, used, values, everywhere, weight)
            assert_close(out[[1, 2, 4]], expected[[1, 2, 4]], atol=1e-5, rtol=1e-5)
            assert_close(lse[[1, 2, 4]], sums[[1, 2, 4]], atol=1e-5, rtol=1e-5)
            assert sums.isfinite().all()


@pytest.mark.parametrize("form", ["rows", "codes"])
def test_buffered_rows_are_those_of_their_source_bit_by_bit(seed, form):
    batch, heads, dim = 3, 2, 64
    rows, pages = torch.randn(9, heads, 8, 8, dim), torch.randperm(9).view(batch, 3)
    values: DenseRows | CodedRows = DenseRows(rows, pages)
    if form == "codes":
        rotation = orthogonal(dim)
        rows, scale = ROTATED_ROWS[4].encode(rows, rotation)
        # Scales lie in pages of their own.
        where = torch.randperm(9)
        scale, scale_pages = scale.flatten(2, 3)[where], where.argsort()[pages]
        values = CodedRows(rows, scale, ROTATED_ROWS[4], dim, rotation, pages, scale_pages)
    selected = selections(batch, heads)
    expected = gather_selected(values, selected)
    slots, entries = torch.tensor([4, 0, 2]), torch.rand(batch, heads, 11).argsort(-1)[..., :5]
    buffer = torch.full((5, heads, 11, 8, rows.shape[-1]), 77, dtype=rows.dtype)
    b, h, i = (selected >= 0).nonzero(as_tuple=True)
    chunk = selected[b, h, i]
    buffer[slots[b], h, entries[b, h, i]] = rows[pages[b, chunk // 8], h, chunk % 8]
    entries = entries.masked_fill(selected < 0, -1)
    rows.zero_()
    found = gather_selected(BufferedRows(values, buffer, slots, entries), selected)
    valid = (selected >= 0).repeat_interleave(8, dim=2)
    assert torch.equal(found[valid], expected[valid])


def test_what_captured_graphs_read_lives_as_long_as_its_rotation() -> None:
    rotations = [RotaryTables(RopeConfig(64), 16) for _ in range(9)]
    first = [weakref.ref(x) for x in cuda._angles(rotations[0])]
    for rotary in rotations:
        cuda._angles(rotary)
    gc.collect()
    assert all(kept() is given for kept, given in zip(first, cuda._angles(rotations[0])))
    assert all(kept() is not None for kept in first)
    del rotations, rotary
    gc.collect()
    assert all(kept() is None for kept in first)


def test_a_chunk_weighs_as_many_as_it_stands_for(seed, ops):
    rows, pages = torch.randn(9, 2, 8, 8, 16), torch.randperm(9).view(3, 3)
    source, q, selected = DenseRows(rows, pages), torch.randn(3, 4, 16), selections(3, 2)
    counts = torch.randint(1, 5, selected.shape)
    repeated = torch.full((3, 2, 20), -1)
    for b in range(3):
        for h in range(2):
            chunks = selected[b, h].repeat_interleave(counts[b, h])
            repeated[b, h, : len(chunks)] = chunks
    log_weight = counts.log().masked_fill(selected < 0, math.nan)
    found = ops.attend_selected(q, source, source, selected, log_weight)
    for got, wanted in zip(found, ops.attend_selected(q, source, source, repeated)):
        assert_close(got, wanted, atol=1e-5, rtol=1e-5)
