"""What tests of row codecs measure."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.codec import RowCodec


def rotation_of(codec: RowCodec, dim: int) -> Tensor | None:
    """Its rotation."""
    return codec.rotation_matrix(dim, "keys") if codec.rotated else None


def back(codec: RowCodec, rows: Tensor, state: tuple[Tensor, ...] = ()) -> Tensor:
    """Rows [n, d] coded and decoded."""
    dim = rows.shape[-1]
    return codec.decode(*codec.encode(rows, rotation_of(codec, dim), state), rotation_of(codec, dim), dim, state)


def losses(codec: RowCodec, rows: Tensor, state: tuple[Tensor, ...] = ()) -> tuple[float, float]:
    """Squared distance of decoded rows from rows [n, d], and their product with them, in squared norms of the rows."""
    decoded, squares = back(codec, rows, state), rows.double().square().sum(-1)
    distance = (rows.double() - decoded).square().sum(-1) / squares
    return distance.mean().item(), ((rows.double() * decoded).sum(-1) / squares).mean().item()


def gaussian_rows(count: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
