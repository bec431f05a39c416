"""Sign scores on a GPU against the reference there."""

import math

import pytest
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.ops.sign_scores import cuda, reference
from shadowkv.ops.sketch_queries.reference import SketchQueries, plane_bytes, sketch_queries

if cuda.missing():
    pytest.skip("needs a GPU and the CUDA ops (csrc/build_cuda.py)", allow_module_level=True)


Arguments = tuple[SketchQueries, Tensor, Tensor, Tensor, Tensor]


def queries_of(q: Tensor) -> SketchQueries:
    states = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    return sketch_queries(q, torch.eye(q.shape[-1], device=q.device)[None, None], states)


def problem(counts: list[int], heads: int, group: int, dim: int, columns: int) -> Arguments:
    """Arguments with shuffled pages of an arena whose other bytes are all 255. ``counts`` are the rows' valid pages."""
    device = torch.device("cuda")
    fields = [
        Field("other", (100,), torch.uint8),
        Field("signs", (heads, 64, plane_bytes(dim)), torch.uint8),
        Field("scale", (heads, 64), torch.uint8),
    ]
    size = -(-sum(field.nbytes for field in fields) // 256) * 256 + 512
    tier = Tier("device", 1, size, sum(counts) + 2, device)
    tier.arena.fill_(255)
    views = {name: layers[0] for name, layers in tier.views(fields).items()}
    page_ids = torch.tensor(tier.allocate(sum(counts)), dtype=torch.int64)[torch.randperm(sum(counts))]
    pages = torch.full((len(counts), columns), tier.spare, dtype=torch.int64)
    for row, count in enumerate(counts):
        pages[row, :count], page_ids = page_ids[:count], page_ids[count:]
    pages = pages.cuda()
    for row, count in enumerate(counts):
        own = pages[row, :count]
        keys = torch.randn(count, heads, 64, dim, device=device)
        views["signs"][own], _, views["scale"][own] = reference.pack_sketch(keys)
    queries = queries_of(torch.randn(len(counts), heads * group, dim, device=device))
    return queries, views["signs"], views["scale"], pages, torch.tensor(counts).cuda()


def check(args: Arguments) -> None:
    """Compares with the reference up to the last bit of float16."""
    scores, expected = cuda.sign_scores(*args), reference.sign_scores(*args)
    assert scores.dtype == torch.float16 and scores.shape == expected.shape
    torch.testing.assert_close(scores, expected, atol=0, rtol=2**-10)
    assert (scores != expected).float().mean() < 0.002


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory for the kernel's results holds NaN, or -1 for whole numbers."""

    def filled(*size, **options):
        return torch.full(size, math.nan if options["dtype"].is_floating_point else -1, **options)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
def test_ragged_rows_score_like_the_reference(seed, group, dim):
    check(problem([7, 1, 0, 5, int(torch.randint(2, 7, ()))], 2, group, dim, columns=7))


@pytest.mark.parametrize("heads", [1, 3, 8, 10])
@pytest.mark.parametrize("columns", [1, 2, 65])
def test_any_number_of_heads_and_pages(seed, heads, columns):
    check(problem([columns], heads, 3, 128, columns))


@pytest.mark.parametrize("dim", [8, 16, 72, 80, 112, 208, 464])
def test_head_dims_with_padded_planes(seed, dim):
    check(problem([4, 2], 2, 4, dim, columns=4))


@pytest.mark.parametrize(("group", "dim"), [(17, 64), (2, 192)])
def test_other_shapes_are_refused(seed, group, dim):
    with pytest.raises(RuntimeError, match=r"34 query heads for 2 kv heads|rows of 24 bytes"):
        cuda.sign_scores(*problem([4, 2], 2, group, dim, columns=4))


def test_long_runs_of_many_rows(seed):
    check(problem(torch.randint(0, 161, (40,)).tolist(), 8, 4, 128, columns=160))


def test_more_rows_than_blocks_have_lanes_with_most_of_them_empty(seed):
    counts = torch.zeros(300, dtype=torch.int64)
    counts[[7, 150, 151, 297]] = torch.tensor([9, 1, 700, 4])
    check(problem(counts.tolist(), 2, 4, 128, columns=700))


def test_no_row_has_pages(seed):
    args = problem([0, 0], 2, 4, 128, columns=9)
    assert (cuda.sign_scores(*args) == -math.inf).all()


def test_queries_of_zero_score_zero(seed):
    args = problem([5, 2], 2, 4, 128, columns=5)
    zeros = queries_of(torch.zeros(2, 8, 128, device="cuda"))
    assert torch.equal(cuda.sign_scores(zeros, *args[1:]), reference.sign_scores(zeros, *args[1:]))


def test_scores_beyond_float16_are_its_largest(seed):
    queries, signs, scale, pages, counts = problem([5, 2], 2, 4, 128, columns=5)
    scale[pages[0, :5]] = 247
    torch.cuda.synchronize()
    scores = cuda.sign_scores(queries, signs, scale, pages, counts)
    assert scores.isfinite().sum() == 2 * 8 * 7
    assert scores.max() == torch.finfo(torch.float16).max


def test_a_captured_call_follows_its_inputs(seed):
    args = problem([5, 3, 2], 2, 4, 128, columns=6)
    cuda.sign_scores(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [cuda.sign_scores(*args) for _ in range(3)]
    for _ in range(10):
        args[0].unit.uniform_()
        args[4].copy_(torch.tensor([2, 3, 0]))
        graph.replay()
        for scores in captured:
            assert torch.equal(scores, cuda.sign_scores(*args))


def test_wrong_arguments_are_named(seed):
    args = list(problem([2], 2, 4, 128, columns=2))
    args[4] = args[4].int()
    with pytest.raises(RuntimeError, match="num_pages has dtype"):
        cuda.sign_scores(*args)


def test_more_sequences_than_a_grid_has_rows_are_named(seed):
    queries, signs, scale, pages, num_pages = problem([1], 1, 1, 64, 1)
    many = SketchQueries(**{name: x.expand(1 << 16, *x.shape[1:]).contiguous() for name, x in vars(queries).items()})
    with pytest.raises(RuntimeError, match="65536 sequences are more than 65535"):
        cuda.sign_scores(many, signs, scale, pages.expand(1 << 16, -1).contiguous(), num_pages.repeat(1 << 16))
