"""Stratified draws of chunks in one launch, ``csrc/kernels/draw_chunks.cuh``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.draw_chunks import reference
from shadowkv.ops.extension import block_memory, load_cuda

RUN_BYTES = 5
"""Shared memory that the kernel uses for each chunk that may be selected."""

OTHER_BYTES = 1024


@cache
def available() -> bool:
    """Whether the kernel was built and there is a GPU."""
    if not load_cuda("draw_chunks"):
        return False
    torch.library.register_fake("shadowkv_cuda::draw_chunks", lambda *_: None)
    return True


@cache
def most_chunks(device: torch.device) -> int:
    """The largest k for which a row fits in a multiprocessor's memory: 46,000 on an H200, 20,000 on other GPUs."""
    return (block_memory(device) - OTHER_BYTES) // RUN_BYTES


def draw_chunks(
    selected: Tensor,
    first: int,
    excluded: Tensor | None,
    pages: Tensor,
    num_chunks: Tensor,
    found: Tensor,
    drawn: Tensor,
    seeds: Tensor,
    layer: int,
) -> None:
    """As the reference, which does it where more than ``most_chunks`` may be selected; ``selected`` is contiguous.

    All but ``selected`` is read before the launch that comes before this one is over: nothing that it writes.
    """
    args = (selected, first, excluded, pages, num_chunks, found, drawn, seeds, layer)
    if selected.shape[-1] > most_chunks(selected.device):
        reference.draw_chunks(*args)
    else:
        torch.ops.shadowkv_cuda.draw_chunks(*args)
