"""Rows of the levels of a Gaussian: what each rule and width loses, and rows that are out of line."""

from copy import copy

import pytest
import torch
from coded_rows import back, gaussian_rows, losses, rotation_of

from shadowkv.baselines.polarquant import POLAR_INT4, renormalised
from shadowkv.kvcache.codecs import lloyd
from shadowkv.kvcache.codecs.lloyd import (
    LLOYD_ROWS,
    LloydRows,
    Rule,
    least_squares,
    norm,
    unbiased,
)
from shadowkv.kvcache.codecs.packing import Lanes
from shadowkv.kvcache.codecs.tables import GAUSSIAN
from shadowkv.ops.rotations import random_hadamard, random_rotation

WIDTHS = [(bits, dim) for bits in LLOYD_ROWS for dim in (64, 96, 128, 256) if not (bits == 3 and dim == 96)]


def with_rule(bits: int, rule: Rule) -> LloydRows:
    codec = copy(LLOYD_ROWS[bits])
    codec.rule = rule
    return codec


@pytest.mark.parametrize(
    ("bits", "rule", "distortion", "slope"),
    [
        (2, norm, 0.1161, 0.8851), (2, renormalised, 0.1189, 0.9405), (2, least_squares, 0.1153, 0.8847),
        (2, unbiased, 0.1307, 1.0), (3, norm, 0.0340, 0.9672), (3, renormalised, 0.0338, 0.9831),
        (3, least_squares, 0.0335, 0.9665), (3, unbiased, 0.0347, 1.0), (4, norm, 0.00934, 0.99125),
        (4, renormalised, 0.00919, 0.99540), (4, least_squares, 0.00917, 0.99083), (4, unbiased, 0.00926, 1.0),
    ],
)  # fmt: skip
def test_what_each_rule_loses(bits: int, rule: Rule, distortion: float, slope: float) -> None:
    found = losses(with_rule(bits, rule), gaussian_rows(10000, 128))
    assert found == (pytest.approx(distortion, rel=0.01), pytest.approx(slope, abs=0.002))


@pytest.mark.parametrize(("bits", "dim"), WIDTHS)
def test_widths_lose_what_their_levels_do(bits: int, dim: int) -> None:
    """For a unit row's coordinate, whose tails are shorter, a little less than for a Gaussian."""
    gaussian = {8: 0.0000411851, 4: 0.009501, 3: 0.034548, 2: 0.117482}[bits]
    codec, rows = LLOYD_ROWS[bits], gaussian_rows(5000, dim)
    of_values, _ = losses(codec.for_axis("values"), rows)
    assert (1 - 8 / dim) * gaussian < of_values < gaussian
    of_keys, slope = losses(codec.for_axis("keys"), rows)
    assert slope == pytest.approx(1, abs=1e-4)
    assert of_keys == pytest.approx(of_values / (1 - of_values), rel=0.01)


def test_the_axis_picks_the_rule() -> None:
    for codec in LLOYD_ROWS.values():
        assert codec.for_axis("keys").rule is unbiased
        assert codec.for_axis("values").rule is least_squares
        assert codec.rule is least_squares, "the codec itself changed"
        rows = gaussian_rows(9, 64)
        (codes, scale), (others, larger) = (codec.for_axis(axis).encode(rows, None) for axis in ("values", "keys"))
        assert torch.equal(codes, others) and (larger >= scale).all()
    assert POLAR_INT4.for_axis("keys") is POLAR_INT4


@pytest.mark.parametrize("codec", [*LLOYD_ROWS.values(), POLAR_INT4], ids=lambda codec: codec.name)
def test_rows_of_any_norm(codec: LloydRows) -> None:
    unit = torch.nn.functional.normalize(gaussian_rows(2000, 128), dim=-1)
    usual, _ = losses(codec, unit)
    large, _ = losses(codec, 1e4 * unit)
    small, _ = losses(codec, 1e-6 * unit)
    assert large == pytest.approx(usual, rel=0.01)
    # A step of the smallest floats of 16 bits is 0.06 of such norms: 0.06^2 / 12 of a row's square.
    assert small == pytest.approx(usual, rel=0.01, abs=4e-4 if codec.scale_dtype == torch.float16 else 0)


@pytest.mark.parametrize("codec", [*LLOYD_ROWS.values(), POLAR_INT4], ids=lambda codec: codec.name)
def test_zero_rows_and_rows_with_nan(codec: LloydRows) -> None:
    rows = gaussian_rows(4, 128)
    alone = back(codec, rows)
    rows[1], rows[2, 5] = 0, torch.nan
    for axis in ("keys", "values"):
        found = back(codec.for_axis(axis), rows)
        assert torch.equal(found[1], torch.zeros(128))
        assert found[2].isnan().all()
        assert found[[0, 3]].isfinite().all()
    torch.testing.assert_close(back(codec, rows)[[0, 3]], alone[[0, 3]])


def test_rows_keep_their_norms_when_they_are_renormalised_whatever_the_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gaussian_rows(10000, 128)
    assert losses(POLAR_INT4, rows) == (pytest.approx(0.00919, rel=0.01), pytest.approx(0.9954, abs=0.001))
    found = back(POLAR_INT4, rows)
    torch.testing.assert_close(found.norm(dim=-1), rows.norm(dim=-1), rtol=1e-5, atol=0)
    stored = rows.bfloat16()
    read = back(POLAR_INT4, stored).bfloat16().float()
    torch.testing.assert_close(
        read.norm(dim=-1), stored.float().norm(dim=-1), rtol=2**-8, atol=0
    )  # one step of bfloat16

    levels, boundaries = lloyd.codebook(GAUSSIAN[4], rows.device)
    monkeypatch.setattr(lloyd, "codebook", lambda half, device: (2 * levels, boundaries))
    monkeypatch.setattr(POLAR_INT4, "levels", tuple(2 * level for level in POLAR_INT4.levels))
    torch.testing.assert_close(back(POLAR_INT4, rows), found, rtol=1e-5, atol=1e-5)


def test_bytes_of_a_row() -> None:
    sizes = {bits: [codec.row_bytes(dim) + 2 for dim in (128, 64)] for bits, codec in LLOYD_ROWS.items()}
    assert sizes == {8: [130, 66], 4: [66, 34], 3: [50, 26], 2: [34, 18]}
    codes, scale = POLAR_INT4.encode(gaussian_rows(1, 128), None)
    assert codes.nbytes + scale.nbytes == 68


@pytest.mark.parametrize("rotation", [random_rotation, random_hadamard])
def test_rotations_are_orthogonal_and_equally_good(rotation) -> None:
    codec = LloydRows(1234, "turned", Lanes(4), rotation=rotation)
    for dim in (64, 128):
        matrix = codec.rotation_matrix(dim, "keys")
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-5, rtol=0)
        assert torch.equal(matrix, codec.rotation_matrix(dim, "keys"))
        assert not torch.equal(matrix, codec.rotation_matrix(dim, "values"))
    assert losses(codec, gaussian_rows(10000, 128))[0] == pytest.approx(0.00917, rel=0.01)
    assert losses(codec, torch.eye(128))[0] == pytest.approx(0.00917, rel=0.15), "rows of one entry are lost"


def test_widths_that_do_not_suit_are_refused() -> None:
    hadamard = LloydRows(1234, "turned", Lanes(4), rotation=random_hadamard)
    with pytest.raises(ValueError, match="turned rows need a power of two dimensions, not 96"):
        hadamard.encode(torch.zeros(1, 96), torch.eye(96))
    with pytest.raises(ValueError, match="lloyd-3bit rows need a multiple of 64 dimensions, not 96"):
        LLOYD_ROWS[3].encode(torch.zeros(1, 96), rotation_of(LLOYD_ROWS[3], 96))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_whole_and_lose_next_to_nothing_by_it(bits: int) -> None:
    codec, exact = LLOYD_ROWS[bits], LloydRows(1234, "exact", Lanes(4) if bits == 4 else LLOYD_ROWS[bits].packing)
    found = codec.whole_levels(128)
    assert found is not None and exact.whole_levels(128) is None
    multiples, step = torch.tensor(found[0]), found[1]
    assert (multiples % 2 == 1).all() and (multiples.abs() <= 255).all()
    torch.testing.assert_close(multiples * step, codec.code_levels(128, multiples.device))
    rows = gaussian_rows(10000, 128)
    (rounded, _), (wanted, _) = losses(codec, rows), losses(exact, rows)
    assert rounded < 1.005 * wanted


def test_kernels_that_multiply_integers_lose_next_to_nothing_of_levels_that_are_stored_as_they_were() -> None:
    found = POLAR_INT4.whole_levels(128)
    assert found is not None
    multiples, step = torch.tensor(found[0]), found[1]
    assert (multiples % 2 == 1).all() and (multiples.abs() <= 255).all() and torch.equal(multiples, -multiples.flip(0))
    near = copy(POLAR_INT4)
    near.levels = tuple((multiples * step * 128**0.5).tolist())
    rows = gaussian_rows(10000, 128)
    codes, scale = POLAR_INT4.encode(rows, None)
    exact, decoded = (codec.decode(codes, scale, None, 128) for codec in (POLAR_INT4, near))
    lost, wanted = ((rows - x).square().sum(-1).div(rows.square().sum(-1)).mean() for x in (decoded, exact))
    assert wanted < lost < 1.003 * wanted
    torch.testing.assert_close(decoded.norm(dim=-1), rows.norm(dim=-1), rtol=4e-3, atol=0)


def test_the_highest_of_four_bits_is_a_sign() -> None:
    levels = torch.tensor(LLOYD_ROWS[4].levels)
    assert (levels[:8] > 0).all() and torch.equal(levels[8:], -levels[:8])
    codes, scale = LLOYD_ROWS[4].encode(gaussian_rows(100, 128), None)
    flipped = LLOYD_ROWS[4].decode(codes ^ 0x88, scale, None, 128)
    assert torch.equal(flipped, -LLOYD_ROWS[4].decode(codes, scale, None, 128))
