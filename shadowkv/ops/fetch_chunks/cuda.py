"""Fetches of missing chunks across the bus: ``csrc/kernels/fetch_chunks.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cuda
from shadowkv.ops.fetch_chunks import reference
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer

BUCKETS = 512
"""Parts of the host's memory in whose order short rows are copied."""

BLOCKS = 16
"""Thread blocks that copy. On an H200 more of them fetch chunks of 2 KiB no faster."""

BLOCKS_OF_SHORT_ROWS = 32
"""The same of short rows; these blocks are half as large."""

BLOCKS_OVERLAPPED = 8
"""The same beside work that takes as long, whose own translations of addresses wait behind all that copies have under
way: a step whose micro-batches fetch 65 x 8 x 34 chunks of 384 B a layer takes 38.2 ms with 8 blocks on an H200, 42.4
with 16, and 49.5 with 4, whose copies it waits for."""


@cache
def available() -> bool:
    """Whether the op was built and there is a CUDA device."""
    if not load_cuda("fetch_chunks"):
        return False
    for name in ("find_missing_chunks", "copy_missing_chunks"):
        torch.library.register_fake(f"shadowkv_cuda::{name}", lambda *_: None)
    return True


def fetch_chunks(
    host: Tensor,
    pages: Tensor,
    slots: Tensor,
    selected: Tensor,
    buffer: ChunkBuffer,
    stream: torch.cuda.Stream | None = None,
    overlapped: bool = False,
    blocks: int | None = None,
) -> Tensor:
    """As the reference; can be captured in a CUDA graph. ``blocks`` is the grid of the copying kernel; None chooses.

    ``host`` may be pinned host memory that is mapped to the device. The kernel takes pages and chunks that start at
    multiples of 16 bytes, dense but for the first axis of ``host``; the reference, which cannot be captured, does the
    rest. Nothing that the buffer's rows or the tables name is checked on the device.
    """
    size = host.element_size()
    row_bytes = host.shape[3] * host.shape[4] * size
    if row_bytes % 16 or host.stride(0) * size % 16 or host.data_ptr() % 16:
        return reference.fetch_chunks(host, pages, slots, selected, buffer)
    entries = torch.empty_like(selected)
    ordered = row_bytes < reference.SHORT_ROW
    misses = selected.new_empty(1 + ordered, selected.numel(), 2)  # addresses from and to, as found and in order
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
        chosen = (BLOCKS_OVERLAPPED if overlapped else BLOCKS_OF_SHORT_ROWS) if ordered else BLOCKS
        torch.ops.shadowkv_cuda.copy_missing_chunks(misses, counts, bucket_bits, rows, blocks or chosen)
    return entries


def _bucket_bits(host: Tensor) -> int:
    """How many bits of an address count within one of the buckets that cover ``host``."""
    return (host.shape[0] * host.stride(0) * host.element_size() // BUCKETS).bit_length()
