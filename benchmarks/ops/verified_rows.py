"""Attention of the rows that verify a draft, over all dense rows of compressed pages: time of 1, 4 and 8 rows of every
sequence, with Llama-3.1-8B's heads.

``rows`` gives each row a place of its own in the batch, as steps do. ``folded`` gives the kernel the rows of a sequence
as further query heads of each kv head, so that thread blocks that read the same keys are neighbours.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.paged_attention import SHAPES, problem
from benchmarks.ops.timing import READ_SPEED, Row, bench, microseconds
from shadowkv.ops.attend_coded import cuda_dense
from shadowkv.ops.attend_selected.sources import DenseRows
from shadowkv.ops.page import PAGE

CASES = [(1, 61440), (15, 61440), (7, 124928)]
"""Sequences and the tokens of each: one, and the largest batches of ``full`` on an H200."""

ROWS = (1, 4, 8)
Call = tuple[Tensor, DenseRows, DenseRows, Tensor, Tensor]


def folded(q: Tensor, rows: int, heads: int) -> Tensor:
    """Turns queries [S * rows, H * G, d] into [S, H * rows * G, d], those of a kv head side by side."""
    return q.unflatten(0, (-1, rows)).unflatten(2, (heads, -1)).transpose(1, 2).flatten(1, 3)


def unfolded(out: Tensor, rows: int, heads: int) -> Tensor:
    """Undoes ``folded``."""
    return out.unflatten(1, (heads, rows, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


@bench(CASES, lambda: not cuda_dense.missing())
def verified_rows(case: tuple[int, int]) -> list[Row]:
    """Rows of the table, after a check that both ways give the same."""
    from shadowkv.ops.attend_coded import triton

    count, tokens = case
    heads, group, dim = SHAPES["cuda"]
    stored = problem([tokens] * count, torch.bfloat16, "cuda")
    floor = 2 * count * tokens * heads * dim * 2 / READ_SPEED * 1e6
    results: list[Row] = []
    first: dict[str, float] = {}
    for rows in ROWS:
        q = torch.randn(count * rows, heads * group, dim, device="cuda", dtype=torch.bfloat16)
        calls: dict[str, list[Call]] = {"rows": [], "folded": []}
        for _, k, v, pages, _ in stored:
            shaped = [x.unflatten(2, (PAGE // 8, 8)) for x in (k, v)]
            for name, each, asked in (("rows", rows, q), ("folded", 1, folded(q, rows, heads))):
                table = pages.repeat_interleave(each, 0)
                end = torch.full((len(table),), tokens, device="cuda")
                calls[name].append((asked, *(DenseRows(x, table) for x in shaped), torch.zeros_like(end), end))  # type: ignore[arg-type]
        plain, merged = (cuda_dense.attend_coded(*calls[name][0])[0].float() for name in calls)
        worst = float((plain - unfolded(merged, rows, heads)).abs().max() / plain.abs().max())
        if not worst < 0.02:
            raise SystemExit(f"rows and folded rows differ by {worst} of the largest output")
        timed = {f"cuda {name}": [partial(cuda_dense.attend_coded, *call) for call in calls[name]] for name in calls}
        timed["triton rows"] = [partial(triton.attend_coded, *call) for call in calls["rows"]]
        for name, functions in timed.items():
            time = microseconds(functions)
            ratio = time / first.setdefault(name, time)
            results.append({
                "shape": f"{count} x {tokens}", "rows": rows, "kernel": name, "us": round(time, 1),
                "of one row": round(ratio, 3), "floor us": round(floor, 1),
            })  # fmt: skip
    return results
