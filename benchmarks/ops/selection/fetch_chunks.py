"""Fetches of selected chunks from pinned host memory, through a buffer that has twice as many entries as chunks are
selected.

From step to step, a set share of the selected chunks repeats. Counted bytes are those of the measured misses. The floor
is the time for these bytes at 50.7 GB/s, the highest speed that kernels reached over the bus. A share of 1 shows the
cost of a call without misses. A CUDA graph has all steps of a stream, and times are per step. Few chunks of the last
step repeat in the first step of the next replay, so the hit rate is below the share.
"""

from __future__ import annotations

import statistics
from functools import cache

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, bench, replay_times
from benchmarks.sweeps.synthetic import repeating
from shadowkv.kvcache.memory.arenas import GRANULE, Field, Tier
from shadowkv.ops.fetch_chunks import cuda
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer
from shadowkv.ops.page import PAGE

BUS_SPEED = 50.7e9
PINNED_GIB = 3
HEADS = 8
CASES = [  # rows, tokens, selected chunks, tokens and elements of a chunk row, dtype
    (48, 61440, 128, 8, 128, torch.bfloat16),
    (24, 124928, 256, 8, 128, torch.bfloat16),
    (48, 61440, 128, 8, 64, torch.uint8),
    (48, 61440, 128, 8, 48, torch.uint8),
    (48, 61440, 64, 16, 64, torch.uint8),
    (1, 124928, 256, 8, 128, torch.bfloat16),
]
SHARES = (1.0, 0.72, 0.6, 0.5, 0.0)
STEPS = 32
ROUNDS = 3


@cache
def arena() -> Tier:
    """Returns a tier of random bytes in pinned memory."""
    tier = Tier("host", 1, 2**20, 1024 * PINNED_GIB, torch.device("cuda"), pinned=True)
    tier.arena.view(torch.int64).random_()
    return tier


def check(host: Tensor, pages: Tensor, slots: Tensor, selected: Tensor, buffer: ChunkBuffer, entries: Tensor) -> None:
    """Raises an error if the buffer does not hold the selected chunks."""
    heads = torch.arange(HEADS, device="cuda")[:, None]
    rows = torch.arange(len(slots), device="cuda")[:, None, None]
    page = pages[rows, selected // host.shape[2]]
    expected = host[page, heads, selected % host.shape[2]]
    fetched = buffer.rows[slots[:, None, None], heads, entries]
    assert torch.equal(fetched.view(torch.uint8), expected.view(torch.uint8))


@bench(CASES, lambda: not cuda.missing())
def fetch_chunks(case: tuple[int, int, int, int, int, torch.dtype]) -> list[Row]:
    """Rows of the table: one for every share."""
    rows, tokens, k, chunk, width, dtype = case
    field = Field("values", (HEADS, PAGE // chunk, chunk, width), dtype)
    host = arena().views([field])[field.name][0]
    # Sequences share random pages of the arena: separate pages for all would not fit.
    pages = torch.randint(0, host.shape[0] * GRANULE // field.nbytes - 1, (rows, tokens // PAGE), device="cuda")
    pages *= field.nbytes // GRANULE
    slots = torch.randperm(rows, device="cuda")
    chunks, row_bytes = tokens // chunk, chunk * width * dtype.itemsize
    results = []
    for share in SHARES:
        selections = list(repeating((rows, HEADS, chunks), k, share, STEPS))
        buffer = ChunkBuffer.empty(rows, 2 * k, chunks, host)
        for selected in selections:
            entries = cuda.fetch_chunks(host, pages, slots, selected, buffer)
        check(host, pages, slots, selections[-1], buffer, entries)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for selected in selections:
                cuda.fetch_chunks(host, pages, slots, selected, buffer)
        graph.replay()
        buffer.counters.zero_()
        us = statistics.median(replay_times(graph, ROUNDS)) / STEPS
        asked, missed = buffer.counters.tolist()
        moved = missed * row_bytes / (ROUNDS * STEPS)
        floor = moved / BUS_SPEED * 1e6
        results.append({
            "rows": rows, "k": k, "row B": row_bytes, "share": share,
            "hits": round(1 - missed / asked, 3), "MB": round(moved / 1e6, 2), "us": round(us, 1),
            "GB/s": round(moved / us / 1e3, 1), "floor us": round(floor, 1),
        })  # fmt: skip
    return results
