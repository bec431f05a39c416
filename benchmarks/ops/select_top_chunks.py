"""Ragged top-k on a GPU: time of a call.

``python -m benchmarks.ops.select_top_chunks [--out file.json]``: counted bytes are the logits; the floor is those
at 4.5 TB/s. Calls go through copies of the logits that together exceed the L2 cache. Times are medians over
replays of a CUDA graph. Every shape is checked against the reference first.
"""

from __future__ import annotations

import sys
from itertools import cycle, islice

import torch
from torch import Tensor

from benchmarks.ops.timing import READ_SPEED, Row, microseconds, run
from shadowkv.ops.select_top_chunks import cuda, reference

CASES = [  # rows, tokens, chunk, budget; 8 kv heads, 4 query heads of each, head dim 128
    (33, 124928, 8, 244),
    (48, 61440, 8, 128),
    (33, 124928, 2, 976),
    (1, 124928, 8, 244),
]


def check(logits: Tensor, lse: Tensor, selected: Tensor, budget: Tensor, k: int) -> None:
    """Ends the program if the chosen shares are not the reference's."""
    scores = (logits - lse.logsumexp(-1, keepdim=True)).amax(2)
    expected = reference.select_top_chunks(logits, lse, budget, k)
    for found in (selected, expected):
        assert found.min() >= 0
    best, exact = (scores.gather(-1, found).sort(-1).values for found in (selected, expected))
    torch.testing.assert_close(best, exact, atol=2e-5, rtol=0)


def measure(case: tuple[int, int, int, int]) -> list[Row]:
    """One row of the table."""
    rows, tokens, chunk, k = case
    logits = 3 * torch.randn(rows, 8, 4, tokens // chunk, device="cuda")
    lse = logits.logsumexp(-1, keepdim=True)
    budget = torch.full((rows,), k, device=logits.device)
    check(logits, lse, cuda.select_top_chunks(logits, lse, budget, k), budget, k)
    moved = logits.numel() * logits.element_size()
    copies = [logits.clone() for _ in range(max(1, min(8, 150 * 2**20 // moved)))]
    calls = [lambda one=one: cuda.select_top_chunks(one, lse, budget, k) for one in islice(cycle(copies), 16)]
    time = microseconds(calls)
    floor = moved / READ_SPEED * 1e6
    row: Row = {
        "rows": rows, "tokens": tokens, "chunk": chunk, "chunks": tokens // chunk, "k": k, "us": round(time, 1),
        "GB/s": round(moved / time / 1e3), "floor us": round(floor, 1), "times the floor": round(time / floor, 2),
    }  # fmt: skip
    return [row]


if __name__ == "__main__":
    sys.exit(run(__doc__, cuda.available(), CASES, measure))
