"""Decode attention over the pages of a window in CUDA: ``paged_attention``'s kernel, which skips tokens at the start of
pages too (``csrc/kernels/paged_attention/``)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shadowkv.ops.extension import cuda_missing
from shadowkv.ops.paged_attention.cuda import attend, supports

__all__ = ["missing", "paged_window_attention", "supports"]

missing = partial(cuda_missing, "paged_window_attention", "paged_window_attention")


def paged_window_attention(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, starts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference; can be captured in a CUDA graph.

    bfloat16 with pages of 64 tokens and a head dim of 64, 96, 128 or 256. What is on the device is not checked: a count
    over 64, or a page past the views that has a token, reads out of bounds. Ids of pages without tokens are
    arbitrary.
    """
    return attend("paged_window_attention", q, k, v, pages, starts, counts)
