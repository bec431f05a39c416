"""Rows as codes of 4, 3 or 2 bits: rotated, divided into equal steps, packed as the CUDA kernel reads them.

After a rotation the entries of a row are close to Gaussian with deviation ||x|| / sqrt(d), whatever the row
(TurboQuant, arXiv:2504.19874), so one step per width is optimal for all rows.

Layout. Dimension 16 i + 8 half + g belongs to lane g = 0 .. 7, and each lane's bytes lie together. A byte holds, from
its low bits up, the codes of one i at 4 bits (half 0, half 1) and of two consecutive i at 2 bits. 3 bits are the plane
of the lower two bits and behind it, for all lanes, the plane of the upper ones: four consecutive i in a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = {4: 0.3352, 3: 0.5860, 2: 0.9957}
"""Optimal step of a uniform quantiser of a unit Gaussian, by width (Max, 1960)."""

_PLANES = {4: (4,), 3: (2, 1), 2: (2,)}


def quantise_rows(x: Tensor, rotation: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of rows [..., d] after multiplication by ``rotation`` float32 [d, d].

    Returns:
        codes uint8 [..., d * bits / 8] and scale float16 [...], the least-squares step of each row, 0 for a zero row.

    Raises:
        ValueError: no such width, or d is not a multiple of 16 (4 bits), 32 (2 bits) or 64 (3 bits).
    """
    _check(bits, x.shape[-1])
    y = x.float() @ rotation
    step = STEPS[bits] * y.norm(dim=-1, keepdim=True) / y.shape[-1] ** 0.5
    middle = 2 ** (bits - 1)
    levels = torch.floor(y / step.masked_fill(step == 0, 1)).clamp(-middle, middle - 1)
    centres = levels + 0.5
    scale = (y * centres).sum(-1) / centres.square().sum(-1)
    return _pack((levels + middle).to(torch.uint8), bits), scale.half()


def dequantise_rows(codes: Tensor, scale: Tensor, rotation: Tensor | None, bits: int, dim: int) -> Tensor:
    """Rows float32 [..., dim] of ``codes`` [..., dim * bits / 8] and ``scale`` [...], rotated back by ``rotation``.

    Raises:
        ValueError: as ``quantise_rows``.
    """
    _check(bits, dim)
    y = (_unpack(codes, bits, dim).float() - (2**bits - 1) / 2) * scale.float().unsqueeze(-1)
    return y if rotation is None else y @ rotation.T


def row_multiple(bits: int) -> int:
    """What the dimensions of a row must be a multiple of."""
    return 64 // min(_PLANES[bits])


def _check(bits: int, dim: int) -> None:
    if bits not in _PLANES:
        raise ValueError(f"rows are coded in 4, 3 or 2 bits, not {bits}")
    if dim % row_multiple(bits):
        raise ValueError(f"{bits}-bit rows need a multiple of {row_multiple(bits)} dimensions, not {dim}")


def _pack(codes: Tensor, bits: int) -> Tensor:
    lanes = codes.unflatten(-1, (-1, 8)).transpose(-1, -2)  # [..., g, 2 i + half]
    planes, shift = [], 0
    for width in _PLANES[bits]:
        part = ((lanes >> shift) & (2**width - 1)).unflatten(-1, (-1, 8 // width))
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
        planes.append((part << places).sum(-1, dtype=torch.uint8).flatten(-2))
        shift += width
    return torch.cat(planes, dim=-1)


def _unpack(codes: Tensor, bits: int, dim: int) -> Tensor:
    lanes = codes.new_zeros(*codes.shape[:-1], 8, dim // 8)
    shift = 0
    for width, plane in zip(_PLANES[bits], codes.split([dim * width // 8 for width in _PLANES[bits]], dim=-1)):
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
        part = (plane.unflatten(-1, (8, -1)).unsqueeze(-1) >> places) & (2**width - 1)
        lanes |= part.flatten(-2) << shift
        shift += width
    return lanes.transpose(-1, -2).flatten(-2)
