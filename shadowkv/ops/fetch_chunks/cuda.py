"""Fetches missing chunks from host memory in CUDA (``csrc/kernels/fetch_chunks/``)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import cuda_missing
from shadowkv.ops.fetch_chunks.reference import SHORT_ROW, ChunkBuffer

BUCKETS = 512
"""Number of equal parts of host memory. Copies of short rows are ordered by the part that they read."""

BLOCKS = 16
"""Thread blocks that copy. On an H200, more blocks do not fetch chunks of 2 KiB faster."""

BLOCKS_OF_SHORT_ROWS = 32
"""Thread blocks that copy short rows. These blocks are half as large."""

BLOCKS_OVERLAPPED = 8
"""Thread blocks that copy short rows while other work runs. The other work's address translations queue behind those of
all copies in flight, so more blocks slow the other work down. On an H200, a step whose micro-batches fetch 65 x 8 x 34
chunks of 384 B per layer takes 38.2 ms with 8 blocks and 42.4 ms with 16. With 4 blocks, the step waits for the copies
and takes 49.5 ms."""

missing = partial(cuda_missing, "fetch_chunks", "find_missing_chunks", "copy_missing_chunks")


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    return unless(case.fetched_bytes % 16 == 0, f"chunks of {case.fetched_bytes} bytes are no multiple of 16")


def fetch_chunks(
    host: Tensor,
    pages: Tensor,
    slots: Tensor,
    selected: Tensor,
    buffer: ChunkBuffer,
    stream: torch.cuda.Stream | None = None,
    overlapped: bool = False,
) -> Tensor:
    """Same as the reference. Can be captured in a CUDA graph.

    ``host`` may be pinned host memory that is mapped to the device. Pages and chunks start at multiples of 16 bytes,
    and ``host`` is contiguous but for its first axis. Page ids, slots and entries are not checked on the device.
    """
    entries = torch.empty_like(selected)
    if not selected.numel():
        return entries
    ordered = host.shape[3] * host.shape[4] * host.element_size() < SHORT_ROW
    misses = selected.new_empty(1 + ordered, selected.numel(), 2)  # source and target addresses, unordered and ordered
    counts = selected.new_empty(1 + 2 * BUCKETS, dtype=torch.int32)
    bucket_bits = _bucket_bits(host) if ordered else -1
    torch.ops.shadowkv_cuda.find_missing_chunks(
        host.view(torch.uint8),
        pages,
        slots,
        selected,
        buffer.rows.view(torch.uint8),
        buffer.owner,
        buffer.entry,
        buffer.used,
        buffer.step,
        buffer.counters,
        misses,
        counts,
        bucket_bits,
        entries,
    )
    current = torch.cuda.current_stream(selected.device)
    stream = stream or current
    if stream != current:
        stream.wait_stream(current)
        misses.record_stream(stream)
        counts.record_stream(stream)
    with torch.cuda.stream(stream):
        rows = buffer.rows.view(torch.uint8)
        blocks = (BLOCKS_OVERLAPPED if overlapped else BLOCKS_OF_SHORT_ROWS) if ordered else BLOCKS
        torch.ops.shadowkv_cuda.copy_missing_chunks(misses, counts, bucket_bits, rows, blocks)
    return entries


def scratch_bytes(chunks: int, row_bytes: int) -> int:
    """Returns the bytes on the device that a call needs until its copies are done. ``chunks`` is the number of selected
    chunks over all rows and heads, ``row_bytes`` the bytes of a chunk.

    The bytes hold the entries and the addresses of missing chunks. Short rows have the addresses twice: unordered and
    ordered. ``counts``, at most 4 KiB, is not included.
    """
    return chunks * 8 * (1 + 2 * (1 + (row_bytes < SHORT_ROW)))


def _bucket_bits(host: Tensor) -> int:
    """Returns the number of address bits within a bucket, if ``BUCKETS`` buckets cover ``host``."""
    return (host.shape[0] * host.stride(0) * host.element_size() // BUCKETS).bit_length()
