"""Sorts choices by expert, and sums experts' rows by their weights, in Triton. Each token has k choices: the experts
that it uses. A choice's row is the number of choices that come before it in the sorted order. Up to ``SPAN`` choices
need one kernel. If there are more, another kernel first counts how often each expert is chosen in each span of ``SPAN``
choices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SPAN = 4096
"""Number of choices that are compared with each other. The work per choice grows with this number."""

ROWS, OTHERS = 64, 128
"""Number of choices or experts per program, and number of choices that a program compares them with at a time."""


def sort_by_expert(experts: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as the reference, in int32."""
    choices, k = experts.numel(), experts.shape[1]
    experts = experts.contiguous()
    token, number, row, offsets = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((choices,), (choices,), experts.shape, (count + 1,))
    )
    blocks, bounds, spans, before = triton.cdiv(choices, ROWS), triton.cdiv(count + 1, ROWS), 1, None
    if choices > SPAN:
        spans = triton.cdiv(choices, SPAN)
        counts = torch.empty(count + 1, spans, dtype=torch.int32, device=experts.device)
        _count[(spans, bounds)](experts, counts, choices, spans, first, count, SPAN=SPAN, ROWS=ROWS, OTHERS=OTHERS)
        before = counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts) - counts
        offsets, bounds = before[:, 0].contiguous(), 0
    if blocks + bounds:
        _sort[(blocks + bounds,)](
            experts, token, number, row, offsets, before, choices, blocks, spans, first, count,
            K=k, SPANNED=spans > 1, SPAN=SPAN, ROWS=ROWS, OTHERS=OTHERS,
        )  # fmt: skip
    return token, number, row, offsets


@triton.jit(do_not_specialize=["choices", "spans", "first", "count"])
def _count(
    experts, counts, choices, spans, first, count, SPAN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """Counts how often experts were chosen in a span."""
    span, expert = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    found = tl.zeros((ROWS,), tl.int32)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, choices), OTHERS):
        theirs = _number(experts, start + tl.arange(0, OTHERS), choices, first, count)
        found += tl.sum((theirs[None, :] == expert[:, None]).to(tl.int32), 1)
    tl.store(counts + expert * spans + span, found, mask=expert <= count)


@triton.jit(
    do_not_specialize=["choices", "blocks", "spans", "first", "count"], do_not_specialize_on_alignment=["before"]
)
def _sort(
    experts, token, number, row, offsets, before, choices, blocks, spans, first, count,
    K: tl.constexpr, SPANNED: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The first ``blocks`` programs find the rows of choices. If there is only one span, further programs find the
    offsets."""
    program = tl.program_id(0)
    if program < blocks:
        mine = program * ROWS + tl.arange(0, ROWS)
        value = _number(experts, mine, choices, first, count)
        span = program * ROWS // SPAN
        place = tl.zeros((ROWS,), tl.int32)
        if SPANNED:
            place = tl.load(before + value * spans + span, mask=mine < choices, other=0)
        for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, choices), OTHERS):
            other = start + tl.arange(0, OTHERS)
            theirs = _number(experts, other, choices, first, count)
            counted = (theirs[None, :] == value[:, None]) & (other[None, :] < mine[:, None])
            if not SPANNED:
                counted = counted | (theirs[None, :] < value[:, None])
            place += tl.sum(counted.to(tl.int32), 1)
        tl.store(row + mine, place, mask=mine < choices)
        tl.store(token + place, mine // K, mask=mine < choices)
        tl.store(number + place, value, mask=mine < choices)
    else:
        bound = (program - blocks) * ROWS + tl.arange(0, ROWS)
        below = tl.zeros((ROWS,), tl.int32)
        for start in range(0, choices, OTHERS):
            theirs = _number(experts, start + tl.arange(0, OTHERS), choices, first, count)
            below += tl.sum((theirs[None, :] < bound[:, None]).to(tl.int32), 1)
        tl.store(offsets + bound, below, mask=bound <= count)


@triton.jit
def _number(experts, place, choices, first, count):
    """Returns the expert of each choice minus ``first``, or ``count`` if the expert is on another rank. Past the last
    choice, the result is ``count + 1``."""
    value = tl.load(experts + place, mask=place < choices, other=0).to(tl.int32) - first
    value = tl.where((value < 0) | (value >= count), count, value)
    return tl.where(place < choices, value, count + 1)


SUMMED_COLUMNS = 512


def sum_experts(out: Tensor, row: Tensor, weights: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Same as the reference, but only the sum is rounded."""
    out, row, weights = out.contiguous(), row.contiguous(), weights.contiguous()
    (tokens, k), size = row.shape, out.shape[1]
    summed = torch.empty(tokens, size, dtype=out.dtype, device=out.device)
    if tokens:
        last = None if offsets is None else offsets[-1:]
        _sum[(tokens, triton.cdiv(size, SUMMED_COLUMNS))](
            out, row, weights, last, summed, SIZE=size, K=k, PARTLY=offsets is not None, BLOCK=SUMMED_COLUMNS,
            num_warps=4,
        )  # fmt: skip
    return summed


@triton.jit(do_not_specialize_on_alignment=["last"])
def _sum(
    out, row, weights, last, summed, SIZE: tl.constexpr, K: tl.constexpr, PARTLY: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(row + token * K + j).to(tl.int64)
        size = SIZE
        if PARTLY:
            size = tl.where(place < tl.load(last), SIZE, 0)
        x = tl.load(out + place * SIZE + column, mask=column < size, other=0.0).to(tl.float32)
        total += x * tl.load(weights + token * K + j)
    tl.store(summed + token * SIZE + column, total.to(summed.dtype.element_ty), mask=column < SIZE)
