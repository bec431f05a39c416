"""Truncated SVDs on a GPU by subspace iteration on Gram matrices. Unlike with ``torch.linalg.eigh``, the host never
waits.

The rows of the basis are iterated together (Halko, Martinsson and Tropp, arXiv:0909.4061, algorithm 4.4). Like
Gram-Schmidt, Cholesky-QR orders the rows by eigenvalue, largest first. Cholesky-QR squares the condition number of its
input, which is too much for float32. So rows are first scaled to length 1. Once they are close to eigenvectors, they
are nearly orthonormal, and their condition number is small. In addition, a shift is added to the diagonal of the rows'
inner products. A second pass of Cholesky-QR corrects the shift's effect (Fukaya et al., arXiv:1809.11085). Each
iteration multiplies by the Gram matrix and then orthonormalises once; only the last two iterations orthonormalise more
than once. In earlier iterations, the rows only have to span the right subspace, for which nearly orthonormal rows are
enough.

A pass uses ``whiten_rows`` in CUDA if that kernel is built and there are at most 256 rows, and PyTorch's Cholesky
factor otherwise. The number of rows is the policy's ``rank``. If the kv heads are divided into groups, it is one
group's share of this rank.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from shadowkv.ops.extension import gpu_missing
from shadowkv.ops.whiten_rows import cuda as kernel
from shadowkv.ops.whiten_rows import reference

ROWS_AT_ONCE = 16384
"""Number of keys, over all matrices, that are centred at a time. Their copy, 32 MB for 1024 dimensions in bfloat16,
stays in the L2 cache."""

FLOOR = 1e-6
"""Each eigenvalue is increased by this share of the sum of all eigenvalues. So keys have a basis even if their rank is
lower than ``rank``, or if all are zero."""

SHIFTS = (1e-5,), (1e-5,), (1e-5,), (1e-5,), (1e-5, 1e-5), (1e-5, 1e-5, 1e-7)
"""One tuple per product with the Gram matrix. A tuple has one shift per orthonormalisation pass after the product. The
shift is added to the diagonal of the matrix of inner products. The diagonal's entries are 1, because rows have length
1. The shift is needed because multiplying by the Gram matrix makes all rows similar if a few directions dominate. With
these shifts, the lost energy is within 2 % of the least possible loss, or within 1e-5 of the total. This holds for rank
160 of 1024, and for squared singular values that fall as slowly as 1 / sqrt(i) or as fast as exp(-i / 15)."""

missing = gpu_missing


def low_rank_basis(keys: Tensor, rank: int, mean: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Same as the reference, except that centred keys are rounded to the keys' dtype. The basis is also rounded to this
    dtype before latents are computed."""
    gram = keys.new_zeros(len(keys), keys.shape[2], keys.shape[2], dtype=torch.float32)
    step = max(1, ROWS_AT_ONCE // len(keys))
    for block in keys.split(step, dim=1):
        centred = block if mean is None else block - mean.to(block.dtype).unsqueeze(1)
        gram += _product(centred.transpose(1, 2), centred)
    gram.nan_to_num_(0.0, 0.0, 0.0)
    total = gram.diagonal(dim1=1, dim2=2).sum(1) / keys.shape[1]
    basis, kept = _leading(gram, rank)
    rounded, largest = basis.to(keys.dtype), basis.new_zeros(len(keys), rank)
    middle = 0 if mean is None else rounded.float() @ mean.float().unsqueeze(2)
    for block in keys.split(step, dim=1):
        latents = _product(rounded, block.transpose(1, 2)) - middle
        largest = torch.maximum(largest, torch.linalg.vector_norm(latents, float("inf"), dim=2))
    return basis, kept * total.unsqueeze(1), largest, total


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the float32 product of matrices, which may have 16 bits."""
    return a @ b if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)


def _leading(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the leading eigenvectors, float32 [M, rank, n], of symmetric matrices ``gram`` [M, n, n], and the share
    of the trace that each eigenvalue has, [M, rank]. Overwrites ``gram``."""
    gram /= gram.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-30)[:, None, None]
    gram.diagonal(dim1=1, dim2=2).add_(FLOOR)
    basis = _start(gram.shape[1], rank, gram.device).expand(len(gram), -1, -1)
    whiten = kernel.whiten_rows if kernel.takes(rank, gram.device) else reference.whiten_rows
    for shifts in SHIFTS:
        basis = basis @ gram
        for shift in shifts:
            basis = whiten(basis, basis @ basis.mT, shift)
    return basis, (((basis @ gram) * basis).sum(2) - FLOOR).clamp(0, 1)


@lru_cache
def _start(n: int, rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(random).Q.T.float().contiguous().to(device)
