"""Drawn chunks behind those found on a GPU: time of a call.

``python scripts/bench/bench_draw_chunks.py [--out file.json]``: counted bytes are the selection, its found part read
and the rest written; the floor is those at 4.5 TB/s. Calls go through copies of the selection that are together larger
than the L2 cache. Times are medians over replays of a CUDA graph. Every shape is checked against the reference first.
"""

from __future__ import annotations

import sys

import torch
from timing import READ_SPEED, Row, microseconds, run

from shadowkv.ops.draw_chunks import cuda, reference

HEADS = 8
CASES = [(65, 61440, 960), (33, 124928, 1952), (16, 249856, 3904), (1, 61440, 960)]  # rows, tokens, k; half are drawn


def measure(case: tuple[int, int, int]) -> list[Row]:
    """One row of the table."""
    rows, tokens, k = case
    pages, device = tokens // 64, torch.device("cuda")
    names = torch.arange(rows * pages, device=device).view(rows, pages)
    found = torch.rand(rows, HEADS, tokens, device=device).topk(k // 2).indices.sort().values
    selected = torch.nn.functional.pad(found, (0, k - k // 2), value=-1)
    numbers = (torch.full((rows,), n, device=device) for n in (tokens, k // 2, k - k // 2))
    fixed = (8, None, names, *numbers, torch.arange(rows, device=device))
    expected, made = selected.clone(), selected.clone()
    reference.draw_chunks(expected, *fixed, 0)
    torch.cuda.synchronize()
    cuda.draw_chunks(made, *fixed, 0)
    torch.testing.assert_close(made, expected, atol=0, rtol=0)
    moved = selected.nbytes
    copies = [selected.clone() for _ in range(max(2, min(64, 150 * 2**20 // selected.nbytes)))]
    time = microseconds([lambda one=one, layer=i: cuda.draw_chunks(one, *fixed, layer) for i, one in enumerate(copies)])
    floor = moved / READ_SPEED * 1e6
    row: Row = {
        "rows": rows, "tokens": tokens, "k": k, "us": round(time, 1), "GB/s": round(moved / time / 1e3),
        "floor us": round(floor, 1), "times the floor": round(time / floor, 2),
    }  # fmt: skip
    return [row]


if __name__ == "__main__":
    sys.exit(run(__doc__, cuda.available(), CASES, measure))
