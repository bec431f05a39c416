"""Gathering, rebuilding and the low-rank basis."""

import pytest
import torch
from plain_formulas import assert_close, rope
from precision import assert_close_like_lowp

from shadowkv.kvcache.codecs.latents import DenseLatents
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_selected.reference import gather_selected
from shadowkv.ops.attend_selected.sources import DenseRows, LatentKeys
from shadowkv.ops.low_rank_basis import reference as basis_reference


def selection(heads: int, chunks: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page ids of 3 sequences of 3 pages out of 11, and ragged selections padded with -1."""
    pages = torch.randperm(11)[:9].view(3, 3)
    selected = torch.stack([torch.randperm(3 * chunks)[:k] for _ in range(3 * heads)]).view(3, heads, k)
    selected[1, :, k // 2 :] = -1
    selected[2] = -1
    return pages, selected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("heads", "chunks", "chunk", "dim"), [(2, 8, 8, 64), (3, 4, 16, 96), (1, 64, 1, 128)])
@pytest.mark.parametrize("k", [1, 5, 0])
def test_gathered_rows_are_copied_bit_for_bit(seed, dtype, heads, chunks, chunk, dim, k):
    pages, selected = selection(heads, chunks, k)
    pool = torch.randint(-100, 100, (11, 2, heads, chunks, chunk, dim)).to(dtype)
    rows = pool[:, 1]  # strided, as a field of a page is
    out = gather_selected(DenseRows(rows, pages), selected)
    assert out.shape == (3, heads, k * chunk, dim)
    assert out.dtype == dtype
    for b in range(3):
        for h in range(heads):
            for i, number in enumerate(selected[b, h].tolist()):
                got = out[b, h, i * chunk : (i + 1) * chunk]
                if number >= 0:
                    assert torch.equal(got, rows[pages[b, number // chunks], h, number % chunks])
                else:
                    own = rows[pages[b], h].flatten(0, 1)
                    assert any(torch.equal(got, row) for row in own), "not a row of this sequence"


ROTATIONS = {
    "halves": RopeConfig(64, 1e4),
    "interleaved": RopeConfig(64, 1e4, interleaved=True),
    "partial": RopeConfig(96, 5e5, rotary_dim=48),
    "yarn": RopeConfig(64, 1e4, scaling="yarn", factor=4.0, original_max_position=128),
}


@pytest.mark.parametrize("config", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "chunks", "rank", "k"), [(2, 8, 20, 4), (3, 4, 7, 1)])
def test_rebuilt_keys_are_the_rotated_product_of_latents_and_basis(seed, config, dtype, heads, chunks, rank, k):
    pages, selected = selection(heads, chunks, k)
    chunk = 64 // chunks
    latents = torch.randn(11, chunks, chunk, rank).to(dtype)
    basis = (torch.randn(5, rank, heads, config.head_dim) / rank**0.5).to(dtype)
    states = torch.tensor([4, 0, 3])
    first, rotary = torch.tensor([0, 128, 64]), RotaryTables(config, 320)
    keys = LatentKeys(latents, DenseLatents(), basis, None, states, pages, first, rotary)
    out = gather_selected(keys, selected)
    assert out.shape == (3, heads, k * chunk, config.head_dim)
    assert out.dtype == dtype
    assert out.isfinite().all()
    wanted, exact, low = [], [], []
    for b in range(2):
        for h in range(heads):
            for i, number in enumerate(selected[b, h].tolist()):
                for t in range(chunk if number >= 0 else 0):
                    latent, own = latents[pages[b, number // chunks], number % chunks, t], basis[states[b], :, h]
                    position = int(first[b]) + number * chunk + t
                    wanted.append(out[b, h, i * chunk + t])
                    exact.append(rope(latent.double() @ own.double(), position, config))
                    low.append(rope(latent @ own, position, config).to(dtype))
    if dtype == torch.float32:
        assert_close(torch.stack(wanted), torch.stack(exact))
    else:
        assert_close_like_lowp(torch.stack(wanted), torch.stack(exact), torch.stack(low))


def low_rank_keys(rows: int, columns: int, decay: float) -> torch.Tensor:
    """Keys with singular values that fall by ``decay``, so that subspaces are well defined."""
    u = torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(columns, columns, dtype=torch.float64)).Q
    return (u * (100 * decay ** torch.arange(columns))) @ v.T


def basis_of(ops, keys, rank):
    """Basis, kept energy and largest latents of one matrix, which is found together with another."""
    found = ops.low_rank_basis(torch.stack((torch.randn_like(keys), keys)), rank)
    basis, variance, largest, total = (x[1] for x in found)
    assert variance.shape == largest.shape == (rank,)
    assert_close(total, keys.double().square().sum(1).mean())
    return basis, variance.sum() / total.clamp(min=1e-30), largest


@pytest.mark.parametrize(("rows", "columns", "rank"), [(300, 64, 8), (97, 96, 20), (64, 48, 48), (70, 64, 1)])
def test_low_rank_basis_spans_the_leading_right_singular_vectors(ops, seed, rows, columns, rank):
    keys = low_rank_keys(rows, columns, 0.9)
    basis, kept, _ = basis_of(ops, keys.float(), rank)
    _, values, vh = torch.linalg.svd(keys, full_matrices=False)
    assert basis.shape == (rank, columns)
    assert basis.dtype == kept.dtype == torch.float32
    assert kept.shape == ()
    assert_close(basis @ basis.T, torch.eye(rank, dtype=torch.float64), atol=1e-5)
    assert_close(basis.T @ basis, vh[:rank].T @ vh[:rank], atol=1e-3)
    assert_close(kept, (values[:rank] ** 2).sum() / (values**2).sum())


def test_low_rank_basis_has_the_strongest_direction_first(ops, seed):
    keys = low_rank_keys(200, 32, 0.7)
    basis, *_ = basis_of(ops, keys.float(), 6)
    vh = torch.linalg.svd(keys, full_matrices=False).Vh
    cosines = (basis.double() * vh[:6]).sum(-1).abs()
    assert (cosines > 0.999).all(), cosines


def test_full_rank_reconstructs_the_keys(ops, seed):
    keys = torch.randn(150, 64)
    basis, kept, _ = basis_of(ops, keys, 64)
    assert_close(keys @ basis.T @ basis, keys, atol=1e-4)
    assert kept == pytest.approx(1, abs=1e-6)


def test_keys_of_that_rank_are_kept_whole(ops, seed):
    keys = torch.randn(200, 5) @ torch.randn(5, 48)
    basis, kept, _ = basis_of(ops, keys, 5)
    assert_close(keys @ basis.T @ basis, keys, atol=1e-3)
    assert kept == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("rows", [1, 10])
def test_low_rank_basis_of_fewer_rows_than_the_rank_is_still_orthonormal(ops, seed, rows):
    keys = torch.randn(rows, 64)
    basis, kept, _ = basis_of(ops, keys, 16)
    assert_close(basis @ basis.T, torch.eye(16, dtype=torch.float64), atol=1e-5)
    assert_close(keys @ basis.T @ basis, keys, atol=1e-3)
    assert kept == pytest.approx(1, abs=1e-5)


def test_low_rank_basis_of_zero_keys_is_finite(ops):
    basis, kept, _ = basis_of(ops, torch.zeros(20, 16), 4)
    assert basis.isfinite().all()
    assert kept.isfinite()


def test_low_rank_basis_of_bfloat16_keys_is_computed_in_float32(ops, seed):
    keys = low_rank_keys(200, 32, 0.8).bfloat16()
    basis, kept, _ = basis_of(ops, keys, 8)
    same, same_kept, _ = basis_of(ops, keys.float(), 8)
    assert basis.dtype == kept.dtype == torch.float32
    assert_close(basis.T @ basis, same.T @ same, atol=1e-5)
    assert_close(kept, same_kept)


def test_low_rank_basis_adds_up_blocks_of_rows(seed, monkeypatch):
    keys = low_rank_keys(101, 24, 0.8).float()
    basis, kept, _ = basis_of(basis_reference, keys, 5)
    monkeypatch.setattr(basis_reference, "ROWS_AT_ONCE", 10)
    blocked, blocked_kept, _ = basis_of(basis_reference, keys, 5)
    assert_close(blocked.T @ blocked, basis.T @ basis, atol=1e-5)
    assert_close(blocked_kept, kept)
