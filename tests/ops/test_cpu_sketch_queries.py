"""Queries for a key sketch in C++ against the reference."""

import dataclasses

import pytest
import torch

from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sketch_queries import cpu, reference

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason="the C++ extension is not built")


@pytest.mark.parametrize(
    ("dim", "batch", "heads", "group"), [(64, 3, 2, 3), (8, 1, 1, 1), (96, 2, 3, 4), (256, 5, 1, 2)]
)
def test_queries_are_those_of_the_reference(seed, dim, batch, heads, group):
    """About a coordinate in a thousand may be off by one: products are added in another order."""
    maps = random_rotation(dim, "sketch") + 0.3 * torch.randn(4, heads, dim, dim) / dim**0.5
    args = torch.randn(batch, heads * group, dim), maps.bfloat16()[:, :heads], torch.randint(4, (batch,))
    made, expected = cpu.sketch_queries(*args), reference.sketch_queries(*args)
    for field in dataclasses.fields(reference.SketchQueries):
        own, other = getattr(made, field.name), getattr(expected, field.name)
        assert (own.dtype, own.shape) == (other.dtype, other.shape)
    difference = made.whole.int() - expected.whole.int()
    assert difference.abs().max() <= 1
    assert int((difference != 0).sum()) <= 2 + difference.numel() // 1000
    rows, rounder = torch.arange(8).view(8, 1), reference.in_sixteenths(made.whole.float()).int()
    planes = torch.stack([((rounder >> bit & 1) << rows).sum(-2) for bit in range(reference.PLANES)], dim=-2)
    assert torch.equal(made.planes.long(), planes)
    assert torch.equal(made.sum, made.whole.sum((-2, -1), dtype=torch.int32))
    assert torch.equal(made.plane_sum, rounder.sum((-2, -1), dtype=torch.int32))
    torch.testing.assert_close(made.unit, expected.unit, atol=0, rtol=1e-5)
    torch.testing.assert_close(made.length, expected.length, atol=0, rtol=1e-5)


def test_queries_of_nothing_and_of_what_is_not_finite():
    q = torch.zeros(1, 2, 64)
    q[0, 1, 3] = torch.nan
    made = cpu.sketch_queries(q, torch.eye(64).bfloat16().expand(1, 2, 64, 64), torch.zeros(1, dtype=torch.int64))
    assert made.unit[0, 0] == 0 and not made.whole[0, 0].any() and made.unit[0, 1].isnan()


def test_a_state_that_is_not_there_is_named():
    maps, states = torch.zeros(1, 1, 64, 64).bfloat16(), torch.ones(1, dtype=torch.int64)
    with pytest.raises(IndexError, match=r"state 1 is not in \[0, 1\)"):
        cpu.sketch_queries(torch.zeros(1, 1, 64), maps, states)
