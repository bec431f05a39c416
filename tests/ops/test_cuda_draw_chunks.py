"""Draws of chunks on a GPU against the reference there, number for number."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shadowkv.ops.draw_chunks import cuda, reference
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.select_by_sketch import cuda as selecting
from shadowkv.ops.sign_scores import cuda as scoring
from shadowkv.ops.sign_scores.reference import pack_sketch
from shadowkv.ops.sketch_queries import cuda as sketching

pytestmark = pytest.mark.skipif(
    not all(op.available() for op in (cuda, sketching, scoring, selecting)),
    reason="needs a GPU and the CUDA ops (csrc/build_cuda.py)",
)

Row = tuple[int, int, int]
"""Chunks of a row, those found and those to draw."""


def problem(rows: list[Row], heads: int, page_chunks: int, k: int, first: int = 0) -> tuple[Any, ...]:
    """Ragged rows in shuffled pages of one arena, found at random; columns behind hold what was there."""
    batch, columns = len(rows), max(1, *(-(-count // page_chunks) for count, _, _ in rows))
    selected = torch.randint(2**40, (batch, heads, k))
    for row, (count, found, _) in enumerate(rows):
        for head in range(heads):
            selected[row, head, :found] = torch.randperm(count)[:found].sort().values
    size = heads * page_chunks
    arena = torch.rand(batch * columns, -(-size // 256) * 256) < 0.2
    excluded = arena.cuda().as_strided((len(arena), heads, page_chunks), (arena.shape[1], page_chunks, 1))
    names = torch.randperm(batch * columns).view(batch, columns)
    numbers = (*torch.tensor(rows).t().contiguous(), torch.randint(2**31 + 7, (batch,)))
    return selected.cuda(), first, excluded, names.cuda(), *(x.cuda() for x in numbers)


def check(args: tuple[Any, ...], layer: int = 3) -> Tensor:
    expected, made = args[0].clone(), args[0].clone()
    torch.cuda.synchronize()
    reference.draw_chunks(expected, *args[1:], layer)
    cuda.draw_chunks(made, *args[1:], layer)
    assert torch.equal(made, expected)
    return made


@pytest.mark.parametrize("page_chunks", [64, 32, 8, 1])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_ragged_rows(seed, page_chunks, heads):
    counts = [40 * page_chunks, 17 * page_chunks + 1, page_chunks, 5, 0]
    rows = [(count, min(count, 20) // 2, min(count, 20) - min(count, 20) // 2) for count in counts]
    check(problem([*rows, (counts[0], 20, 0), (counts[0], 0, 20)], heads, page_chunks, 20))


@pytest.mark.parametrize("k", [1, 31, 32, 33, 511, 512, 513, 960, 4096, 9000])
def test_any_budget(seed, k):
    """Up to all chunks that there are, found or drawn: what is found is then drawn too."""
    rows = [(k, k // 2, k - k // 2), (3 * k + 1, k - k // 3, k // 3), (61440, k // 2, k // 2), (2 * k, k, 0)]
    check(problem(rows, 2, 64, k))


@pytest.mark.parametrize("first", [1, 8, 40, 41])
def test_chunks_before_the_first_are_not_drawn(seed, first):
    args = list(problem([(1000, 30, 60), (40, 0, 60), (0, 0, 9), (41, 0, 1)], 3, 64, 90, first))
    check(tuple(args))
    args[2] = None
    made = check(tuple(args))
    assert made[1:].max() < max(first, 41)


@pytest.mark.parametrize("batch", [1, 65, 300])
def test_any_batch(seed, batch):
    check(problem([(6000 - 7 * row, 100, 92) for row in range(batch)], 8, 64, 192), layer=31)


def test_more_runs_than_chunks_draw_the_same_chunks(seed):
    check(problem([(3, 2, 30), (20, 7, 33), (31, 16, 24), (0, 0, 9)], 4, 8, 40))


def test_nothing_is_drawn_where_fewer_were_found(seed):
    args = problem([(1000, 10, 20)] * 3, 2, 64, 40)
    args[0][1, 0, 9], args[0][2, 1, :] = -1, -1
    made = check(args)
    assert torch.equal(made[1, 0], args[0][1, 0])
    assert torch.equal(made[2, 1], args[0][2, 1])
    assert not torch.equal(made[1, 1], args[0][1, 1])


def test_long_contexts(seed):
    """Products of runs and chunks beyond 32 bits."""
    check(problem([(2_000_000, 2000, 2999), (1_048_577, 2048, 2951)], 1, 64, 5000))


def test_budgets_that_are_left_to_the_reference(seed, monkeypatch):
    monkeypatch.setattr(cuda, "most_chunks", lambda device: 39)
    check(problem([(1000, 10, 30)], 2, 64, 40))


def test_draws_that_begin_before_the_search_is_over(seed):
    """Each of many layers in a captured graph, whose launches overlap, against the same calls one at a time."""
    layers, heads, pages, k = 12, 8, 96, 64
    maps = random_rotation(128, "sketch").cuda().bfloat16().repeat(1, heads, 1, 1)
    slots = torch.zeros(4, dtype=torch.int64, device="cuda")
    signs, rest, scale = pack_sketch(torch.randn(4 * pages, heads, 64, 128, device="cuda"))
    excluded = torch.rand(4 * pages, heads, 64, device="cuda") < 0.1
    scale = scale.masked_fill(excluded, -0.0)
    names = torch.randperm(4 * pages, device="cuda").view(4, pages)
    q = torch.randn(layers, 4, 4 * heads, 128, device="cuda").bfloat16()
    counts, chunks, found, drawn, seeds = torch.tensor(
        [[pages, 1, 0, 50], [64 * pages, 64, 0, 3200], [k // 2, 3, 0, 40], [k // 2, 5, 0, 24], [7, 8, 9, 10]]
    ).cuda()

    def search(layer: int, pause: bool) -> Tensor:
        queries = sketching.sketch_queries(q[layer], maps, slots)
        coarse = scoring.sign_scores(queries, signs, scale, names, counts)
        sketch = (coarse, signs, rest, scale, names, counts)
        selected = selecting.select_by_sketch(queries, *sketch, found, 1, k)
        if pause:
            torch.cuda.synchronize()
        cuda.draw_chunks(selected, 0, excluded, names, chunks, found, drawn, seeds, layer)
        return selected

    search(0, pause=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [search(layer, pause=False) for layer in range(layers)]
    for _ in range(20):
        q.normal_()
        seeds += 1
        graph.replay()
        for layer in range(layers):
            assert torch.equal(captured[layer], search(layer, pause=True))


def test_the_reference_can_be_captured(seed):
    """Where the op was not built, decode steps run it."""
    selected, *rest = problem([(1000, 10, 20), (70, 5, 9)], 2, 64, 30)
    expected = selected.clone()
    reference.draw_chunks(expected, *rest, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reference.draw_chunks(selected, *rest, 1)
    graph.replay()
    assert torch.equal(selected, expected)


def test_wrong_arguments_are_named(seed):
    selected, first, excluded, *rest = problem([(100, 4, 4)], 2, 64, 8)
    with pytest.raises(RuntimeError, match="excluded has dtype"):
        cuda.draw_chunks(selected, first, excluded.float(), *rest, 0)
    with pytest.raises(RuntimeError, match="selected has stride"):
        cuda.draw_chunks(selected.repeat(1, 1, 2)[..., :8], first, excluded, *rest, 0)
