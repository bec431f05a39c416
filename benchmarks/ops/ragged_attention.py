"""Attention of packed prompts on a GPU, by backend, and one prompt after another.

``python -m benchmarks.ops.ragged_attention [--out file.json]``: the kernel for Hopper, Triton's, PyTorch's
flash attention over all, and a call of ``causal_attention`` for each prompt. Counted operations: 4 H_q d for each pair
of a query and a key that it sees. Times are medians over replays of a CUDA graph of a few calls. Results are checked
against each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, microseconds, run
from shadowkv.ops.ragged_attention import cuda, triton
from shadowkv.ops.registry import Ops

CASES = [  # lengths, kv heads, group, dim
    ([1024] * 8, 8, 4, 128),
    ([64] * 128, 8, 4, 128),
    ([8192], 8, 4, 128),
    ([4095, 2000, 1000, 500, 300, 200, 97], 8, 4, 128),
    ([4095] * 2, 8, 4, 128),
    ([1024] * 8, 8, 4, 64),
    ([1024] * 8, 4, 7, 128),
]


def measure(case: tuple[list[int], int, int, int]) -> list[Row]:
    """A row of the table for each method."""
    lengths, heads, group, dim = case
    bounds = [0, *accumulate(lengths)]
    q = torch.randn(bounds[-1], heads * group, dim, device="cuda").bfloat16()
    k, v = torch.randn(2, bounds[-1], heads, dim, device="cuda").bfloat16()
    starts, alone = torch.tensor(bounds, dtype=torch.int32, device="cuda"), Ops("cuda").causal_attention
    ways: dict[str, Callable[[], Tensor]] = {
        "cuda": lambda: cuda.ragged_attention(q, k, v, starts, max(lengths)),
        "triton": lambda: triton.ragged_attention(q, k, v, starts, max(lengths)),
        "flash attention 2": lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, max(lengths), max(lengths), 0.0, True, False
        )[0],
        "one by one": lambda: torch.cat([alone(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(bounds)]),
    }
    operations = 4 * heads * group * dim * sum(n * (n + 1) / 2 for n in lengths)
    table, exact = list[Row](), ways["one by one"]().float()
    for name, attend in ways.items():
        torch.testing.assert_close(attend().float(), exact, atol=0.01, rtol=0.02)
        taken = microseconds([attend] * 3, rounds=7)
        row: Row = {
            "way": name, "prompts": len(lengths), "longest": max(lengths), "kv heads": heads, "group": group,
            "dim": dim, "ms": round(taken / 1e3, 3), "TFLOP/s": round(operations / taken / 1e6),
        }  # fmt: skip
        table.append(row)
    return table


if __name__ == "__main__":
    sys.exit(run(__doc__, torch.cuda.is_available(), CASES, measure))
