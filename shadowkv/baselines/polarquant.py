"""PolarQuant INT4: rows coded as levels in 4 bits, with a scale that preserves the norm of the row.

It is not the PolarQuant of arXiv:2502.02617, whose codes are angles. The levels alone do not have the norm of the row.
The stored scale includes the correction (the renormalisation), so a decoder need not sum over the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache import codecs, presets
from shadowkv.kvcache.codecs.lloyd import LloydRows
from shadowkv.kvcache.codecs.packing import Packing
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.ops.codec import CodecId

STEPS = 229
"""Size of the largest level in steps. Kernels that multiply levels as integers round all levels to multiples of a step.
Of all odd numbers up to 255, 229 fits these levels best: the rounding error is 0.16 % of the codec's own error."""


class Halves(Packing):
    """Packs codes of 4 bits. Byte c has dimension c of the row's first half in its low bits, and dimension c of the
    second half in its high bits."""

    bits, row_multiple = 4, 2

    def pack(self, codes: Tensor) -> Tensor:
        low, high = codes.chunk(2, dim=-1)
        return low | high << 4

    def unpack(self, packed: Tensor, dim: int) -> Tensor:
        return torch.cat((packed & 15, packed >> 4), dim=-1)


def renormalised(rows: Tensor, levels: Tensor) -> Tensor:
    """Returns the scale with which the decoded row has the norm of the original row."""
    return levels.norm(dim=-1, keepdim=True).reciprocal()


POLAR_INT4 = LloydRows(
    CodecId.POLAR_INT4, "polar-int4", Halves(), renormalised, None, scale_dtype=torch.float32, steps=STEPS
)


def register() -> None:
    """Registers the codec and the preset."""
    codecs.register(POLAR_INT4)
    presets.register("polar-int4", KVSpec(keys="polar-int4", values="polar-int4"))
