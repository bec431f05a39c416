"""Queries of a key sketch on a GPU against the reference there, and the ops that follow each other as an index does."""

import dataclasses

import pytest
import torch
from torch import Tensor

from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.select_by_sketch import cuda as selecting
from shadowkv.ops.sign_scores import cuda as scoring
from shadowkv.ops.sign_scores.reference import pack_sketch
from shadowkv.ops.sketch_queries import cuda, reference
from shadowkv.ops.sketch_queries.reference import SketchQueries

pytestmark = pytest.mark.skipif(
    not (cuda.available() and scoring.available() and selecting.available()),
    reason="needs a GPU and the CUDA ops (csrc/build_cuda.py)",
)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory that the kernel is given to write to holds what would be seen."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, 119, **options))


def whole_in(q: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and a rotation that leave nothing to round: whole numbers with a largest one of 127."""
    dim = q.shape[-1]
    q = torch.randint(-126, 127, q.shape, device="cuda").to(q.dtype)
    q[..., 3] = 127
    signs = 2.0 * torch.randint(0, 2, (dim,), device="cuda") - 1
    return q, torch.diag(signs)[torch.randperm(dim, device="cuda")].contiguous()


def check(q: Tensor) -> None:
    """Exact where there is nothing to round; otherwise about a coordinate in a thousand may be off by one."""
    args = whole_in(q)
    made, expected = cuda.sketch_queries(*args), reference.sketch_queries(*args)
    assert torch.equal(made.whole, expected.whole)
    assert torch.equal(made.planes, expected.planes)
    assert torch.equal(made.sum, expected.sum)
    torch.testing.assert_close(made.unit, expected.unit, atol=0, rtol=1e-6)

    rotation = random_rotation(q.shape[-1], "sketch").cuda()
    made, expected = cuda.sketch_queries(q, rotation), reference.sketch_queries(q, rotation)
    for field in dataclasses.fields(SketchQueries):
        own, wanted = getattr(made, field.name), getattr(expected, field.name)
        assert (own.dtype, own.shape) == (wanted.dtype, wanted.shape)
    difference = made.whole.int() - expected.whole.int()
    assert difference.abs().max() <= 1
    assert int((difference != 0).sum()) <= 2 + difference.numel() // 1000
    assert torch.equal(made.sum, made.whole.sum((-2, -1), dtype=torch.int32))
    rows = torch.arange(8, device="cuda").view(8, 1)
    planes = torch.stack([((made.whole.int() >> bit & 1) << rows).sum(-2) for bit in range(8)], dim=-2)
    assert torch.equal(made.planes.long(), planes)
    torch.testing.assert_close(made.unit, expected.unit, atol=0, rtol=1e-5)


@pytest.mark.parametrize("dim", [8, 16, 64, 72, 80, 96, 112, 128, 200, 208, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_head_dim_and_dtype(seed, dim, dtype):
    check(torch.randn(5, 12, dim, device="cuda").to(dtype))


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 7), (1, 32), (3, 5), (65, 32), (500, 28)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_any_number_of_queries(seed, batch, heads, dim):
    check(torch.randn(batch, heads, dim, device="cuda").bfloat16())


def test_queries_with_gaps_between_them(seed):
    q, rotation = torch.randn(6, 3, 4, 128, device="cuda")[:, 1], random_rotation(128, "sketch").cuda()
    made, expected = cuda.sketch_queries(q, rotation), cuda.sketch_queries(q.contiguous(), rotation)
    assert torch.equal(made.whole, expected.whole)
    assert torch.equal(made.unit, expected.unit)


def test_head_dims_that_are_left_to_the_reference(seed):
    q, rotation = torch.randn(2, 4, 192, device="cuda"), random_rotation(192, "sketch").cuda()
    assert torch.equal(cuda.sketch_queries(q, rotation).planes, reference.sketch_queries(q, rotation).planes)


@pytest.mark.parametrize("length", [1e-12, 1e-3, 1e4])
def test_whole_numbers_do_not_depend_on_the_length(seed, length):
    q, rotation = torch.randn(4, 8, 128, device="cuda"), random_rotation(128, "sketch").cuda()
    made, expected = cuda.sketch_queries(length * q, rotation), reference.sketch_queries(q, rotation)
    assert (made.whole.int() - expected.whole.int()).abs().max() <= 1
    torch.testing.assert_close(made.unit, expected.unit, atol=0, rtol=1e-5)


def test_queries_of_zero_have_unit_zero(seed):
    made = cuda.sketch_queries(torch.zeros(2, 8, 128, device="cuda"), random_rotation(128, "sketch").cuda())
    assert not made.whole.any() and not made.planes.any() and not made.unit.any() and not made.sum.any()


def test_ops_that_begin_early_see_what_the_one_before_wrote(seed, monkeypatch):
    """Each of many layers in a captured graph, whose launches overlap, against the same calls one at a time."""
    monkeypatch.undo()  # filled outputs would come between the launches
    layers, heads, pages, k = 12, 8, 96, 64
    rotation = random_rotation(128, "sketch").cuda()
    signs, rest, scale = pack_sketch(torch.randn(4 * pages, heads, 64, 128, device="cuda"), rotation)
    excluded = torch.zeros(4 * pages, heads, 64, dtype=torch.bool, device="cuda")
    names = torch.randperm(4 * pages, device="cuda").view(4, pages)
    q = torch.randn(layers, 4, 4 * heads, 128, device="cuda").bfloat16()
    counts, budget = torch.tensor([pages, 1, 0, 50]).cuda(), torch.tensor([k, 3, k, 40]).cuda()

    def search(layer: int, pause: bool) -> Tensor:
        queries = cuda.sketch_queries(q[layer], rotation)
        if pause:
            torch.cuda.synchronize()
        coarse = scoring.sign_scores(queries, signs, scale, names, counts)
        if pause:
            torch.cuda.synchronize()
        return selecting.select_by_sketch(queries, coarse, signs, rest, scale, excluded, names, counts, budget, k)

    search(0, pause=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [search(layer, pause=False) for layer in range(layers)]
    for _ in range(20):
        q.normal_()
        graph.replay()
        for layer in range(layers):
            assert torch.equal(captured[layer], search(layer, pause=True))


def test_wrong_arguments_are_named(seed):
    with pytest.raises(RuntimeError, match="rotation has dtype"):
        cuda.sketch_queries(torch.randn(1, 8, 64, device="cuda"), random_rotation(64, "sketch").cuda().double())
