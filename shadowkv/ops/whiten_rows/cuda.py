"""Rows times the inverse of a Cholesky factor in one CUDA kernel (``csrc/kernels/whiten_rows/``)."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import block_memory, cuda_missing

LARGEST = 256
"""Maximum number of rows of a matrix that the kernel supports."""

TILE, PITCH = 32, 36
"""Rows and columns of the kernel's tiles, and the stride between a tile's rows in elements."""

missing = partial(cuda_missing, "whiten_rows", "whiten_rows")


def shared_bytes(rows: int) -> int:
    """Bytes of shared memory that a thread block needs for matrices of ``rows`` rows."""
    tiles = -(-rows // TILE)
    return 4 * ((tiles * (tiles + 1) // 2 + tiles) * TILE * PITCH + 2 * tiles * TILE)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case. The kernel must support matrices of second moments of queries, which have one
    row per dimension of a head."""
    need = shared_bytes(case.head_dim)
    return [
        *unless(case.head_dim <= LARGEST, f"head dim {case.head_dim} is above {LARGEST}"),
        *unless(
            need <= case.block_memory, f"a thread block has {case.block_memory} bytes of shared memory, not {need}"
        ),
    ]


@cache
def takes(rows: int, device: torch.device) -> bool:
    """Whether the kernel supports matrices of ``rows`` rows on ``device``."""
    return device.type == "cuda" and not missing() and rows <= LARGEST and shared_bytes(rows) <= block_memory(device)


def whiten_rows(rows: Tensor, products: Tensor, shift: float = 0.0) -> Tensor:
    """Same as the reference, for up to 256 contiguous rows.

    Rounding can make products of similar rows not positive definite. Some rows then keep their components along earlier
    rows. If at most 2e-6 of a row's squared norm is left after subtracting its components along earlier rows, the
    kernel treats the rest as rounding error.
    """
    out = torch.empty_like(rows)
    torch.ops.shadowkv_cuda.whiten_rows(rows, products, shift, out)
    return out
