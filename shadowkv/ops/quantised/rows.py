"""Rows of quantised numbers: tensors with a row for each of them, and the form that says what these mean."""

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
    """How the numbers of a row are stored: a value that is hashable, and equal where rows mean the same."""

    @property
    def name(self) -> str:
        """In words, for messages."""
        ...

    def layout(self, columns: int) -> tuple[tuple[int, torch.dtype], ...]:
        """Width and dtype of each tensor, [N, width], that rows of ``columns`` numbers are stored in; raises ValueError
        if such rows cannot be."""
        ...

    def columns(self, tensors: tuple[Tensor, ...]) -> int:
        """K of tensors [N, width]; raises ValueError if their widths do not fit."""
        ...

    def unpack(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Tensors [N, width] as plain numbers, float32 [N, K]; raises ValueError as ``columns``."""
        ...

    def cut_form(self, columns: int, start: int, stop: int) -> Form | None:
        """The form of columns ``start`` to ``stop`` alone; None if these cannot be cut out."""
        ...

    def cut(self, tensors: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
        """Columns ``start`` to ``stop`` of tensors [N, width] in that form, which must not be None."""
        ...


@dataclass(frozen=True)
class QuantisedRows:
    """Rows W [N, K] of quantised numbers.

    Attributes:
        tensors: each [N, its width], as ``form`` lays them out.
        form: what they mean.
    """

    tensors: tuple[Tensor, ...]
    form: Form

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: slice | Tensor) -> QuantisedRows:
        """Rows: a view of a range of them, or copies of those with the indices int64 [n]."""
        return QuantisedRows(tuple(tensor[rows] for tensor in self.tensors), self.form)

    @property
    def columns(self) -> int:
        """K; raises ValueError if the tensors do not fit the form."""
        return self.form.columns(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def cut(self, start: int, stop: int) -> QuantisedRows:
        """Columns ``start`` to ``stop``, [N, stop - start]; raises ValueError if they cannot be cut out."""
        form = self.form.cut_form(self.columns, start, stop)
        if form is None:
            raise ValueError(
                f"columns {start} to {stop} of {self.columns} cannot be cut out of rows in {self.form.name}"
            )
        return QuantisedRows(self.form.cut(self.tensors, start, stop), form)

    def to(self, device: torch.device) -> QuantisedRows:
        """The same rows [N, K] there."""
        return QuantisedRows(tuple(tensor.to(device) for tensor in self.tensors), self.form)

    def tiles(self, numbers: int) -> Iterator[tuple[slice, QuantisedRows]]:
        """Portions of rows [n, K] with about ``numbers`` numbers each, at least one row, and where they are."""
        step = max(1, numbers // max(1, self.columns))
        for start in range(0, len(self), step):
            rows = slice(start, start + step)
            yield rows, self[rows]


def cut_out(row_blocks: Iterable[Tensor | QuantisedRows], start: int, stop: int) -> Iterator[Tensor | QuantisedRows]:
    """Rows ``start`` to ``stop`` of blocks of rows [n, K], one block after the other: views."""
    for block in row_blocks:
        if start < min(stop, len(block)):
            yield block[start:stop] if start > 0 or stop < len(block) else block
        start, stop = max(0, start - len(block)), stop - len(block)


def empty_rows(form: Form, rows: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """Uninitialised tensors [rows, width] of a form; on a CPU in large pages where there are some."""
    empty = _in_large_pages if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE") else torch.empty
    return tuple(empty((rows, width), dtype=dtype, device=device) for width, dtype in form.layout(columns))


def _in_large_pages(size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor of this size: weights are read once a step, and pages of 4 KiB slow that down."""
    if not prod(size):
        return torch.empty(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages knows no such advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def row_bytes(form: Form, columns: int) -> int:
    """Bytes of a row."""
    return sum(prod((width, dtype.itemsize)) for width, dtype in form.layout(columns))
