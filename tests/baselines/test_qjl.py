"""TQ35 and TQ25: sizes and losses, with the package's factor of signs too; and QJL alone."""

import math

import pytest
import torch
from coded_rows import back, gaussian_rows, losses

from shadowkv.baselines import qjl
from shadowkv.baselines.qjl import HYBRID_ROWS
from shadowkv.ops.rotations import random_hadamard, random_rotation

CODECS = {codec.name: codec for codec in HYBRID_ROWS}


@pytest.mark.parametrize("rotation", [random_rotation, random_hadamard])
def test_signs_are_right_on_average_and_lose_half_of_pi_less_one(rotation) -> None:
    rest, matrix = gaussian_rows(5000, 128), rotation(128, "signs")
    norms = rest.norm(dim=-1, keepdim=True)
    found = qjl.estimate(qjl.signs_of(rest, matrix), norms, matrix)
    squares = rest.square().sum(-1)
    assert ((rest - found).square().sum(-1) / squares).mean().item() == pytest.approx(math.pi / 2 - 1, abs=0.01)
    assert ((rest * found).sum(-1) / squares).mean().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("name", "dim", "sizes", "of_groups"),
    [
        ("tq35", 128, [64, 64], [24 + 8 + 4, 16 + 8 + 4]), ("tq25", 128, [32, 96], [8 + 4 + 4, 12 + 12 + 4]),
        ("tq35", 64, [32, 32], [20, 16]), ("tq25", 64, [16, 48], [10, 16]),
    ],
)  # fmt: skip
def test_bytes_of_groups(name: str, dim: int, sizes: list[int], of_groups: list[int]) -> None:
    codec, rows = CODECS[name], gaussian_rows(3, dim)
    codes, scale = codec.encode(rows, None)
    assert codes.shape == (3, sum(of_groups)) and codec.row_bytes(dim) == sum(of_groups)
    assert scale.shape == (3, 0)
    for group, part in zip(rows.split(sizes, dim=-1), codes.split(of_groups, dim=-1), strict=True):
        norm, rest = part[:, -4:].contiguous().view(torch.float16).float().unbind(-1)
        torch.testing.assert_close(norm, group.norm(dim=-1), rtol=1e-3, atol=0)
        assert (rest > 0.1).all() and (rest < 0.9).all()
    # The first group is coded by itself.
    changed = rows.clone()
    changed[:, sizes[0] :] += 1
    assert torch.equal(codec.encode(changed, None)[0][:, : of_groups[0]], codes[:, : of_groups[0]])


@pytest.mark.parametrize(
    ("name", "of_package", "distortion", "slope"),
    [
        ("tq35", False, 0.0416, 1.000), ("tq35", True, 0.0571, 0.936), ("tq25", False, 0.143, 0.891),
        ("tq25", True, 0.285, 0.610),
    ],
)  # fmt: skip
def test_what_is_lost(
    name: str, of_package: bool, distortion: float, slope: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_package:
        monkeypatch.setattr(qjl, "kappa", lambda dim: math.sqrt(math.pi / 2) / dim)
    found = losses(CODECS[name], gaussian_rows(3000, 128))
    assert found == (pytest.approx(distortion, rel=0.03), pytest.approx(slope, abs=0.003))


@pytest.mark.parametrize("name", CODECS)
def test_rows_that_are_out_of_line(name: str) -> None:
    codec, rows = CODECS[name], gaussian_rows(1000, 128)
    usual, _ = losses(codec, rows)
    assert losses(codec, rows * 1e3)[0] == pytest.approx(usual, rel=0.01)
    rows[0], rows[1, 3] = 0, torch.nan
    found = back(codec, rows)
    assert torch.equal(found[0], torch.zeros(128))
    assert found[1].isnan().any() and found[2:].isfinite().all()
    assert losses(codec, gaussian_rows(1000, 256))[0] == pytest.approx(usual, rel=0.05)
    with pytest.raises(ValueError, match=f"{name} rows need one of 64, 128, 256 dimensions, not 96"):
        codec.encode(torch.zeros(1, 96), None)
