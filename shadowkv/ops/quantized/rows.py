"""``QuantizedRows``: rows of a quantized weight matrix, as tensors and the form that interprets them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Form(Protocol):
    """How the numbers of a row are stored. Forms are hashable and compare by value."""

    @property
    def name(self) -> str:
        """The form's name for messages."""
        ...

    def layout(self, columns: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Width and dtype of each tensor [N, width] that stores rows of ``columns`` numbers. Raises ValueError if the
        form cannot store such rows."""
        ...

    def columns(self, tensors: tuple[Tensor, ...]) -> int:
        """Returns K, the numbers per row, of rows stored in tensors [N, width]. Raises ValueError if the widths do not
        fit."""
        ...

    def unpack(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Dequantizes tensors [N, width] to float32 [N, K]. Raises ValueError if the widths do not fit."""
        ...

    def cut_form(self, columns: int, start: int, stop: int) -> Form | None:
        """The form of columns ``start`` to ``stop``; None if they cannot be cut out."""
        ...

    def cut(self, tensors: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
        """Returns columns ``start`` to ``stop`` of tensors [N, width], in the form that ``cut_form`` returns. Call this
        only if ``cut_form`` returns a form."""
        ...


@dataclass(frozen=True)
class QuantizedRows:
    """Quantized rows [N, K] of a weight matrix.

    Attributes:
        tensors: each [N, width], as ``form.layout`` defines them.
        form: how the tensors store the rows.
    """

    tensors: tuple[Tensor, ...]
    form: Form

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: slice | Tensor) -> QuantizedRows:
        """A view of a range of rows, or copies of the rows with the indices int64 [n]."""
        return QuantizedRows(tuple(tensor[rows] for tensor in self.tensors), self.form)

    @property
    def columns(self) -> int:
        """K, the numbers per row. Raises ValueError if the tensors do not fit the form."""
        return self.form.columns(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def cut(self, start: int, stop: int) -> QuantizedRows:
        """Columns ``start`` to ``stop``, [N, stop - start]. Raises ValueError if they cannot be cut out."""
        form = self.form.cut_form(self.columns, start, stop)
        if form is None:
            raise ValueError(
                f"columns {start} to {stop} of {self.columns} cannot be cut out of rows in {self.form.name}"
            )
        return QuantizedRows(self.form.cut(self.tensors, start, stop), form)

    def to(self, device: torch.device) -> QuantizedRows:
        """The same rows [N, K] on ``device``."""
        return QuantizedRows(tuple(tensor.to(device) for tensor in self.tensors), self.form)

    def tiles(self, numbers: int) -> Iterator[tuple[slice, QuantizedRows]]:
        """Yields consecutive portions [n, K], each with its range of rows. A portion has about ``numbers`` numbers, but
        at least one row."""
        step = max(1, numbers // max(1, self.columns))
        for start in range(0, len(self), step):
            rows = slice(start, start + step)
            yield rows, self[rows]


def cut_out(row_blocks: Iterable[Tensor | QuantizedRows], start: int, stop: int) -> Iterator[Tensor | QuantizedRows]:
    """Yields rows ``start`` to ``stop`` of consecutive row blocks [n, K], as one view per block."""
    for block in row_blocks:
        if start < min(stop, len(block)):
            yield block[start:stop] if start > 0 or stop < len(block) else block
        start, stop = max(0, start - len(block)), stop - len(block)


def empty_rows(form: Form, rows: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns uninitialised tensors [rows, width] of a form. On a CPU, they are in large memory pages if Linux supports
    such pages."""
    empty = _in_large_pages if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE") else torch.empty
    return tuple(empty((rows, width), dtype=dtype, device=device) for width, dtype in form.layout(columns))


def _in_large_pages(size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor in large memory pages. A step reads all weights once, and memory pages of 4 KiB
    would slow this down."""
    if not prod(size):
        return torch.empty(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # Linux without large pages rejects the advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def row_bytes(form: Form, columns: int) -> int:
    """Bytes of a row of ``columns`` numbers in ``form``."""
    return sum(prod((width, dtype.itemsize)) for width, dtype in form.layout(columns))
