"""Fixed random rotations that make the coordinates of any vector look Gaussian, so that one quantiser fits all."""

from __future__ import annotations

import torch
from torch import Tensor


def random_rotation(dim: int, name: str) -> Tensor:
    """An orthogonal matrix float32 [dim, dim] that depends on ``dim`` and ``name`` alone."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % 2**63 + dim)
    gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float().contiguous()  # the sign makes it uniform over all rotations
