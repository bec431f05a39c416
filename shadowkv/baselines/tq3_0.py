"""``tq3_0``, the block format of a fork of llama.cpp, byte for byte: 32 dimensions in 14 bytes.

A block is multiplied by fixed signs and a Hadamard matrix, divided by its scale, and coded in 3 bits. The scale is the
block's largest absolute entry divided by 2.1573, the largest level. A block's bytes are the lower two bits of all codes
(8 bytes), their upper bits (4 bytes), and the scale in float16. Within a byte, earlier codes have the lower bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shadowkv.kvcache import codecs, presets
from shadowkv.kvcache.codecs.packing import pack_bits, unpack_bits
from shadowkv.kvcache.codecs.tables import constant, mirrored, nearest
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.ops.codec import CodecId, RowCodec
from shadowkv.ops.rotations import walsh_hadamard

BLOCK, BYTES = 32, 14
SIGNS = tuple(1.0 if sign == "+" else -1.0 for sign in "+-++--+-++-+-+--+--++-+--+++--+-")
LEVELS = mirrored((0.2428, 0.7434, 1.3336, 2.1573))
STEPS = 107
"""Size of the largest level in steps, for kernels that multiply levels as signed bytes. The other levels are rounded to
multiples of a step. Of all numbers up to 127, 107 fits these levels best: the rounding error is 0.01 % of the codec's
own error."""
BOUNDARIES = (-1.7455, -1.0385, -0.4931, 0.0, 0.4931, 1.0385, 1.7455)
"""Boundaries between levels. They are the midpoints between neighbouring levels; the outermost two are rounded to four
digits."""
SHRINK = 0.17677669529663688
"""1 / sqrt(32): with this factor, a product with the Hadamard matrix preserves norms."""


class TQ3Rows(RowCodec):
    """Codes rows in blocks of 32 dimensions. The entry of largest magnitude in a block is coded as the outermost level.
    Codes are chosen with the exact scale, and the stored scale is rounded to float16. If ``encode`` rotates rows, a NaN
    makes its whole block zero.

    ``encode`` and ``decode`` rotate rows with a fast Walsh-Hadamard transform. The transform adds in the fork's order,
    so the bytes equal the fork's. ``rotation_matrix`` is for callers that rotate queries or outputs instead.

    Attributes:
        levels: the level of each code, in units of a block's scale.
    """

    id, name, row_multiple, rotated = CodecId.TQ3_0, "tq3_0", BLOCK, True
    levels = LEVELS

    def rotation_matrix(self, dim: int, name: str) -> Tensor:
        block = walsh_hadamard(torch.diag(torch.tensor(SIGNS))) * SHRINK
        return torch.block_diag(*[block] * (dim // BLOCK))

    def row_bytes(self, dim: int) -> int:
        return dim // BLOCK * BYTES

    def scales(self, dim: int) -> int:
        return 0

    def code_levels(self, dim: int, device: torch.device) -> Tensor:
        return constant(self.levels, device)

    def whole_levels(self, dim: int) -> tuple[tuple[int, ...], float] | None:
        step = LEVELS[-1] / STEPS
        return tuple(round(level / step) for level in LEVELS), step

    def encode(self, rows: Tensor, rotation: Tensor | None, state: tuple[Tensor, ...] = ()) -> tuple[Tensor, Tensor]:
        self.check(rows.shape[-1])
        blocks = rows.float().unflatten(-1, (-1, BLOCK))
        if rotation is not None:
            blocks = walsh_hadamard(blocks * constant(SIGNS, rows.device)) * SHRINK
        largest = blocks.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1, keepdim=True)
        # The divisor is a tensor, because a GPU would multiply by the inverse of a plain number.
        scale = largest / torch.full_like(largest, LEVELS[-1])
        inverse = torch.where(scale > 0, scale.reciprocal(), 0)
        codes = nearest(blocks * inverse, constant(BOUNDARIES, rows.device))
        parts = pack_bits(codes & 3, 2), pack_bits(codes >> 2, 1), scale.half().view(torch.uint8)
        return torch.cat(parts, dim=-1).flatten(-2), scale.new_empty(*rows.shape[:-1], 0).half()

    def decode(
        self, codes: Tensor, scale: Tensor, rotation: Tensor | None, dim: int, state: tuple[Tensor, ...] = ()
    ) -> Tensor:
        self.check(dim)
        low, high, gamma = codes.unflatten(-1, (-1, BYTES)).split((8, 4, 2), dim=-1)
        index = unpack_bits(low, 2) | unpack_bits(high, 1) << 2
        blocks = gamma.contiguous().view(torch.float16).float() * constant(self.levels, codes.device)[index.int()]
        if rotation is not None:
            blocks = walsh_hadamard(blocks) * (SHRINK * constant(SIGNS, codes.device))
        return blocks.flatten(-2)


def register() -> None:
    """Registers the codec and the preset."""
    codecs.register(TQ3Rows())
    presets.register("tq3_0", KVSpec(keys="tq3_0", values="tq3_0"))
