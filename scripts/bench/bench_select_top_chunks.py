"""Ragged top-k on a GPU: time of a call, alone and right after the sketch scores that it ranks.

``python scripts/bench/bench_select_top_chunks.py [--out file.json]``: counted bytes are the logits; the floor is those
at 4.5 TB/s. Alone, calls go through copies of the logits that are together larger than the L2 cache. Times are medians
over replays of a CUDA graph. Every shape is checked against the reference first.
"""

from __future__ import annotations

import argparse
import sys
from itertools import cycle
from pathlib import Path

import torch
from bench_sketch_scores import READ_SPEED, microseconds, problem, report
from torch import Tensor

from shadowkv.ops.select_top_chunks import cuda, reference
from shadowkv.ops.sketch_scores import cuda as sketch

CASES = [  # rows, tokens, chunk, budget; 8 kv heads, 4 query heads of each, head dim 128
    (33, 124928, 8, 244),
    (48, 61440, 8, 128),
    (33, 124928, 2, 976),
    (1, 124928, 8, 244),
]


def check(logits: Tensor, lse: Tensor, selected: Tensor, budget: Tensor, k: int) -> None:
    """Ends the program where the chosen shares are not the reference's."""
    scores = (logits - lse.logsumexp(-1, keepdim=True)).amax(2)
    expected = reference.select_top_chunks(logits, lse, budget, k)
    for found in (selected, expected):
        assert found.min() >= 0
    best, exact = (scores.gather(-1, found).sort(-1).values for found in (selected, expected))
    torch.testing.assert_close(best, exact, atol=2e-5, rtol=0)


def measure(rows: int, tokens: int, chunk: int, k: int) -> dict[str, object]:
    """One row of the table."""
    args = problem(rows, tokens, 8, 4, 128, chunk)
    logits, lse = sketch.sketch_scores(*args)
    budget = torch.full((rows,), k, device=logits.device)
    check(logits, lse, cuda.select_top_chunks(logits, lse, budget, k), budget, k)
    moved = logits.numel() * logits.element_size()
    copies = [logits.clone() for _ in range(max(1, min(8, 150 * 2**20 // moved)))]
    turns = cycle(copies)
    alone = microseconds(lambda: cuda.select_top_chunks(next(turns), lse, budget, k), calls=16)
    before = microseconds(lambda: sketch.sketch_scores(*args))
    both = microseconds(lambda: cuda.select_top_chunks(*sketch.sketch_scores(*args), budget, k))
    floor = moved / READ_SPEED * 1e6
    return {
        "rows": rows, "tokens": tokens, "chunk": chunk, "chunks": tokens // chunk, "k": k, "us": round(alone, 1),
        "GB/s": round(moved / alone / 1e3), "floor us": round(floor, 1), "times the floor": round(alone / floor, 2),
        "scores us": round(before, 1), "scores and selection us": round(both, 1),
    }  # fmt: skip


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if not (cuda.available() and sketch.available()):
        raise SystemExit("needs a GPU and the CUDA ops (csrc/build_cuda.py)")
    torch.manual_seed(0)
    results = []
    for case in CASES:
        results.append(measure(*case))
        torch.cuda.empty_cache()
    report(results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
