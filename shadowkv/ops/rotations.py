"""Fixed random rotations for codecs and sketches. They make the coordinates of any vector nearly Gaussian, so that one
quantizer fits all vectors. These are not RoPE, which is ``apply_rope``."""

from __future__ import annotations

import torch
from torch import Tensor


def random_rotation(dim: int, name: str) -> Tensor:
    """Returns a random orthogonal matrix float32 [dim, dim]. It depends only on ``dim`` and ``name``."""
    gaussian = torch.randn(dim, dim, generator=_generator(dim, name), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float().contiguous()  # the signs make the distribution uniform over all rotations


def random_hadamard(dim: int, name: str, rounds: int = 3) -> Tensor:
    """As ``random_rotation``, but composed of several rounds. Each round multiplies by random signs, then by the
    Hadamard matrix. ``dim`` is a power of two.

    Multiplying a row takes ``rounds * log2(dim)`` additions per entry. After one round, rows with few nonzero entries
    are still far from Gaussian. TurboQuant's ``aither-kvcache`` uses three rounds.
    """
    signs = 2.0 * torch.randint(2, (rounds, dim), generator=_generator(dim, name), dtype=torch.float64) - 1
    rows = torch.eye(dim, dtype=torch.float64)
    for of_round in signs:
        rows = walsh_hadamard(rows * of_round) / dim**0.5
    return rows.float()


def walsh_hadamard(rows: Tensor) -> Tensor:
    """Multiplies rows [..., d] by the Hadamard matrix of entries 1 and -1, in Sylvester's order. d is a power of two.

    First, entries 1 apart are added and subtracted, then entries 2 apart, then 4, and so on. Each result is rounded.
    Results are therefore bitwise equal on all devices.
    """
    step = 1
    while step < rows.shape[-1]:
        first, second = rows.unflatten(-1, (-1, 2, step)).unbind(-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return rows


def _generator(dim: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % 2**63 + dim)
