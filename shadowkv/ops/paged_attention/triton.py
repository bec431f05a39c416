"""Paged decode attention in Triton, for heads of 512 dimensions, which the CUDA kernel's registers cannot hold.

A program takes every n-th page of one sequence for one kv head, with all query heads of this kv head. It attends to
half a page at a time, so that the keys and values of two steps fit into shared memory.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shadowkv.ops.attend_coded.triton import store_part, thread_blocks, weighed_tokens
from shadowkv.ops.attention_results import attend_to_nothing, merge_parts
from shadowkv.ops.case import Case, unless, unless_one_of
from shadowkv.ops.page import PAGE
from shadowkv.ops.sequence_rows import SequenceRows
from shadowkv.ops.triton_sizes import dot_size

DIMS = (512,)
"""Head dims that the kernel serves. It takes others, too, but for those there are faster kernels, or none was compared
with this one."""

TOGETHER = 32
"""Tokens that are attended to at a time."""

BLOCK_BYTES = 148496
"""Bytes of shared memory of a thread block, as compiled for compute capability 9.0."""


def supports(case: Case) -> list[str]:
    """Why this kernel cannot serve a case."""
    memory = f"a block needs {BLOCK_BYTES} bytes of shared memory, and can have {case.block_memory}"
    return [
        *unless_one_of(case.dtype, (torch.bfloat16, torch.float16)),
        *unless_one_of(case.head_dim, DIMS, "head dim"),
        *unless(case.head_dim not in DIMS or case.block_memory >= BLOCK_BYTES, memory),
    ]


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor, sequences: SequenceRows | None = None
) -> tuple[Tensor, Tensor]:
    """Same as the reference. Can be captured in a CUDA graph after a first call.

    The rows of a head in a page are contiguous. ``pages`` and ``counts`` are read on the device and not checked: a
    count over 64, or a wrong page id with a nonzero count, reads out of bounds. Page ids with a count of 0 are
    arbitrary. Each row reads its pages, also if ``sequences`` has several.
    """
    (batch, query_heads, dim), heads, entries = q.shape, k.shape[1], pages.shape[1]
    if not batch or not entries:
        return attend_to_nothing(q)
    group, parts = query_heads // heads, thread_blocks(batch * heads, entries, q.device)
    columns = dot_size(dim)
    out = torch.empty(batch, heads, parts, group, columns, dtype=torch.float32, device=q.device)
    lse = out.new_empty(batch, heads, parts, group)
    _attend_pages[(batch * heads, parts)](
        q.contiguous(), k, v, pages, counts, out, lse, *k.stride()[:2], *v.stride()[:2],
        pages.stride(0), counts.stride(0), entries, math.log2(math.e) / math.sqrt(dim),
        HEADS=heads, GROUP=group, GROUP_BLOCK=dot_size(group), DIM=dim, COLUMNS=columns, TOGETHER=TOGETHER, PAGE=PAGE,
        num_warps=8, num_stages=5,  # two steps are copied ahead
    )  # fmt: skip
    joined, total = merge_parts(out, lse)
    return joined[..., :dim].flatten(1, 2).to(q.dtype), total.flatten(1, 2)


@triton.jit(
    do_not_specialize=["pages_row", "counts_row", "entries"],
    do_not_specialize_on_alignment=["pages", "counts"],
)
def _attend_pages(
    q, k, v, pages, counts, out, lse, k_page, k_head, v_page, v_head, pages_row, counts_row, entries, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attends to the pages ``part``, ``part + parts``… of one kv head of a row."""
    unit, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, head = unit // HEADS, unit % HEADS
    member, column, place = tl.arange(0, GROUP_BLOCK), tl.arange(0, COLUMNS), tl.arange(0, TOGETHER)
    in_head = (column < DIM)[None, :]
    asked = tl.load(
        q + (unit * GROUP + member[:, None]) * DIM + column[None, :], mask=(member < GROUP)[:, None] & in_head, other=0
    )
    peak = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, COLUMNS], tl.float32)
    STEPS: tl.constexpr = PAGE // TOGETHER  # of a page
    for step in range(part * STEPS, tl.cdiv(entries - part, parts) * STEPS + part * STEPS):
        entry = part + (step - part * STEPS) // STEPS * parts
        token = step % STEPS * TOGETHER + place
        count = tl.load(counts + row * counts_row + entry)
        lives = token < count
        page = tl.where(count > 0, tl.load(pages + row * pages_row + entry), 0)
        at, there = token[:, None] * DIM + column[None, :], lives[:, None] & in_head
        keys = tl.load(k + page * k_page + head * k_head + at, mask=there, other=0)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(lives[None, :], scores, float("-inf"))
        values = tl.load(v + page * v_page + head * v_head + at, mask=there, other=0)
        peak, total, faded, weights = weighed_tokens(scores, peak, total)
        acc = acc * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    target = (unit * parts + part) * GROUP
    store_part(out, lse, target, peak, total, acc, GROUP, GROUP_BLOCK, COLUMNS)
