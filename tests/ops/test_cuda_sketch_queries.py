"""Queries for a key sketch on a GPU against the reference, and the ops that an index calls after each other."""

import dataclasses

import pytest
import torch
from torch import Tensor

from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.select_by_sketch import cuda as selecting
from shadowkv.ops.sign_scores import cuda as scoring
from shadowkv.ops.sign_scores.reference import pack_sketch
from shadowkv.ops.sketch_queries import cuda, reference
from shadowkv.ops.sketch_queries.reference import SketchQueries

if cuda.missing() or scoring.missing() or selecting.missing():
    pytest.skip("needs a GPU and the CUDA ops (csrc/build_cuda.py)", allow_module_level=True)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory for the kernel's results holds values that tests would notice."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, 119, **options))


def maps_of(heads: int, dim: int, states: int = 3) -> Tensor:
    """Maps of every state and kv head, close to rotations, with gaps between states."""
    maps = (
        random_rotation(dim, "sketch").cuda() + 0.3 * torch.randn(states, 2, heads, dim, dim, device="cuda") / dim**0.5
    )
    return maps.bfloat16()[:, 1]


def whole_in(q: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and maps whose products need no rounding: whole numbers, the largest 127."""
    dim = q.shape[-1]
    q = torch.randint(-126, 127, q.shape, device="cuda").to(q.dtype)
    q[..., 3] = 127
    signs = 2.0 * torch.randint(0, 2, (3, heads, dim), device="cuda") - 1
    return q, torch.diag_embed(signs)[..., torch.randperm(dim, device="cuda")].bfloat16().contiguous()


def check(q: Tensor, heads: int) -> None:
    """Compares with the reference. About a coordinate in a thousand may be rounded differently."""
    states = torch.randint(0, 3, (len(q),), device="cuda")
    args = *whole_in(q, heads), states
    made, expected = cuda.sketch_queries(*args), reference.sketch_queries(*args)
    for name in ("whole", "planes", "sum", "plane_sum"):
        assert torch.equal(getattr(made, name), getattr(expected, name))
    torch.testing.assert_close(made.unit, expected.unit, atol=0, rtol=1e-6)
    torch.testing.assert_close(made.length, expected.length, atol=0, rtol=1e-6)

    args = q, maps_of(heads, q.shape[-1]), states
    made, expected = cuda.sketch_queries(*args), reference.sketch_queries(*args)
    for field in dataclasses.fields(SketchQueries):
        own, wanted = getattr(made, field.name), getattr(expected, field.name)
        assert (own.dtype, own.shape) == (wanted.dtype, wanted.shape)
    difference = made.whole.int() - expected.whole.int()
    assert difference.abs().max() <= 1
    assert int((difference != 0).sum()) <= 2 + difference.numel() // 1000
    assert torch.equal(made.sum, made.whole.sum((-2, -1), dtype=torch.int32))
    rows, rounder = torch.arange(8, device="cuda").view(8, 1), reference.in_sixteenths(made.whole.float()).int()
    planes = torch.stack([((rounder >> bit & 1) << rows).sum(-2) for bit in range(reference.PLANES)], dim=-2)
    assert torch.equal(made.planes.long(), planes)
    assert torch.equal(made.plane_sum, rounder.sum((-2, -1), dtype=torch.int32))
    torch.testing.assert_close(made.unit, expected.unit, atol=0, rtol=1e-5)


@pytest.mark.parametrize("dim", [8, 16, 64, 72, 80, 96, 112, 128, 200, 208, 256, 464, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_head_dim_and_dtype(seed, dim, dtype):
    check(torch.randn(5, 12, dim, device="cuda").to(dtype), heads=4)


@pytest.mark.parametrize(
    ("batch", "heads", "group"),
    [(1, 1, 1), (1, 1, 7), (1, 8, 4), (3, 5, 3), (65, 8, 4), (50, 4, 8), (3, 2, 5), (2, 3, 9), (3, 2, 12), (17, 4, 16)],
)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_any_number_of_queries(seed, batch, heads, group, dim):
    check(torch.randn(batch, heads * group, dim, device="cuda").bfloat16(), heads)


def two_states(batch: int) -> Tensor:
    return torch.arange(batch, device="cuda") % 2


def test_queries_with_gaps_between_them(seed):
    q, rest = torch.randn(6, 3, 4, 128, device="cuda")[:, 1], (maps_of(2, 128), two_states(6))
    made, expected = cuda.sketch_queries(q, *rest), cuda.sketch_queries(q.contiguous(), *rest)
    assert torch.equal(made.whole, expected.whole)
    assert torch.equal(made.unit, expected.unit)


@pytest.mark.parametrize(("heads", "dim"), [(4, 192), (34, 128)])
def test_other_head_dims_and_groups_are_refused(seed, heads, dim):
    args = torch.randn(2, heads, dim, device="cuda"), maps_of(2, dim), two_states(2)
    with pytest.raises(RuntimeError, match=r"34 query heads for 2 kv heads|rows of 24 bytes"):
        cuda.sketch_queries(*args)


@pytest.mark.parametrize("length", [1e-12, 1e-3, 1e4])
def test_whole_numbers_do_not_depend_on_the_length(seed, length):
    q, rest = torch.randn(4, 8, 128, device="cuda"), (maps_of(2, 128), two_states(4))
    made, expected = cuda.sketch_queries(length * q, *rest), reference.sketch_queries(q, *rest)
    assert (made.whole.int() - expected.whole.int()).abs().max() <= 1
    torch.testing.assert_close(made.unit, expected.unit, atol=0, rtol=1e-5)


def test_queries_of_zero_have_unit_zero(seed):
    made = cuda.sketch_queries(torch.zeros(2, 8, 128, device="cuda"), maps_of(2, 128), two_states(2))
    assert not made.whole.any() and not made.planes.any() and not made.unit.any() and not made.sum.any()


def test_ops_that_begin_early_see_what_the_one_before_wrote(seed, monkeypatch):
    """Each of many layers in a captured graph, whose launches overlap, against the same calls one at a time."""
    monkeypatch.undo()  # filled outputs would come between the launches
    layers, heads, pages, k = 12, 8, 96, 64
    maps, states = maps_of(heads, 128), torch.tensor([2, 0, 1, 0], device="cuda")
    signs, rest, scale = pack_sketch(torch.randn(4 * pages, heads, 64, 128, device="cuda"))
    page_ids = torch.randperm(4 * pages, device="cuda").view(4, pages)
    q = torch.randn(layers, 4, 4 * heads, 128, device="cuda").bfloat16()
    counts, budget = torch.tensor([pages, 1, 0, 50]).cuda(), torch.tensor([k, 3, k, 40]).cuda()

    def search(layer: int, pause: bool) -> Tensor:
        queries = cuda.sketch_queries(q[layer], maps, states)
        if pause:
            torch.cuda.synchronize()
        coarse = scoring.sign_scores(queries, signs, scale, page_ids, counts)
        if pause:
            torch.cuda.synchronize()
        sampling = Sampling(budget, counts)
        return selecting.select_by_sketch(
            queries, coarse, signs, rest, scale, page_ids, counts, budget, 1, 2 * k, sampling, layer
        )[0]

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
    with pytest.raises(RuntimeError, match="maps has dtype"):
        cuda.sketch_queries(torch.randn(1, 8, 64, device="cuda"), maps_of(2, 64).double(), two_states(1))
