"""Decode attention over the pages of a window in CUDA. It uses the kernel of ``paged_attention``, which can also skip
tokens at the start of a page (``csrc/kernels/paged_attention/``)."""

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
    """Same as the reference. Can be captured in a CUDA graph.

    The dtype is bfloat16, the head dim 64, 96, 128 or 256. ``pages``, ``starts`` and ``counts`` are read on the device
    and not checked: a count over 64, or a wrong page id with a valid token, reads out of bounds. Ids of pages without
    valid tokens are arbitrary.
    """
    return attend("paged_window_attention", q, k, v, pages, starts, counts)
