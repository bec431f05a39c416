"""Fetches of missing chunks across the bus: ``csrc/kernels/fetch_chunks.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cuda
from shadowkv.ops.fetch_chunks import reference
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer

BLOCKS = 16
"""Thread blocks that copy; other kernels run beside them. On an H200 more of them fetch chunks of 2 KiB no faster, and
chunks of 512 B by 3 %."""


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
    blocks: int = BLOCKS,
) -> Tensor:
    """As the reference; can be captured in a CUDA graph. ``blocks`` is the grid of the copying kernel.

    ``host`` may be pinned host memory that is mapped to the device. The kernel takes pages and chunks that start at
    multiples of 16 bytes, dense but for the first axis of ``host``; the reference, which cannot be captured, does the
    rest. Nothing that the buffer's rows or the tables name is checked on the device.
    """
    size = host.element_size()
    row_bytes = host.shape[3] * host.shape[4] * size
    if row_bytes % 16 or host.stride(0) * size % 16 or host.data_ptr() % 16:
        return reference.fetch_chunks(host, pages, slots, selected, buffer)
    entries = torch.empty_like(selected)
    misses = selected.new_empty(selected.numel(), 2)  # addresses from and to
    count = selected.new_empty(1, dtype=torch.int32)
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
        count,
        entries,
    )
    current = torch.cuda.current_stream(selected.device)
    stream = stream or current
    if stream != current:
        stream.wait_stream(current)
        misses.record_stream(stream)
        count.record_stream(stream)
    with torch.cuda.stream(stream):
        torch.ops.shadowkv_cuda.copy_missing_chunks(misses, count, buffer.rows.view(torch.uint8), blocks)
    return entries
