"""Levels against a solver of their own, and the bytes of packings."""

import math

import numpy as np
import pytest
import torch

from shadowkv.baselines.polarquant import Halves
from shadowkv.baselines.qjl import SPHERE, BigEndian
from shadowkv.kvcache.codecs.packing import Lanes, Packing, SelectorLanes
from shadowkv.kvcache.codecs.tables import GAUSSIAN, codebook, nearest

NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)
PACKINGS = [Lanes(8), Lanes(4), Lanes(2, 1), SelectorLanes(), Lanes(2), Halves(), *map(BigEndian, (1, 2, 3, 4))]


def gaussian(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2)


def sphere(dim: int):
    """Density of a coordinate of a random unit row times sqrt(dim), up to a factor."""
    return lambda x: np.clip(1 - x * x / dim, 0, 1) ** ((dim - 3) / 2)


def moments(density, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masses and first moments between the ends ``a`` and ``b``."""
    x = (a + b)[:, None] / 2 + (b - a)[:, None] / 2 * NODES
    weight = (b - a)[:, None] / 2 * WEIGHTS * density(x)
    return weight.sum(1), (weight * x).sum(1)


def solve(start: tuple[float, ...], density, end: float) -> np.ndarray:
    """Positive levels that are the means of their bins, bounded by midpoints: Newton's method."""
    levels, count = np.array(start), len(start)
    for _ in range(20):
        edges = np.concatenate(([0.0], (levels[1:] + levels[:-1]) / 2, [end]))
        mass, first = moments(density, edges[:-1], edges[1:])
        means = first / mass
        slope = np.zeros((count, count))  # of means by levels: each bound is half of either neighbour
        for i in range(count):
            for edge, sign, other in ((edges[i + 1], 1, i + 1), (edges[i], -1, i - 1)):
                if 0 <= other < count:
                    by_edge = sign * density(np.array(edge)) * (edge - means[i]) / mass[i]
                    slope[i, i] += by_edge / 2
                    slope[i, other] += by_edge / 2
        step = np.linalg.solve(np.eye(count) - slope, means - levels)
        levels = levels + step
        if np.abs(step).max() < 1e-12:
            return levels
    raise AssertionError("no solution")


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_levels_of_a_gaussian_are_optimal(bits: int) -> None:
    assert len(GAUSSIAN[bits]) == 2 ** (bits - 1)
    found = solve(GAUSSIAN[bits], gaussian, 12.0)
    np.testing.assert_allclose(GAUSSIAN[bits], found, atol=2e-6, rtol=0)
    edges = np.concatenate(([0.0], (found[1:] + found[:-1]) / 2, [12.0]))
    mass, first = moments(gaussian, edges[:-1], edges[1:])
    distortion = 1 - (first**2 / mass).sum() / mass.sum()
    wanted = {
        1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501, 5: 0.002505, 6: 0.000644240, 7: 0.000163478, 8: 0.0000411851
    }  # fmt: skip
    assert distortion == pytest.approx(wanted[bits], rel=2e-4)
    assert distortion * 4**bits < math.sqrt(3) * math.pi / 2  # the limit at many bits


@pytest.mark.parametrize(("dim", "bits"), SPHERE)
def test_levels_of_a_unit_row_are_optimal(dim: int, bits: int) -> None:
    assert len(SPHERE[dim, bits]) == 2 ** (bits - 1)
    np.testing.assert_allclose(SPHERE[dim, bits], solve(SPHERE[dim, bits], sphere(dim), dim**0.5), atol=2e-6, rtol=0)


def test_entries_go_to_the_nearest_level_and_nan_to_the_last() -> None:
    levels, boundaries = codebook(GAUSSIAN[3], torch.device("cpu"))
    x = torch.randn(1000)
    assert torch.equal(nearest(x, boundaries).long(), (x[:, None] - levels).abs().argmin(1))
    edges = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    assert nearest(edges, boundaries).tolist() == [7, 7, 0, 4, 4]


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda one: f"{type(one).__name__}-{one.bits}")
def test_what_is_packed_comes_back(packing: Packing) -> None:
    for dim in (64, 96, 128, 256):
        if dim % packing.row_multiple:
            continue
        codes = torch.randint(2**packing.bits, (5, 3, dim), dtype=torch.uint8)
        codes[0, 0] = torch.arange(dim) % 2**packing.bits
        packed = packing.pack(codes)
        assert packed.dtype == torch.uint8 and packed.shape == (5, 3, packing.row_bytes(dim))
        assert torch.equal(packing.unpack(packed, dim), codes)
        every = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, packing.row_bytes(dim))
        assert torch.equal(packing.pack(packing.unpack(every, dim)), every)


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (4, range(16), "0123456789abcdef"),
        (3, range(8), "053977"),
        (3, (7, 0, 5, 2, 6, 1, 4, 3), "e2ac63"),
        (2, (0, 1, 2, 3, 3, 2, 1, 0), "1be4"),
        (1, (1, 0, 0, 0, 0, 0, 1, 1), "83"),
    ],
)
def test_bytes_of_turboquant(bits: int, codes: tuple[int, ...], packed: str) -> None:
    assert bytes(BigEndian(bits).pack(torch.tensor(codes, dtype=torch.uint8)).tolist()).hex() == packed


@pytest.mark.parametrize(("ours", "bits"), [(Lanes(4), 4), (Lanes(2, 1), 3), (SelectorLanes(), 3), (Lanes(2), 2)])
def test_packings_convert_into_each_other(ours: Lanes, bits: int) -> None:
    codes = torch.randint(2**bits, (7, 128), dtype=torch.uint8)
    theirs = BigEndian(bits).pack(ours.unpack(ours.pack(codes), 128))
    assert torch.equal(theirs, BigEndian(bits).pack(codes))
    assert torch.equal(ours.pack(BigEndian(bits).unpack(theirs, 128)), ours.pack(codes))


def test_halves_of_a_row_never_interleave() -> None:
    codes = torch.arange(128, dtype=torch.uint8) % 16
    packed = Halves().pack(codes)
    assert torch.equal(packed.int(), codes[:64].int() + 16 * codes[64:].int())


def test_upper_bits_where_selectors_take_them() -> None:
    """Code number 8 h + 2 k + r of a lane has its upper bit at 4 k + 2 h + r."""
    for h, k, r in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(2)).tolist():
        codes, bit = torch.zeros(128, dtype=torch.uint8), 4 * k + 2 * h + r
        codes[8 * (8 * h + 2 * k + r) + 5] = 4  # of lane 5
        row = SelectorLanes().pack(codes)
        assert row.nonzero().tolist() == [[32 + 2 * 5 + bit // 8]] and row.max() == 2 ** (bit % 8)
