"""``tq3_0`` against bytes of its C reference, and what it promises."""

import math

import pytest
import torch
from coded_rows import back, gaussian_rows, losses, rotation_of

from shadowkv.baselines.tq3_0 import BLOCK, LEVELS, SIGNS, TQ3Rows
from shadowkv.ops.rotations import walsh_hadamard

CODEC = TQ3Rows()


def linear_congruential() -> list[float]:
    state, found = 1, []
    for _ in range(BLOCK):
        state = (1664525 * state + 1013904223) % 2**32
        found.append((state >> 16) / 32768 - 1)
    return found


VECTORS = {
    "zeros": ([0.0] * 32, "0000000000000000ffffffff0000", 0.0),
    "spike": ([1.0] + [0.0] * 31, "ffffffffffffffffffffffff3f2d", 0.0819702148),
    "ramp": ([j - 15.5 for j in range(32)], "73b7748127788488026d2c55c148", 9.5078125),
    "squares": ([(7 * j * j + 3 * j) % 17 - 8.0 for j in range(32)], "455a90bd5c49103ec506cd8ba346", 6.63671875),
    "random": (linear_congruential(), "5e0b972422c2aa96c5bc024b7238", 0.555664062),
}


def encoded(rows: torch.Tensor) -> torch.Tensor:
    return CODEC.encode(rows, rotation_of(CODEC, rows.shape[-1]))[0]


@pytest.mark.parametrize("name", VECTORS)
def test_bytes_are_those_of_the_c_reference(name: str) -> None:
    values, stored, gamma = VECTORS[name]
    (codes,) = encoded(torch.tensor([values]))
    assert bytes(codes.tolist()).hex() == stored
    # As the format is described, entry by entry.
    index = [(codes[j // 4] >> 2 * (j % 4) & 3) + 4 * (codes[8 + j // 8] >> j % 8 & 1) for j in range(32)]
    levels = torch.tensor([gamma * LEVELS[i] for i in index], dtype=torch.float64)
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)]).double()
    expected = torch.tensor(SIGNS).double() * (hadamard @ levels) / 32**0.5
    empty = torch.empty(1, 0)
    rotated_back, still_rotated = (
        CODEC.decode(codes[None], empty, x, 32)[0].double() for x in (rotation_of(CODEC, 32), None)
    )
    torch.testing.assert_close(rotated_back, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(still_rotated, levels)


def test_kernels_that_multiply_integers_lose_next_to_nothing() -> None:
    multiples, step = CODEC.whole_levels(128)
    assert max(multiples) <= 127 and multiples == tuple(-x for x in multiples[::-1])
    rows = gaussian_rows(10000, 128)
    codes, scale = CODEC.encode(rows, None)
    exact = CODEC.decode(codes, scale, None, 128)
    nearest = (exact.unsqueeze(-1) / gammas(codes) - torch.tensor(LEVELS)).abs().argmin(-1)
    decoded = torch.tensor(multiples)[nearest] * step * gammas(codes).squeeze(-1)
    lost, wanted = ((rows - x).square().sum(-1).div(rows.square().sum(-1)).mean() for x in (decoded, exact))
    assert abs(lost / wanted - 1) < 0.001


def gammas(codes: torch.Tensor) -> torch.Tensor:
    """Scales of blocks [n, dim, 1] of rows in bytes."""
    stored = codes.unflatten(-1, (-1, 14))[..., 12:].contiguous().view(torch.float16).float()
    return stored.repeat_interleave(32, dim=-2).flatten(-2).unsqueeze(-1)


def test_blocks_of_a_row_are_alike_and_apart() -> None:
    row = torch.tensor([VECTORS[name][0] for name in ("ramp", "zeros", "squares", "random")]).flatten()
    assert bytes(encoded(row[None])[0].tolist()).hex() == "".join(
        VECTORS[name][1] for name in ("ramp", "zeros", "squares", "random")
    )


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_what_is_lost(dim: int) -> None:
    rows = gaussian_rows(2**18 // dim, dim)
    distortion, slope = losses(CODEC, rows)
    assert distortion == pytest.approx(0.0316, abs=4e-4)
    assert slope == pytest.approx(0.9950, abs=0.002)
    if dim == 128:
        cosine = torch.cosine_similarity(rows, back(CODEC, rows), dim=-1).mean().item()
        assert cosine == pytest.approx(0.98499, abs=5e-4)


def test_a_spike_is_not_worse() -> None:
    rows = gaussian_rows(4000, 32)
    rows[torch.arange(4000), torch.arange(4000) % 32] = 30.0
    assert losses(CODEC, rows)[0] <= 0.022


def test_products_with_turned_queries_are_those_with_decoded_rows() -> None:
    rows, queries = gaussian_rows(50, 64), gaussian_rows(50, 64, seed=1)
    codes = encoded(rows)
    wanted = (queries * back(CODEC, rows)).sum(-1)
    levels = CODEC.decode(codes, torch.empty(50, 0), None, 64)
    by_matrix = (queries @ rotation_of(CODEC, 64) * levels).sum(-1)
    torch.testing.assert_close(by_matrix, wanted, atol=1e-5, rtol=1e-5)
    unscaled = walsh_hadamard(queries.unflatten(-1, (-1, 32)) * torch.tensor(SIGNS)).flatten(-2)
    products = (unscaled * levels).sum(-1)
    torch.testing.assert_close(products / math.sqrt(32), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(products / 32, wanted, atol=1e-5, rtol=1e-5)


def test_nan_makes_a_block_zero_and_no_other() -> None:
    rows = gaussian_rows(3, 64)
    alone = encoded(rows)
    rows[1, 40] = torch.nan
    codes = encoded(rows)
    assert bytes(codes[1, 14:].tolist()).hex() == "ff" * 12 + "0000"
    codes[1, 14:] = alone[1, 14:]
    assert torch.equal(codes, alone)
    rows[1, 40] = torch.inf
    assert bytes(encoded(rows)[1, 14:].tolist()).hex() == "ff" * 12 + "007c"


def test_small_and_large_rows() -> None:
    rows = gaussian_rows(500, 128)
    usual, _ = losses(CODEC, rows)
    assert losses(CODEC, rows * 1e3)[0] == pytest.approx(usual, rel=0.01)
    assert losses(CODEC, rows * 1e-3)[0] == pytest.approx(usual, rel=0.01)
    assert torch.equal(back(CODEC, torch.zeros(1, 64)), torch.zeros(1, 64))
    with pytest.raises(ValueError, match="tq3_0 rows need a multiple of 32 dimensions, not 80"):
        CODEC.encode(torch.zeros(1, 80), None)
