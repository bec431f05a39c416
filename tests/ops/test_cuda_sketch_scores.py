"""Sketch scores on a GPU against the reference there: the same rotated queries, so the same whole numbers."""

import math

import pytest
import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sketch_scores import cuda, reference

pytestmark = pytest.mark.skipif(not cuda.available(), reason="needs a GPU and the CUDA ops (csrc/build_cuda.py)")


def problem(
    counts: list[int], heads: int, group: int, dim: int, chunk: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Arguments: shuffled pages of an arena whose other bytes are all NaN, counts as valid chunks of each row."""
    chunks, device = 64 // chunk, torch.device("cuda")
    matrix = random_rotation(dim, "sketch").to(device)
    fields = [
        Field("other", (100,), torch.uint8),
        Field("codes", (heads, chunks, chunk, reference.code_bytes(dim)), torch.uint8),
        Field("excluded", (heads, chunks), torch.bool),
        Field("scale", (heads, 64), torch.float16),
    ]
    used = [-(-count // chunks) for count in counts]
    size = -(-sum(field.nbytes for field in fields) // 256) * 256 + 512
    tier = Tier("device", 1, size, sum(used) + 2, device)
    tier.arena.fill_(255)
    views = {name: layers[0] for name, layers in tier.views(fields).items()}
    names = torch.tensor(tier.allocate(sum(used)), dtype=torch.int64)[torch.randperm(sum(used))]
    pages = torch.full((len(counts), columns), tier.spare, dtype=torch.int64)
    for row, count in enumerate(used):
        pages[row, :count], names = names[:count], names[count:]
    pages = pages.cuda()
    for row, count in enumerate(counts):
        own = pages[row, : used[row]]
        codes, scale = reference.pack_sketch(torch.randn(len(own), heads, 64, dim, device=device), matrix)
        beyond = torch.arange(64 * len(own), device=device).view(-1, 1, 64) >= count * chunk
        scale = scale.masked_fill(beyond, math.nan)
        views["codes"][own] = codes.unflatten(2, (chunks, chunk))
        excluded = torch.rand(len(own), heads, chunks, device=device) < 0.2
        views["excluded"][own] = excluded
        views["scale"][own] = scale.masked_fill(excluded.repeat_interleave(chunk, -1), math.nan)
    q = (2 * torch.randn(len(counts), heads * group, dim, device=device)).to(dtype)
    return q, views["codes"], views["scale"], views["excluded"], pages, torch.tensor(counts).cuda(), matrix


def check(args: tuple[Tensor, ...]) -> None:
    logits, lse = cuda.sketch_scores(*args)
    exact, total = reference.sketch_scores(*args)
    assert logits.shape == exact.shape
    torch.testing.assert_close(logits, exact, atol=5e-5, rtol=1e-5)
    assert lse.shape[:3] == total.shape[:3]
    torch.testing.assert_close(lse.logsumexp(-1, keepdim=True), total, atol=5e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory that the kernel is given to write to is NaN."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, math.nan, **options))


@pytest.mark.parametrize("group", [1, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("chunk", [8, 1])
def test_ragged_rows_score_like_the_reference(seed, group, dim, chunk):
    most = 5 * 64 // chunk
    counts = [most, 1, 0, most - 1, int(torch.randint(1, most, ()))]
    check(problem(counts, 2, group, dim, chunk, columns=7))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_chunk_size(seed, dim, chunk):
    most = 70 * 64 // chunk
    check(problem([most, most // 2 + 1, 0], 2, 4, dim, chunk, columns=71))


@pytest.mark.parametrize("heads", [1, 3, 8, 10])
@pytest.mark.parametrize("columns", [1, 2, 65])
def test_any_number_of_heads_and_pages(seed, heads, columns):
    check(problem([8 * columns], heads, 3, 128, 8, columns))


@pytest.mark.parametrize("dim", [16, 80, 112, 208])
def test_head_dims_with_padded_codes(seed, dim):
    check(problem([30, 16], 2, 4, dim, 8, columns=4))


@pytest.mark.parametrize(("group", "dim"), [(9, 64), (2, 192), (2, 72)])
def test_other_shapes_are_left_to_the_reference(seed, group, dim):
    check(problem([30, 16], 2, group, dim, 8, columns=4))


def test_long_runs_of_many_rows(seed):
    counts = torch.randint(0, 8 * 160 + 1, (40,)).tolist()
    args = problem(counts, 8, 4, 128, 8, columns=160)
    check(args)
    again = (torch.zeros_like(args[0]), *args[1:])  # queries of zero
    check(again)


def test_large_scores_stay_finite(seed):
    args = problem([40, 7], 2, 4, 128, 8, columns=5, dtype=torch.float32)
    args = (300 * args[0], *args[1:])
    logits, lse = cuda.sketch_scores(*args)
    exact, total = reference.sketch_scores(*args)
    assert exact[exact.isfinite()].abs().max() > 200  # exp of it overflows float32
    torch.testing.assert_close(logits, exact, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(lse.logsumexp(-1, keepdim=True), total, atol=1e-3, rtol=1e-5)


def test_a_captured_call_follows_its_inputs(seed):
    args = problem([40, 24, 9], 2, 4, 128, 8, columns=6)
    cuda.sketch_scores(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda.sketch_scores(*args)
    args[0].normal_()
    args[5].copy_(torch.tensor([9, 24, 0]))
    graph.replay()
    for found, eager in zip(captured, cuda.sketch_scores(*args)):
        assert torch.equal(found, eager)


def test_wrong_arguments_are_named(seed):
    args = list(problem([8], 2, 4, 128, 8, columns=1))
    args[5] = args[5].int()
    with pytest.raises(RuntimeError, match="num_chunks has dtype"):
        cuda.sketch_scores(*args)
