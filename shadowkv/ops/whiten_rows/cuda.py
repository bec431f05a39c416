"""Rows times the inverse of a Cholesky factor in one launch, ``csrc/kernels/whiten_rows.cuh``."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import block_memory, load_cuda

LARGEST = 256
"""Rows of a matrix that it takes."""

TILE, PITCH = 32, 36
"""Rows and columns of its tiles, and numbers from one row of a tile to the next, as in the kernel."""

available = partial(load_cuda, "whiten_rows", "whiten_rows")


def shared_bytes(rows: int) -> int:
    """Of a thread block that has matrices of so many rows."""
    tiles = -(-rows // TILE)
    return 4 * ((tiles * (tiles + 1) // 2 + tiles) * TILE * PITCH + 2 * tiles * TILE)


def supports(case: Case) -> list[str]:
    """Why the kernel cannot serve a case, whose matrices of queries have a row for each dimension of a head."""
    need = shared_bytes(case.head_dim)
    return [
        *unless(case.head_dim <= LARGEST, f"head dim {case.head_dim} is above {LARGEST}"),
        *unless(
            need <= case.block_memory, f"a thread block has {case.block_memory} bytes of shared memory, not {need}"
        ),
    ]


@cache
def takes(rows: int, device: torch.device) -> bool:
    """Whether matrices of so many rows are computed with there."""
    return device.type == "cuda" and available() and rows <= LARGEST and shared_bytes(rows) <= block_memory(device)


def whiten_rows(rows: Tensor, products: Tensor, shift: float = 0.0) -> Tensor:
    """As the reference, of up to 256 dense rows. Where products are not positive definite, which rounding may have made
    of rows that are alike, some keep what they have of rows before them.

    ``csrc/kernels/whiten_rows.cuh`` takes what is left of a row's square, 2e-6 or less, for rounding.
    """
    out = torch.empty_like(rows)
    torch.ops.shadowkv_cuda.whiten_rows(rows, products, shift, out)
    return out
