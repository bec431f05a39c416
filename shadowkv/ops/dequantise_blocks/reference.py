"""Rows of quantised blocks in PyTorch. The formats are ggml's (``ggml-common.h`` in github.com/ggml-org/ggml)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockFormat:
    """How numbers are stored in blocks.

    Attributes:
        values: numbers per block.
        bytes: bytes per block.
        unpack: blocks, uint8 [N, bytes] -> float32 [N, values].
    """

    values: int
    bytes: int
    unpack: Callable[[Tensor], Tensor]


def dequantise_blocks(blocks: Tensor, form: str) -> Tensor:
    """Rows as plain numbers.

    Args:
        blocks: uint8 [N, B], B a multiple of the bytes of the format's block. Any bytes are valid: scales may be
            infinite or NaN, and then so are their numbers.
        form: one of ``FORMATS``.

    Returns:
        float32 [N, K], bitwise equal to ggml's results.

    Raises ValueError if rows are not whole blocks.
    """
    known, columns = FORMATS[form], columns_of(blocks, form)
    return known.unpack(blocks.reshape(-1, known.bytes)).reshape(len(blocks), columns)


def columns_of(blocks: Tensor, form: str) -> int:
    """Numbers in a row of blocks, K of ``dequantise_blocks``; raises ValueError if the bytes are not whole blocks.

    Args:
        blocks: uint8 [N, B].
        form: one of ``FORMATS``.
    """
    known = FORMATS[form]
    if blocks.shape[1] % known.bytes:
        raise ValueError(f"blocks of {form} have {known.bytes} bytes, and rows have {blocks.shape[1]}")
    return blocks.shape[1] // known.bytes * known.values


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _halves(blocks, 0, 1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _halves(blocks, 0, 1)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _halves(blocks, 0, 1) + _halves(blocks, 2, 1)


def _q4_k(blocks: Tensor) -> Tensor:
    units, packed = _halves(blocks, 0, 2), blocks[:, 4:16]
    # Scales and minima of 8 runs in 6 bits: the last 4 are stored in 4 bits plus the bits that the first 4 leave free.
    low, last = packed[:, :8].view(-1, 2, 4), torch.stack((packed[:, 8:] & 15, packed[:, 8:] >> 4), 1)
    steps = torch.cat((low & 63, last | (low >> 6) << 4), -1).float() * units[:, :, None]
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 8, 32).float()
    return (codes * steps[:, 0, :, None] - steps[:, 1, :, None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts[:, None] & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208, 1)
    codes = (low | high << 4).view(-1, 16, 16).float() - 32
    return (codes * scales[:, :, None]).flatten(1)


def _nibbles(packed: Tensor) -> Tensor:
    """Lower halves of a row's bytes, then the upper halves."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _halves(blocks: Tensor, start: int, count: int) -> Tensor:
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


FORMATS = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}
"""By the names of ggml's types."""
