"""Codes in 127ths of the largest entry, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_steps(x, largest):
    """Entries of ``x`` in 127ths of their ``largest``, in which NaN is not seen."""
    code = tl.floor(x * (127.0 / tl.maximum(largest, 1e-30)) + 0.5)
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)


@triton.jit
def step_of(largest, bad):
    """What a code of 1 stands for; NaN where an entry is ``bad``."""
    return tl.where(bad > 0, float("nan"), tl.maximum(largest, 1e-30) / 127.0)
