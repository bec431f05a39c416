"""Attention over selected blocks on Hopper: ``csrc/kernels/attend_blocks_sm90.cuh``."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import load_cuda

DIMS = (64, 128)
"""Head dims that the kernel is made for."""
DTYPES = (torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether the kernel was built and the CUDA device is a Hopper."""
    return load_cuda("attend_blocks_sm90", "attend_blocks_sm90", "attend_packed_sm90") and torch.cuda.get_device_capability() == (9, 0)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case."""
    dims = unless(case.head_dim in DIMS, f"head dim {case.head_dim} is not 64 or 128")
    return unless(case.dtype in DTYPES, f"{case.dtype} is not bfloat16 or float16") + dims


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
    """As the reference; sums are in float32. Can be captured in a CUDA graph.

    bfloat16 or float16 with a head dim of 64 or 128; heads and tokens of q, k and v lie multiples of 16 bytes apart.
    ``indices`` and ``counts`` are read on the device and are not checked: a tile whose list lacks blocks of its own
    positions is masked wrongly, and one that has no block at all is not written. Blocks outside of k and v are zeros.
    """
    out = q.new_empty(q.shape)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)
    scale = q.shape[2] ** -0.5 * math.log2(math.e)
    torch.ops.shadowkv_cuda.attend_blocks_sm90(q, k, v, indices, counts, scale, taken, out)
    return out
