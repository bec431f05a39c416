"""Chunks fetched from pinned memory by a GPU: the promises of the reference, which any backend keeps."""

import pytest
import torch
from test_fetch_chunks import Problem, bf16_rows, byte_rows, check_exact_lru, check_stream
from torch import Tensor

from shadowkv.ops.fetch_chunks import cuda, reference

if cuda.missing():
    pytest.skip("needs a GPU and the CUDA ops (csrc/build_cuda.py)", allow_module_level=True)

ROWS = {
    "2 KiB": bf16_rows(8, 128),
    "4 KiB": bf16_rows(16, 128),
    "1 KiB": byte_rows(16, 64),
    "512 B": byte_rows(8, 64),
    "288 B": byte_rows(8, 36),
    "64 B": byte_rows(1, 64),
    "16 B": byte_rows(1, 16),
}


@pytest.mark.parametrize("entries", [40, 47, 300])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_stream_of_ragged_selections(seed, rows, entries):
    check_stream(Problem.random(6, 3, 40, entries, 40, rows, "cuda"), cuda.fetch_chunks, steps=8)


SHORT_AND_LONG = pytest.mark.parametrize("rows", [byte_rows(8, 48), bf16_rows(8, 64)], ids=["384 B", "1 KiB"])


@SHORT_AND_LONG
@pytest.mark.parametrize("blocks", [1, 8, 32, 132])
def test_any_grid_copies_everything(seed, blocks, rows, monkeypatch):
    for name in ("BLOCKS", "BLOCKS_OF_SHORT_ROWS"):
        monkeypatch.setattr(cuda, name, blocks)
    check_stream(Problem.random(9, 8, 300, 700, 150, rows, "cuda"), cuda.fetch_chunks, steps=5)


@SHORT_AND_LONG
@pytest.mark.parametrize("overlapped", [False, True])
def test_bytes_may_come_on_another_stream(seed, rows, overlapped):
    side = torch.cuda.Stream()

    def op(*args) -> Tensor:
        entries = cuda.fetch_chunks(*args, side, overlapped)
        torch.cuda.current_stream().wait_stream(side)
        return entries

    check_stream(Problem.random(9, 8, 300, 700, 150, rows, "cuda"), op, steps=5)


def test_more_entries_than_fit_in_ordinary_shared_memory(seed):
    problem = Problem.random(2, 1, 3000, 20_000, 400, byte_rows(1, 32), "cuda")
    check_stream(problem, cuda.fetch_chunks, steps=20)


def test_one_chunk_a_step_like_a_plain_lru(seed):
    check_exact_lru(Problem.random(1, 1, 1, 7, 13, bf16_rows(8, 64), "cuda"), cuda.fetch_chunks, steps=100)


@SHORT_AND_LONG
def test_as_many_hits_as_the_reference(seed, rows):
    problem = Problem.random(4, 4, 50, 100, 40, rows, "cuda")
    stream = [problem.select(0.6) for _ in range(40)]
    missed = []
    for op in (reference.fetch_chunks, cuda.fetch_chunks):
        for slot in range(6):
            problem.buffer.reset(slot)
        problem.buffer.counters.zero_()
        for selected in stream:
            op(problem.host, problem.pages, problem.slots, selected, problem.buffer)
        missed.append(int(problem.buffer.counters[1]))
    assert abs(missed[0] - missed[1]) < 0.01 * 4 * 4 * 50 * 40


@SHORT_AND_LONG
def test_pages_beyond_four_gigabytes(seed, rows):
    problem = Problem.random(4, 2, 20, 33, 10, rows, "cuda")
    arena = torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
    arena[-(2**24) :] = torch.randint(0, 256, (2**24,), dtype=torch.uint8)
    shape, size = problem.host.shape[1:], problem.host.element_size()
    page = problem.host[0].nbytes
    granules = (arena.numel() - page) // 256 + 1
    strides = 256 // size, *problem.host.stride()[1:]
    problem.host = arena.view(problem.host.dtype).as_strided((granules, *shape), strides)
    problem.pages = granules - 1 - torch.randperm(200, device="cuda")[:40].view(4, 10) * (page // 256)
    check_stream(problem, cuda.fetch_chunks, steps=5)


@SHORT_AND_LONG
def test_a_captured_call_follows_its_inputs(seed, rows):
    problem = Problem.random(6, 3, 40, 80, 40, rows, "cuda")
    selected = problem.select(0.6).clone()
    problem.fetch(cuda.fetch_chunks, selected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        entries = cuda.fetch_chunks(problem.host, problem.pages, problem.slots, selected, problem.buffer)

    def replay(host: Tensor, pages: Tensor, slots: Tensor, now: Tensor, buffer: object) -> Tensor:
        selected.copy_(now)
        graph.replay()
        return entries

    check_stream(problem, replay, steps=10)


def test_chunks_that_are_no_multiple_of_16_bytes_are_refused(seed):
    problem = Problem.random(4, 2, 5, 8, 4, byte_rows(1, 4), "cuda")
    with pytest.raises(RuntimeError, match=r"host has chunks of 4 bytes|host is not aligned to 16 bytes"):
        problem.fetch(cuda.fetch_chunks, problem.select(0.6))


def test_rows_without_a_selection_touch_nothing(seed):
    problem = Problem.random(4, 2, 5, 8, 4, bf16_rows(8, 64), "cuda")
    problem.slots[:] = 1
    problem.fetch(cuda.fetch_chunks, torch.full((4, 2, 5), -1).cuda())
    assert problem.fetch(cuda.fetch_chunks, problem.last[..., :0]).shape == (4, 2, 0)
