"""Attention over all tokens of mixed latents and vectors on a Hopper: time of a call, and its error.

``python -m benchmarks.ops.attend_mixed [--out file.json]``: Llama-3.1-8B's attention (32 query and 8 kv heads of
128) over the preset ``shard``'s formats, pages shuffled in an arena as in the KV cache. The floor is that of the
product of latents and bases alone, at 800 TFLOP/s; bytes of codes are given too. Times are medians over replays of a
CUDA graph, and the largest error is that of the first row against the reference in float32.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, microseconds, run
from shadowkv.kvcache.codecs.latents import MixedLatents
from shadowkv.kvcache.codecs.vectors import ENTRIES, GROUP, VectorRows
from shadowkv.kvcache.memory import Field, Tier
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.attend_coded import cuda_mixed, reference
from shadowkv.ops.attend_selected.sources import CodedRows, LatentKeys
from shadowkv.ops.page import PAGE

HEADS, DIM = 8, 128
PRODUCTS = 8e14
"""Operations per second of matrix products in half precision on an H200, about what they reach."""
CASES = [  # rows, tokens, group, rank, bits of the rank's groups in turn
    (32, 8192, 4, 192, (4,)),
    (32, 8192, 4, 192, (8, 6, 6, 4, 4, 4, 4, 4, 2, 2, 2, 2)),
    (32, 8192, 4, 160, (4,)),
    (32, 8192, 7, 192, (4,)),
    (64, 8192, 4, 192, (4,)),
    (8, 61440, 4, 192, (4,)),
    (1, 124928, 4, 192, (4,)),
]
Case = tuple[int, int, int, int, tuple[int, ...]]
Call = tuple[Tensor, LatentKeys, CodedRows, Tensor, Tensor]


def problem(case: Case) -> list[Call]:
    """Arguments of a call per layer, layers of 1 GB in total, so that none is found in a cache: random codes."""
    rows, tokens, group, rank, bits = case
    columns, device = tokens // PAGE, torch.device("cuda")
    latent, vector = MixedLatents(), VectorRows()
    width, dtype = latent.field(rank, torch.bfloat16)
    fields = [
        Field("latents", (PAGE, 1, width), dtype),
        Field("codes", (HEADS, PAGE, 1, vector.row_bytes(DIM)), torch.uint8),
    ]
    size = -(-sum(field.nbytes for field in fields) // 256) * 256
    layers = max(2, min(8, 2**30 // (size * rows * columns)))
    tier = Tier("device", layers, size, rows * columns, device)
    tier.arena.random_()
    views = tier.views(fields)
    names = torch.tensor(tier.allocate(rows * columns)).cuda()
    pages = names[torch.randperm(len(names), device=device)].view(rows, columns)
    row = torch.arange(rows, device=device)
    rotary = RotaryTables(RopeConfig(DIM, theta=5e5), tokens, device)
    widths = torch.tensor(bits, dtype=torch.uint8, device=device).repeat_interleave(16).repeat(rank)[:rank]
    step = 1 / 50 / rank**0.5 / ((1 << widths.int() >> 1) - 1).clamp(min=1)
    nothing = torch.empty(1, HEADS, PAGE, 0, device=device).half()
    rotation = vector.rotation_matrix(DIM, "values").cuda()
    calls = []
    for layer in range(layers):
        basis = torch.randint(-127, 128, (rows, rank, HEADS, DIM), device=device, dtype=torch.int8)
        mean = torch.randn(rows, HEADS, DIM, device=device).bfloat16()
        of_rows = widths.expand(rows, -1).contiguous(), step.expand(rows, -1).contiguous()
        first = torch.zeros_like(row)
        keys = LatentKeys(views["latents"][layer], latent, basis, mean, row, pages, first, rotary, *of_rows)
        state = (
            torch.rand(rows, HEADS, DIM, device=device) + 1,
            torch.rand(rows, 1, ENTRIES, GROUP, device=device) * 2 - 1,
        )
        values = CodedRows(views["codes"][layer], nothing, vector, DIM, rotation, pages, None, state, row)
        q = torch.randn(rows, HEADS * group, DIM, device=device).bfloat16()
        calls.append((q, keys, values, torch.zeros_like(row), torch.full_like(row, tokens)))
    return calls


def error(call: Call) -> float:
    """The largest error of the first row over its first 64 pages."""
    q, keys, values, begin, end = call
    assert keys.mean is not None and values.states is not None
    one = {"pages": keys.pages[:1, :64], "states": keys.states[:1]}
    small = replace(keys, first=keys.first[:1], **one), replace(values, **one), begin[:1], end[:1].clamp(max=PAGE * 64)
    found = cuda_mixed.attend_coded(q[:1], *small)
    exact = reference.attend_coded(q[:1].float(), replace(small[0], mean=keys.mean.float()), *small[1:])
    return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True))


def measure(case: Case) -> list[Row]:
    """One row of the table."""
    rows, tokens, group, rank, bits = case
    calls = problem(case)
    worst = error(calls[0])
    if not worst < 0.02:
        raise SystemExit(f"off by {worst} from the reference")
    time = microseconds([partial(cuda_mixed.attend_coded, *call) for call in calls])
    floor = 2 * rows * tokens * HEADS * rank * DIM / PRODUCTS * 1e6
    row: Row = {
        "rows": rows, "tokens": tokens, "group": group, "rank": rank, "bits": " ".join(map(str, bits)),
        "us": round(time, 1), "MB": round(rows * tokens * (rank // 2 + HEADS * DIM // GROUP) / 1e6, 1),
        "of the floor's speed": round(floor / time, 3), "error": f"{worst:.1e}",
    }  # fmt: skip
    return [row]


if __name__ == "__main__":
    sys.exit(run(__doc__, cuda_mixed.available(), CASES, measure))
