"""Scores of landmarks on a GPU, in bfloat16 and in eight bits: time of a call and bytes of landmarks read per second.

``python -m benchmarks.ops.chunk_mean_scores [--out file.json]``: pages are shuffled in an arena among other bytes,
as in the KV cache. Counted bytes: landmarks, their scales and the excluded bits of all pages; the floor is those at
4.5 TB/s. Float32 logits are written as well. Times are medians over replays of a CUDA graph of several calls. Every
shape is checked against the reference first, on its first rows.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, microseconds, run
from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.chunk_mean_scores import reference
from shadowkv.ops.page import PAGE

if torch.cuda.is_available():
    from shadowkv.ops.chunk_mean_scores import triton

OTHER_BYTES = 16 * 1024
CHUNKS = 8
CASES = [  # rows, tokens, kv heads, group, dim
    (48, 61440, 8, 4, 128),
    (24, 124928, 8, 4, 128),
    (1, 61440, 8, 4, 128),
    (48, 61440, 8, 4, 64),
    (48, 61440, 4, 7, 128),
]


def problem(dtype: torch.dtype, rows: int, tokens: int, heads: int, group: int, dim: int) -> tuple[Tensor, ...]:
    """The arguments of a call."""
    columns, device = tokens // PAGE, torch.device("cuda")
    fields = [
        Field("other", (OTHER_BYTES,), torch.uint8),
        Field("landmarks", (heads, CHUNKS, dim), dtype),
        Field("excluded", (heads, CHUNKS), torch.bool),
        Field("scale", (heads,), torch.float32),
    ]
    size = -(-sum(field.nbytes for field in fields) // 256) * 256
    tier = Tier("device", 1, size, rows * columns, device)
    views = {name: layers[0] for name, layers in tier.views(fields).items()}
    names = torch.tensor(tier.allocate(rows * columns)).cuda()
    for some in names.split(4096):
        views["landmarks"][some] = torch.randn(len(some), heads, CHUNKS, dim, device=device).to(dtype)
        views["scale"][some] = 0.5 + torch.rand(len(some), heads, device=device)
    pages = names[torch.randperm(len(names), device=device)].view(rows, columns)
    q = torch.randn(rows, heads * group, dim, device=device).bfloat16()
    counts = torch.full((rows,), columns * CHUNKS, device=device)
    args = (q, views["landmarks"], views["excluded"], pages, counts)
    return args if dtype == torch.bfloat16 else (*args, views["scale"])


def measure(case: tuple[int, int, int, int, int]) -> list[Row]:
    """A row of the table for each dtype."""
    rows, tokens, heads, group, dim = case
    table: list[Row] = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        q, landmarks, excluded, pages, counts, *scale = problem(dtype, *case)
        logits, _ = triton.chunk_mean_scores(q, landmarks, excluded, pages, counts, *scale)
        wanted, _ = reference.chunk_mean_scores(q[:2].float(), landmarks, excluded, pages[:2], counts[:2], *scale)
        torch.testing.assert_close(logits[:2], wanted, atol=1e-4, rtol=2e-5)
        del logits, wanted

        def call(args: tuple[Tensor, ...] = (q, landmarks, excluded, pages, counts, *scale)) -> object:
            return triton.chunk_mean_scores(*args)

        time = microseconds([call] * 10)
        moved = pages.numel() * heads * (CHUNKS * (dim * dtype.itemsize + 1) + 4 * len(scale))
        floor = moved / READ_SPEED * 1e6
        table.append({
            "dtype": str(dtype).removeprefix("torch."), "rows": rows, "tokens": tokens, "kv heads": heads,
            "group": group, "dim": dim, "us": round(time, 1), "MB": round(moved / 1e6, 1),
            "GB/s": round(moved / time / 1e3), "floor us": round(floor, 1), "times the floor": round(time / floor, 2),
        })  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(run(__doc__, torch.cuda.is_available(), CASES, measure))
