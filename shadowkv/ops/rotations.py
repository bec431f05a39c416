"""Fixed rotations of codecs and sketches, Hadamard or uniform (RoPE is ``apply_rope``): they make the coordinates of
any vector look Gaussian, so that one quantiser fits all."""

from __future__ import annotations

import torch
from torch import Tensor


def random_rotation(dim: int, name: str) -> Tensor:
    """An orthogonal matrix float32 [dim, dim] that depends on ``dim`` and ``name`` alone."""
    gaussian = torch.randn(dim, dim, generator=_generator(dim, name), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float().contiguous()  # the sign makes it uniform over all rotations


def random_hadamard(dim: int, name: str, rounds: int = 3) -> Tensor:
    """Same as ``random_rotation``, from rounds of random signs and the Hadamard matrix. ``dim`` is a power of two.

    Rows can be multiplied by it in ``rounds`` log2(dim) additions per entry; after one round, rows with few nonzero
    entries are still far from Gaussian (TurboQuant's ``aither-kvcache`` uses three).
    """
    signs = 2.0 * torch.randint(2, (rounds, dim), generator=_generator(dim, name), dtype=torch.float64) - 1
    rows = torch.eye(dim, dtype=torch.float64)
    for of_round in signs:
        rows = walsh_hadamard(rows * of_round) / dim**0.5
    return rows.float()


def walsh_hadamard(rows: Tensor) -> Tensor:
    """Rows [..., d], d a power of two, times the Hadamard matrix in Sylvester's order, whose entries are 1 and -1.

    Butterflies with steps 1, 2, 4, ..., each rounded separately, so that results are bitwise equal everywhere.
    """
    step = 1
    while step < rows.shape[-1]:
        first, second = rows.unflatten(-1, (-1, 2, step)).unbind(-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return rows


def _generator(dim: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % 2**63 + dim)
