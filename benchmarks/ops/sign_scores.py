"""Sign scores on a GPU: time of a call, bytes of the index read per second, and both against the memory's speed.

``python -m benchmarks.ops.sign_scores [--out file.json]``: pages are shuffled in an arena among other bytes, as in
the KV cache. Counted bytes: signs and scales of all valid pages; the floor is those at 4.5 TB/s. Float16 scores, 1/68
of those bytes at head dim 128, are written as well. Times are medians over replays of a CUDA graph of several calls,
each right after one of ``sketch_queries``, which is included and also timed alone. Every shape is checked against the
reference first, on its first rows.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, microseconds, run
from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.page import PAGE
from shadowkv.ops.rotations import random_rotation
from shadowkv.ops.sign_scores import cuda, reference
from shadowkv.ops.sketch_queries import cuda as queries_cuda
from shadowkv.ops.sketch_queries import reference as queries_reference

OTHER_BYTES = 32 * 1024
CASES = [  # rows, tokens, kv heads, group, dim, whether rows are ragged
    (63, 61440, 8, 4, 128, False),
    (30, 124928, 8, 4, 128, False),
    (63, 61440, 8, 4, 128, True),
    (1, 61440, 8, 4, 128, False),
    (1, 124928, 8, 4, 128, False),
    (63, 61440, 8, 4, 64, False),
    (30, 61440, 8, 4, 256, False),
    (63, 61440, 4, 7, 128, False),
    (63, 61440, 8, 8, 128, False),
]


def problem(rows: int, tokens: int, heads: int, group: int, dim: int, ragged: bool) -> tuple[Tensor, ...]:
    """Queries, their maps and states and the other arguments of a call; rows are full, or of random lengths."""
    columns, device = tokens // PAGE, torch.device("cuda")
    fields = [
        Field("other", (OTHER_BYTES,), torch.uint8),
        Field("signs", (heads, PAGE, queries_reference.plane_bytes(dim)), torch.uint8),
        Field("scale", (heads, PAGE), torch.uint8),
    ]
    size = -(-sum(field.nbytes for field in fields) // 256) * 256
    tier = Tier("device", 1, size, rows * columns, device)
    tier.arena.random_()
    views = {name: layers[0] for name, layers in tier.views(fields).items()}
    names = torch.tensor(tier.allocate(rows * columns)).cuda()
    for some in names.split(4096):
        views["scale"][some] = reference.encode_scale(0.3 + torch.rand(len(some), heads, PAGE, device=device))
    pages = names[torch.randperm(len(names), device=device)].view(rows, columns)
    q = torch.randn(rows, heads * group, dim, device=device).bfloat16()
    counts = torch.randint(columns // 8, columns + 1, (rows,)) if ragged else torch.full((rows,), columns)
    maps = random_rotation(dim, "sketch").to(device).bfloat16().repeat(rows, heads, 1, 1)
    return q, maps, torch.arange(rows, device=device), views["signs"], views["scale"], pages, counts.cuda()


def check(args: tuple[Tensor, ...], scores: Tensor) -> None:
    """Ends the program if two rows' errors are more than rounding."""
    q, maps, states, signs, scale, pages, counts = args
    queries = queries_reference.sketch_queries(q[:2], maps, states[:2])
    exact = reference.sign_scores(queries, signs, scale, pages[:2], counts[:2])
    torch.testing.assert_close(scores[:2], exact, atol=0.02, rtol=1e-3)


def measure(case: tuple[int, int, int, int, int, bool]) -> list[Row]:
    """One row of the table."""
    rows, tokens, heads, group, dim, ragged = case
    args = problem(*case)
    q, maps, states, *fields = args

    def call() -> Tensor:
        return cuda.sign_scores(queries_cuda.sketch_queries(q, maps, states), *fields)

    check(args, call())
    time = microseconds([call] * 10)
    queries_time = microseconds([lambda: queries_cuda.sketch_queries(q, maps, states)] * 10)
    moved = int(args[6].sum()) * heads * PAGE * (queries_reference.plane_bytes(dim) + 1)
    floor = moved / READ_SPEED * 1e6
    row: Row = {
        "rows": rows, "tokens": tokens, "kv heads": heads, "group": group, "dim": dim, "ragged": ragged,
        "us": round(time, 1), "queries us": round(queries_time, 1), "MB": round(moved / 1e6, 1),
        "GB/s": round(moved / time / 1e3), "floor us": round(floor, 1), "times the floor": round(time / floor, 2),
    }  # fmt: skip
    return [row]


if __name__ == "__main__":
    sys.exit(run(__doc__, cuda.available() and queries_cuda.available(), CASES, measure))
