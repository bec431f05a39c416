"""Two-level selection on a GPU: time of a call, bytes gathered per second, and both against the memory's speed.

``python -m benchmarks.ops.select_by_sketch [--out file.json]``: pages are shuffled in an arena among other bytes,
as in the KV cache; kept runs are random ones. Counted bytes: both planes and the scales of the kept runs, and the
coarse scores; the floor is those at 4.5 TB/s. Page names and the result are extra. Times are medians
over replays of a CUDA graph of several calls; where a call reads less than the second-level cache holds, each has its
own rows. Every shape is checked against the reference on its first rows.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, microseconds, run
from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.page import PAGE
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.select_by_sketch import cuda, reference
from shadowkv.ops.sign_scores.reference import EXCLUDED_SCALE, encode_scale
from shadowkv.ops.sketch_queries.reference import SketchQueries, plane_bytes, sketch_queries

OTHER_BYTES = 16 * 1024
UNCACHED_BYTES = 200e6
PER_ROW = (1, 5, 6, 7)  # arguments with rows, besides the queries and samples
CASES = [  # rows, tokens, kv heads, group, dim, chunk, chunks to select, of which sampled
    (76, 61440, 8, 4, 128, 1, 960, 480),
    (63, 61440, 8, 4, 128, 1, 960, 0),
    (63, 61440, 8, 4, 128, 8, 120, 0),
    (36, 124928, 8, 4, 128, 1, 1952, 976),
    (36, 124928, 8, 4, 128, 1, 1952, 0),
    (18, 249856, 8, 4, 128, 1, 3904, 1952),
    (63, 61440, 8, 4, 64, 1, 960, 480),
    (63, 61440, 4, 7, 128, 1, 960, 480),
    (32, 61440, 8, 4, 256, 1, 960, 480),
    (1, 61440, 8, 4, 128, 1, 960, 480),
    (1, 1048576, 8, 4, 128, 1, 2048, 1024),
]


def problem(rows: int, tokens: int, heads: int, group: int, dim: int, chunk: int, budget: int, sampled: int) -> tuple:
    """Arguments of a call; every row is full."""
    columns, device = tokens // PAGE, torch.device("cuda")
    fields = [
        Field("other", (OTHER_BYTES,), torch.uint8),
        Field("signs", (heads, PAGE, plane_bytes(dim)), torch.uint8),
        Field("rest", (heads, PAGE, plane_bytes(dim)), torch.uint8),
        Field("scale", (heads, PAGE), torch.uint8),
    ]
    size = -(-sum(field.nbytes for field in fields) // 256) * 256
    tier = Tier("device", 1, size, rows * columns, device)
    tier.arena.random_()
    views = {name: layers[0] for name, layers in tier.views(fields).items()}
    names = torch.tensor(tier.allocate(rows * columns)).cuda()
    for some in names.split(4096):
        excluded = torch.rand(len(some), heads, PAGE // chunk, device=device) < 0.01
        scale = encode_scale(0.3 + torch.rand(len(some), heads, PAGE, device=device))
        views["scale"][some] = scale.masked_fill(excluded.repeat_interleave(chunk, -1), EXCLUDED_SCALE)
    pages = names[torch.randperm(len(names), device=device)].view(rows, columns)
    coarse = (5 + 2 * torch.randn(rows, heads, 8 * columns, device=device)).half()
    q = torch.randn(rows, heads * group, dim, device=device).bfloat16()
    counts = torch.full((rows,), columns, device=device)
    budgets = torch.full((rows,), budget - sampled, device=device)
    sampling = Sampling(torch.full_like(budgets, sampled), torch.arange(rows, device=device)) if sampled else None
    planes = (views["signs"], views["rest"], views["scale"])
    queries = sketch_queries(q, torch.eye(dim, device=device)[None, None], torch.zeros_like(counts))
    return queries, coarse, *planes, pages, counts, budgets, chunk, budget, sampling


def rows_of(args: tuple, some: slice) -> tuple:
    """The arguments of a call for some rows."""
    parts = {field.name: getattr(args[0], field.name)[some] for field in dataclasses.fields(SketchQueries)}
    sampling = args[-1] and Sampling(args[-1].counts[some], args[-1].seeds[some])
    return SketchQueries(**parts), *(x[some] if i in PER_ROW else x for i, x in enumerate(args[1:-1], 1)), sampling


def counted_bytes(heads: int, tokens: int, dim: int, chunk: int, budget: int) -> int:
    """Bytes of coarse scores and of the kept runs of one row."""
    pages, wanted = torch.tensor([tokens // PAGE]), torch.tensor([budget])
    runs = int(reference.kept_runs(pages, wanted, chunk))
    return heads * (tokens // 8 * 2 + runs * 8 * (2 * plane_bytes(dim) + 1))


def check(args: tuple, selected: Tensor) -> None:
    """Ends the program if the first rows, without sampling, differ in more chunks than ties and rounding
    explain."""
    exact, _ = reference.select_by_sketch(*rows_of(args, slice(2))[:-1])
    for own, expected in zip(selected[:2].flatten(0, 1), exact.flatten(0, 1)):
        assert len(own) == len(expected)
        common = torch.isin(own, expected).sum()
        assert common >= 0.97 * len(own), f"{common} of {len(own)} chunks are right"


def measure(case: tuple[int, int, int, int, int, int, int, int]) -> list[Row]:
    """One row of the table."""
    rows, tokens, heads, group, dim, chunk, budget, sampled = case
    moved = rows * counted_bytes(heads, tokens, dim, chunk, budget)
    copies = math.ceil(UNCACHED_BYTES / moved)
    args = problem(rows * copies, tokens, heads, group, dim, chunk, budget, sampled)
    check(args, cuda.select_by_sketch(*args[:-1])[0])

    def call(some: slice) -> Callable[[], object]:
        own = rows_of(args, some)
        return lambda: cuda.select_by_sketch(*own)

    calls = [call(slice(i * rows, (i + 1) * rows)) for i in range(copies)]
    time = microseconds(calls * math.ceil(10 / copies))
    floor = moved / READ_SPEED * 1e6
    row: Row = {
        "rows": rows, "tokens": tokens, "kv heads": heads, "group": group, "dim": dim, "chunk": chunk,
        "budget": budget, "sampled": sampled, "us": round(time, 1), "MB": round(moved / 1e6, 1),
        "GB/s": round(moved / time / 1e3), "floor us": round(floor, 1),
        "times the floor": round(time / floor, 2),
    }  # fmt: skip
    return [row]


if __name__ == "__main__":
    sys.exit(run(__doc__, cuda.available(), CASES, measure))
