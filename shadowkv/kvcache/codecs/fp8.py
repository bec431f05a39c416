"""Rows in 8-bit floats with one scale per kv head, as in other serving engines: a baseline."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shadowkv.ops.codec import CodecId, RowCodec

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


class Fp8Rows(RowCodec):
    """The scale of a kv head maps the largest entry of the prompt's rows to the largest 8-bit float. Larger entries of
    later tokens are clipped."""

    id, name = CodecId.FP8, "fp8"

    def row_bytes(self, dim: int) -> int:
        return dim

    def scales(self, dim: int) -> int:
        return 0

    def code_levels(self, dim: int, device: torch.device) -> Tensor:
        """Levels float32 [256], in units of a head's scale."""
        return _floats(device)

    def state_shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"fp8_scale": (1,)}

    def fitting_bytes(self, entries: int) -> int:
        """Bytes of the entries' absolute values, which are in float32 or a smaller dtype."""
        return 4 * entries

    def fit(self, rows: Tensor) -> tuple[Tensor, ...]:
        largest = rows.abs().amax((0, 2), keepdim=True)[0].float()
        return (largest.masked_fill(largest == 0, LARGEST) / LARGEST,)

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        codes = (rows.float() / state[0]).clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
        return codes, torch.empty(*rows.shape[:-1], 0, dtype=self.scale_dtype, device=rows.device)

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        return codes.view(FP8).float() * state[0]


@cache
def _floats(device: torch.device) -> Tensor:
    """The value of each byte, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(FP8).float()
