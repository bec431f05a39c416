"""Block sizes that Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from shadowkv.ops.page import PAGE

TOKENS = tl.constexpr(PAGE)
"""``PAGE`` as a constant that kernels can use."""

LEAST = 16
"""Least size of a dimension in ``tl.dot``."""

LARGEST_HEAD = 256
"""Largest head dim of kernels that hold the keys or values of a page, or more, in shared memory."""


def dot_size(size: int) -> int:
    """Returns the block size in ``tl.dot`` for ``size`` rows or columns: the next power of two, at least ``LEAST``."""
    return max(LEAST, triton.next_power_of_2(size))
