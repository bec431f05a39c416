"""Quantized rows in the block formats of GGUF files, as ggml defines them (``ggml-common.h`` in
github.com/ggml-org/ggml)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockForm:
    """A block format. N rows are stored as uint8 [N, B], where B is a multiple of a block's bytes. Any bytes are valid.
    If a scale is infinite or NaN, so are the numbers that it scales.

    Attributes:
        name: name of ggml's type.
        values: numbers per block.
        bytes: bytes per block.
        bits: bits per code.
    """

    name: str
    values: int
    bytes: int
    bits: int

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
        """As ``Form.unpack``, bitwise equal to ggml's results."""
        columns = self.columns(tensors)
        codes, scales, minima = affine_parts(self, tensors[0])
        if minima is None:
            codes = codes.to(torch.int16) - (1 << self.bits - 1)
        groups = scales.shape[1]
        numbers = codes.float().unflatten(1, (groups, columns // max(1, groups))) * scales.unsqueeze(2)
        return (numbers if minima is None else numbers + minima.unsqueeze(2)).flatten(1)

    def cut_form(self, columns: int, start: int, stop: int) -> BlockForm | None:
        """As ``Form.cut_form``. Only whole blocks can be cut out."""
        return None if start % self.values or stop % self.values else self

    def cut(self, tensors: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
        """As ``Form.cut``."""
        (blocks,) = tensors
        return (blocks[:, start // self.values * self.bytes : stop // self.values * self.bytes],)


def affine_parts(form: BlockForm, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the codes, scales and minima of N rows in blocks.

    Args:
        blocks: uint8 [N, B].

    Returns:
        Codes of K numbers per row, uint8 [N, K]; scales of G groups per row, float32 [N, G]; and minima, float32 [N,
        G]. A number is code · scale + minimum. Minima are None if the format has none. A number is then (code - middle
        of the codes) · scale.
    """
    codes, scales, minima = _PARTS[form.name](blocks.reshape(-1, form.bytes))
    rows, each = len(blocks), blocks.shape[1] // form.bytes

    def of_rows(of_blocks: Tensor) -> Tensor:
        return of_blocks.reshape(rows, each * of_blocks.shape[1])

    return of_rows(codes), of_rows(scales), None if minima is None else of_rows(minima)


_Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes, uint8 [n, values], scales and minima, float32 [n, groups], of n blocks."""


def _q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0, 1), None


def _q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0, 1), None


def _q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0, 1), _halves(blocks, 2, 1)


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = _of_groups(blocks)
    return _nibbles(blocks[:, 16:].reshape(-1, 32)).view(-1, 256), scales, minima


def _q5_k(blocks: Tensor) -> _Parts:
    scales, minima = _of_groups(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = blocks[:, None, 16:48] >> shifts[:, None] & 1
    return (low | high << 4).view(-1, 256), scales, minima


def _q6_k(blocks: Tensor) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts[:, None] & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208, 1)
    return (low | high << 4).view(-1, 256), scales, None


_PARTS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _of_groups(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 8 groups of 32 numbers, float32 [n, 8] each."""
    units, packed = _halves(blocks, 0, 2), blocks[:, 4:16]
    # Scales and minima have 6 bits. For the last 4 groups, the lower 4 bits are in the last 4 bytes, and the upper 2
    # bits are in the bytes of the first 4 groups.
    low, last = packed[:, :8].view(-1, 2, 4), torch.stack((packed[:, 8:] & 15, packed[:, 8:] >> 4), 1)
    steps = torch.cat((low & 63, last | (low >> 6) << 4), -1).float() * units[:, :, None]
    return steps[:, 0], -steps[:, 1]


def _nibbles(packed: Tensor) -> Tensor:
    """The lower halves of a row's bytes, then the upper halves."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _halves(blocks: Tensor, start: int, count: int) -> Tensor:
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


BLOCKS = {
    form.name: form
    for form in (
        BlockForm("Q4_0", 32, 18, 4),
        BlockForm("Q4_1", 32, 20, 4),
        BlockForm("Q8_0", 32, 34, 8),
        BlockForm("Q4_K", 256, 144, 4),
        BlockForm("Q5_K", 256, 176, 5),
        BlockForm("Q6_K", 256, 210, 6),
    )
}
"""Block formats by the names of ggml's types."""
