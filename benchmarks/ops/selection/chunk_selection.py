"""Selection by chunk means on a GPU: scores of landmarks in bfloat16 and in 8 bits, and the top-k over rows of
different lengths.

Pages are shuffled in an arena among other bytes, as in the KV cache. Counted bytes of scores are the landmarks, their
scales and the flags of excluded chunks, of all pages; the float32 logits, which are written, are not counted. Counted
bytes of the top-k are the logits. Calls get different copies of the logits, which together are larger than the L2
cache.
"""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch import Tensor

from benchmarks.ops.timing import Row, against_floor, arena, bench, microseconds
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.ops.chunk_scores import reference as scores_reference
from shadowkv.ops.page import PAGE
from shadowkv.ops.select_top_chunks import cuda, reference

if torch.cuda.is_available():
    from shadowkv.ops.chunk_scores import triton

OTHER_BYTES = 16 * 1024
CHUNKS = 8
SCORED = [  # rows, tokens, kv heads, group, dim
    (48, 61440, 8, 4, 128),
    (24, 124928, 8, 4, 128),
    (1, 61440, 8, 4, 128),
    (48, 61440, 8, 4, 64),
    (48, 61440, 4, 7, 128),
]
SELECTED = [  # rows, tokens, chunk, budget; 8 kv heads, 4 query heads of each, head dim 128
    (33, 124928, 8, 244),
    (48, 61440, 8, 128),
    (33, 124928, 2, 976),
    (1, 124928, 8, 244),
]


def landmarks_of(dtype: torch.dtype, rows: int, tokens: int, heads: int, group: int, dim: int) -> tuple[Tensor, ...]:
    """Returns the arguments of a call."""
    columns, device = tokens // PAGE, torch.device("cuda")
    fields = [
        Field("other", (OTHER_BYTES,), torch.uint8),
        Field("landmarks", (heads, CHUNKS, dim), dtype),
        Field("excluded", (heads, CHUNKS), torch.bool),
        Field("scale", (heads,), torch.float32),
    ]
    views, pages = arena(fields, rows, columns)
    landmarks, excluded, scale = (views[field.name][0] for field in fields[1:])
    for part in pages.flatten().split(4096):
        landmarks[part] = torch.randn(len(part), heads, CHUNKS, dim, device=device).to(dtype)
        excluded[part] = False
        scale[part] = 0.5 + torch.rand(len(part), heads, device=device)
    q = torch.randn(rows, heads * group, dim, device=device).bfloat16()
    args = (q, landmarks, excluded, pages, torch.full((rows,), columns * CHUNKS, device=device))
    return args if dtype == torch.bfloat16 else (*args, scale)


@bench(SCORED)
def chunk_mean_scores(case: tuple[int, int, int, int, int]) -> list[Row]:
    """A row for each dtype."""
    rows, tokens, heads, group, dim = case
    table: list[Row] = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        args = q, landmarks, excluded, pages, counts, *scale = landmarks_of(dtype, *case)
        logits, _ = triton.chunk_mean_scores(*args)
        exact, _ = scores_reference.chunk_mean_scores(q[:2].float(), landmarks, excluded, pages[:2], counts[:2], *scale)
        torch.testing.assert_close(logits[:2], exact, atol=1e-4, rtol=2e-5)
        del logits, exact
        time = microseconds([lambda args=args: triton.chunk_mean_scores(*args)] * 10)
        moved = pages.numel() * heads * (CHUNKS * (dim * dtype.itemsize + 1) + 4 * len(scale))
        row: Row = {"dtype": str(dtype).removeprefix("torch."), "rows": rows, "tokens": tokens, "kv heads": heads}
        table.append(row | {"group": group, "dim": dim} | against_floor(moved, time))
    return table


def check(logits: Tensor, lse: Tensor, selected: Tensor, budget: Tensor, k: int) -> None:
    """Raises an error if the selected chunks' shares of attention differ from those of the reference's chunks."""
    scores = (logits - lse.logsumexp(-1, keepdim=True)).amax(2)
    expected = reference.select_top_chunks(logits, lse, budget, k)
    for chunks in (selected, expected):
        assert chunks.min() >= 0
    best, exact = (scores.gather(-1, chunks).sort(-1).values for chunks in (selected, expected))
    torch.testing.assert_close(best, exact, atol=2e-5, rtol=0)


@bench(SELECTED, lambda: not cuda.missing())
def select_top_chunks(case: tuple[int, int, int, int]) -> list[Row]:
    """One row of the table."""
    rows, tokens, chunk, k = case
    logits = 3 * torch.randn(rows, 8, 4, tokens // chunk, device="cuda")
    lse = logits.logsumexp(-1, keepdim=True)
    budget = torch.full((rows,), k, device=logits.device)
    check(logits, lse, cuda.select_top_chunks(logits, lse, budget, k), budget, k)
    copies = [logits.clone() for _ in range(max(1, min(8, 150 * 2**20 // logits.nbytes)))]
    calls = [lambda copy=copy: cuda.select_top_chunks(copy, lse, budget, k) for copy in islice(cycle(copies), 16)]
    row: Row = {"rows": rows, "tokens": tokens, "chunk": chunk, "chunks": tokens // chunk, "k": k}
    return [row | against_floor(logits.nbytes, microseconds(calls))]
