"""Attention of dense prefills on a GPU: a block of queries over all keys up to them, and packed short prompts.

Counted operations: 4 * H_q * d for each pair of a query and a key that it attends to (H_q query heads of d dimensions).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, bench, microseconds
from shadowkv.ops.dense_attention import cuda_sm90, triton
from shadowkv.ops.dense_attention.forms import Packed
from shadowkv.ops.partial_attention.triton import merge_attention
from shadowkv.ops.registry import Ops

BLOCKS = [  # queries, keys, kv heads, group, dim
    (8192, 61440, 8, 4, 128),
    (8192, 8192, 8, 4, 128),
    (8192, 124928, 8, 4, 128),
    (4321, 61440, 8, 4, 128),
    (1000, 61440, 8, 4, 128),
    (300, 20000, 8, 4, 128),
    (2048, 2048, 8, 4, 128),
    (8192, 61440, 8, 4, 64),
    (8192, 61440, 4, 7, 128),
]
PACKS = [  # lengths, kv heads, group, dim
    ([1024] * 8, 8, 4, 128),
    ([64] * 128, 8, 4, 128),
    ([8192], 8, 4, 128),
    ([4095, 2000, 1000, 500, 300, 200, 97], 8, 4, 128),
    ([4095] * 2, 8, 4, 128),
    ([1024] * 8, 8, 4, 64),
    ([1024] * 8, 4, 7, 128),
]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's flash attention."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out[0].transpose(0, 1)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's cuDNN attention, in two parts that are merged: over the keys before the queries, and over the queries'
    own keys."""
    own = len(k) - len(q)

    def attended(k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        query, *rest = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, *rest, None, True, 0.0, causal)
        return out[0].transpose(0, 1), lse.view(lse.shape[:3])[0].T

    parts = [attended(k[own:], v[own:], True)]
    if own:
        parts.append(attended(k[:own], v[:own], False))
    merged: Tensor = merge_attention(parts)
    return merged


def backends() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Returns the op's chosen backend, and PyTorch's kernels. ``attention_backends.py`` measures other packages."""
    return {"chosen": Ops("cuda").dense_attention, "flash": flash, "cudnn": cudnn}


@bench(BLOCKS)
def dense_attention(case: tuple[int, int, int, int, int]) -> list[Row]:
    """A row for each backend. The first call, in which cuDNN plans its kernels, has a column of its own."""
    n, m, heads, group, dim = case
    q = torch.randn(n, heads * group, dim, device="cuda").bfloat16()
    k, v = torch.randn(2, m, heads, dim, device="cuda").bfloat16()
    exact, table = flash(q, k, v).float(), []
    operations = 4 * heads * group * dim * (n * (m - n) + n * (n + 1) / 2)
    for name, attend in backends().items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = attend(q, k, v)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        torch.testing.assert_close(out.float(), exact, atol=0.01, rtol=0.02)
        taken = microseconds([lambda attend=attend: attend(q, k, v)] * 3, rounds=7)
        row: Row = {
            "backend": name, "queries": n, "keys": m, "kv heads": heads, "group": group, "dim": dim,
            "ms": round(taken / 1e3, 3), "TFLOP/s": round(operations / taken / 1e6), "first ms": round(1e3 * first, 1),
        }  # fmt: skip
        table.append(row)
    return table


@bench(PACKS)
def packed_attention(case: tuple[list[int], int, int, int]) -> list[Row]:
    """A row for each way: this package's kernels for packed prompts, PyTorch's flash attention for packed prompts, and
    one call per prompt."""
    lengths, heads, group, dim = case
    bounds = [0, *accumulate(lengths)]
    q = torch.randn(bounds[-1], heads * group, dim, device="cuda").bfloat16()
    k, v = torch.randn(2, bounds[-1], heads, dim, device="cuda").bfloat16()
    starts, alone = torch.tensor(bounds, dtype=torch.int32, device="cuda"), Ops("cuda").dense_attention
    ways: dict[str, Callable[[], Tensor]] = {
        "cuda": lambda: cuda_sm90.packed(q, k, v, Packed(starts, lengths)),
        "triton": lambda: triton.packed(q, k, v, Packed(starts, lengths)),
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
