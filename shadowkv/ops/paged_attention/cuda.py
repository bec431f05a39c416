"""Paged decode attention in CUDA. Pages are read in place (``csrc/kernels/paged_attention/``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.attention_results import result_and_parts
from shadowkv.ops.case import Case, unless_one_of
from shadowkv.ops.extension import cuda_missing, multiprocessors
from shadowkv.ops.sequence_rows import SequenceRows

RESIDENT_BLOCKS = {64: 5, 96: 4, 128: 3, 256: 2}
"""Thread blocks of the compiled kernel that a multiprocessor holds at a time, by head dim."""

WIDE_BLOCKS = {64: 3, 96: 2, 128: 2}
"""As ``RESIDENT_BLOCKS``, if a kv head of a sequence has more than ``QUERIES`` queries. A block then has up to twice as
many, and reads keys and values once for all of them. There is no such kernel for head dim 256."""

QUERIES = 8
"""Queries of a product of tensor cores."""

MAX_WAVES = 5
"""Maximum number of waves of thread blocks. More blocks even out ragged lengths, but each block takes time to start and
writes a partial result."""

missing = partial(cuda_missing, "paged_attention", "paged_attention")


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return unless_one_of(case.dtype, (torch.bfloat16,)) + unless_one_of(case.head_dim, RESIDENT_BLOCKS, "head dim")


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor, sequences: SequenceRows | None = None
) -> tuple[Tensor, Tensor]:
    """Same as the reference. Can be captured in a CUDA graph.

    The dtype is bfloat16, the head dim 64, 96, 128 or 256. ``pages`` and ``counts`` are read on the device and not
    checked: a count over 64, or a wrong page id with a nonzero count, reads out of bounds. Page ids with a count of 0
    are arbitrary.
    """
    return attend("paged_attention", q, k, v, pages, counts, sequences=sequences)


def attend(
    op: str, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, *tokens: Tensor, sequences: SequenceRows | None = None
) -> tuple[Tensor, Tensor]:
    """Calls the kernel ``op`` for pages [B, E]. ``tokens``, int64 [B, E] each, give the range of each page's valid
    tokens. Arguments and result otherwise as for ``paged_attention``."""
    dim, heads = q.shape[2], k.shape[1]
    if dim not in RESIDENT_BLOCKS:
        raise ValueError(f"{op} in CUDA supports head dims 64, 96, 128 and 256, not {dim}")
    q = q.contiguous()
    count, starts, most_rows = number_and_rows(q, sequences)
    resident = resident_blocks(q.shape[1] // heads * most_rows, RESIDENT_BLOCKS, WIDE_BLOCKS)
    split = splits(count * heads, pages.shape[1], dim, multiprocessors(q.device), resident)
    out, lse, *parts = result_and_parts(q, split)
    getattr(torch.ops.shadowkv_cuda, op)(q, k, v, pages, *tokens, starts, most_rows, out, lse, *parts)
    return out, lse


def number_and_rows(q: Tensor, sequences: SequenceRows | None) -> tuple[int, Tensor | None, int]:
    """Returns the number of sequences of queries [B, H_q, d], and the kernel's arguments for their rows: the first row
    of each, and the maximum number of rows."""
    if sequences is None:
        return len(q), None, 1
    return len(sequences.starts) - 1, sequences.starts, sequences.most


def resident_blocks(queries: int, narrow: dict[int, int], wide: dict[int, int]) -> dict[int, int]:
    """Returns how many blocks a multiprocessor holds, by head dim, if a kv head of a sequence has ``queries`` queries.
    ``narrow`` and ``wide`` are a kernel's ``RESIDENT_BLOCKS`` and ``WIDE_BLOCKS``."""
    return narrow | wide if queries > QUERIES else narrow


def splits(pairs: int, entries: int, dim: int, processors: int, resident_blocks: Mapping[int, int]) -> int:
    """Returns the number of thread blocks that share the pages of a pair. A pair is a sequence and a kv head; there are
    ``pairs`` of them.

    Blocks come in whole waves. Each block has at least as much work as 45 pages of head dim 128. If there is too little
    work for one wave, each multiprocessor leaves the place of one block empty, which is faster: one sequence of 61440
    tokens takes 62 us on an H200, and 64 us if all places are used.
    """
    resident = resident_blocks[dim]
    waves = min(MAX_WAVES, pairs * entries * dim // (processors * resident * 45 * 128))
    blocks = processors * (resident * waves or max(1, resident - 1))
    return max(1, min(entries, blocks // max(1, pairs)))
