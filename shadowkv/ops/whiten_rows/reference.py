"""Rows times the inverse of a Cholesky factor in PyTorch. On a GPU the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor

# A library factors the matrices. It was not tried in a graph.
NOT_IN_GRAPHS = True


def whiten_rows(rows: Tensor, products: Tensor, shift: float = 0.0) -> Tensor:
    """Returns L⁻¹ D x for each of M matrices x. D is the diagonal matrix with which D P D has ones on the diagonal. L
    is the Cholesky factor of D P D, after ``shift`` was added to the diagonal.

    If P holds the products of the rows of x, the result has orthonormal rows, and its row i is in the span of rows 0 to
    i of x (Cholesky-QR). If x is the identity, the result is the inverse of the Cholesky factor of P.

    Args:
        rows: x, float32 [M, r, n].
        products: P, float32 [M, r, r], positive semidefinite. A 0 on the diagonal is treated as 1e-24.
        shift: compensates for rounding if P is nearly singular (arXiv:1809.11085).

    Returns:
        float32 [M, r, n].
    """
    scale = products.diagonal(dim1=1, dim2=2).sqrt().clamp(min=1e-12).reciprocal().unsqueeze(2)
    scaled = products * scale * scale.mT
    scaled.diagonal(dim1=1, dim2=2).add_(shift)
    return torch.linalg.solve_triangular(torch.linalg.cholesky_ex(scaled)[0], rows * scale, upper=False)
