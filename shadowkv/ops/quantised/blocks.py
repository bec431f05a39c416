"""Rows in the blocks of GGUF files. The formats are ggml's (``ggml-common.h`` in github.com/ggml-org/ggml)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockForm:
    """Numbers in blocks, each of the same bytes: uint8 [N, B], B a multiple of the bytes of a block. Any bytes are
    valid: scales may be infinite or NaN, and then so are their numbers.

    Attributes:
        name: of ggml's type.
        values: numbers per block.
        bytes: bytes per block.
        unpack_blocks: blocks, uint8 [n, bytes] -> float32 [n, values], bitwise equal to ggml's results.
    """

    name: str
    values: int
    bytes: int
    unpack_blocks: Callable[[Tensor], Tensor]

    def layout(self, columns: int) -> tuple[tuple[int, torch.dtype], ...]:
        """As ``Form.layout``."""
        if columns % self.values:
            raise ValueError(f"blocks of {self.name} have {self.values} numbers, and rows have {columns}")
        return ((columns // self.values * self.bytes, torch.uint8),)

    def columns(self, tensors: tuple[Tensor, ...]) -> int:
        """As ``Form.columns``."""
        (blocks,) = tensors
        if blocks.shape[1] % self.bytes:
            raise ValueError(f"blocks of {self.name} have {self.bytes} bytes, and rows have {blocks.shape[1]}")
        return blocks.shape[1] // self.bytes * self.values

    def unpack(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """As ``Form.unpack``."""
        (blocks,), columns = tensors, self.columns(tensors)
        return self.unpack_blocks(blocks.reshape(-1, self.bytes)).reshape(len(blocks), columns)

    def cut_form(self, columns: int, start: int, stop: int) -> BlockForm | None:
        """As ``Form.cut_form``: whole blocks can be cut out."""
        return None if start % self.values or stop % self.values else self

    def cut(self, tensors: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
        """As ``Form.cut``."""
        (blocks,) = tensors
        return (blocks[:, start // self.values * self.bytes : stop // self.values * self.bytes],)


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


BLOCKS = {
    form.name: form
    for form in (
        BlockForm("Q4_0", 32, 18, _q4_0),
        BlockForm("Q4_1", 32, 20, _q4_1),
        BlockForm("Q8_0", 32, 34, _q8_0),
        BlockForm("Q4_K", 256, 144, _q4_k),
        BlockForm("Q6_K", 256, 210, _q6_k),
    )
}
"""By the names of ggml's types."""
