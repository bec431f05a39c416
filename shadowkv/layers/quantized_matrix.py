"""Matrices and projections that stay quantized as in the checkpoint. Blocks of rows can have different forms (``Form``:
how the numbers of a row are stored)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.computing import Computing
from shadowkv.ops.quantized.rows import Form, QuantizedRows, cut_out, empty_rows
from shadowkv.ops.quantized_matmul.humming import PackedExperts, PackedRows, pack_experts, pack_rows


@dataclass(frozen=True)
class RowBlock:
    """Rows of a matrix that are stored in the same form.

    Attributes:
        rows: number of rows.
        form: form of the quantized rows; None for unquantized ones.
    """

    rows: int
    form: Form | None


class QuantizedMatrix(Computing):
    """W [N, K], which stays quantized. Its rows are uninitialised until a loader fills them.

    Args:
        columns: K.
        row_blocks: the row blocks, in order. Neighbours with the same form are merged.
        dtype: dtype of unquantized rows, and of the results of ``look_up``.

    Attributes:
        parts: the tensors of all row blocks, in order. A quantized block has the tensors of its form, an unquantized
            one has one tensor [rows, K].
        packed: pieces of rows in the layout of GPU products, each with the number of its first row; None before
            ``pack``.
        whole: one more piece, with all rows, for products with all rows. None if ``packed`` has only one piece, or if
            the rows have several forms.
        experts: all rows as experts' matrices in the layout of GPU products; None before ``pack_experts``.
        packed_parts: tensors of all packed pieces.
    """

    PARTS: ClassVar[str] = ".parts."
    """Part of the names of the parameters that a loader fills."""

    calls = ("dequantize_rows", "quantized_matmul")

    def __init__(
        self, columns: int, row_blocks: Iterable[RowBlock], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        grouped = groupby(row_blocks, lambda block: block.form)
        self.row_blocks = tuple(RowBlock(sum(block.rows for block in alike), form) for form, alike in grouped)
        self.columns, self.dtype = columns, dtype
        self._counts = [1 if block.form is None else len(block.form.layout(columns)) for block in self.row_blocks]
        self.parts = nn.ParameterList(
            nn.Parameter(tensor, requires_grad=False)
            for block in self.row_blocks
            for tensor in self._empty(block, device)
        )
        self.packed: list[tuple[int, Tensor | PackedRows]] | None = None
        self.whole: PackedRows | None = None
        self.experts: PackedExperts | None = None
        self.packed_parts = nn.ParameterList()

    def _empty(self, block: RowBlock, device: torch.device) -> tuple[Tensor, ...]:
        if block.form is not None:
            return empty_rows(block.form, block.rows, self.columns, device)
        return (torch.empty(block.rows, self.columns, dtype=self.dtype, device=device),)

    @property
    def num_values(self) -> int:
        """N x K, the number of weights."""
        return self.columns * self.num_rows

    @property
    def num_rows(self) -> int:
        """N, the number of rows."""
        return sum(block.rows for block in self.row_blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parameters())

    def stored(self, start: int, stop: int) -> Iterator[Tensor | QuantizedRows]:
        """Views of the stored rows ``start`` to ``stop``, one for each row block."""
        return cut_out(self._stored_row_blocks(), start, stop)

    def _stored_row_blocks(self) -> Iterator[Tensor | QuantizedRows]:
        tensors = iter(self.parts)
        for block, count in zip(self.row_blocks, self._counts, strict=True):
            parts = tuple(next(tensors) for _ in range(count))
            yield parts[0] if block.form is None else QuantizedRows(parts, block.form)

    def pack(self, borders: Iterable[int] = (), *, looked_up: bool = False) -> list[PackedRows]:
        """Packs the filled rows for GPU products. Returns the packed pieces.

        Args:
            borders: first rows of ranges that are also multiplied without the other rows. A packed piece cannot be cut.
                If there are borders, rows of one form are therefore stored twice: in pieces between the borders, and in
                ``whole``.
            looked_up: whether ``look_up`` is also called. The unpacked rows are then kept.
        """
        cuts = sorted({*borders, self.num_rows})
        pieces, begin = list[tuple[int, Tensor | PackedRows]](), 0
        for cut in cuts:
            for rows in self.stored(begin, cut):
                pieces.append((begin, rows if isinstance(rows, Tensor) else pack_rows(rows)))
                begin += len(rows)
        self.packed = pieces
        packed = [rows for _, rows in pieces if isinstance(rows, PackedRows)]
        if len(packed) > 1 and len(self.row_blocks) == 1:
            (rows,) = self._stored_row_blocks()
            assert isinstance(rows, QuantizedRows)
            self.whole = pack_rows(rows)
            packed.append(self.whole)
        self.packed_parts = _parameters(tensor for rows in packed for tensor in rows.tensors.values())
        if not looked_up:
            self.parts = _parameters(rows for _, rows in pieces if isinstance(rows, Tensor))
        return packed

    def pack_experts(self, experts: int, total_experts: int | None = None) -> PackedExperts:
        """Packs the rows for ``of_experts``. The rows must have one form and be stored expert by expert. ``experts`` is
        the number of experts on this rank. ``total_experts`` is the number on all ranks; None if this rank has all."""
        (rows,) = self._stored_row_blocks()
        assert isinstance(rows, QuantizedRows)
        self.experts = pack_experts(rows, experts, total_experts)
        self.packed_parts, self.parts = _parameters(self.experts.tensors.values()), nn.ParameterList()
        return self.experts

    @property
    def of_experts(self) -> list[Tensor | QuantizedRows] | PackedExperts:
        """All rows as products of experts take them: packed by ``pack_experts``, or as stored."""
        return [*self._stored_row_blocks()] if self.experts is None else self.experts

    def _multiplied(self, start: int, stop: int) -> list[Tensor | QuantizedRows | PackedRows]:
        """Returns rows ``start`` to ``stop`` as products take them: the packed rows, or before ``pack`` the stored
        rows."""
        if self.packed is None:
            return list(self.stored(start, stop))
        if self.whole is not None and start == 0 and stop == self.num_rows:
            return [self.whole]
        pieces = [rows for begin, rows in self.packed if start <= begin < stop]
        assert sum(map(len, pieces)) == min(stop, self.num_rows) - start, f"rows {start} to {stop} are in no pieces"
        return [*pieces]

    def forward(self, x: Tensor, start: int, stop: int) -> Tensor:
        """x Wᵀ for rows ``start`` to ``stop``: [T, K] -> [T, stop - start] in the dtype of ``x``."""
        products = [
            F.linear(x, rows) if isinstance(rows, Tensor)
            # The op is declared for ``QuantizedRows``, but also takes ``PackedRows``.
            else self.ops.quantized_matmul(x, cast(QuantizedRows, rows))
            for rows in self._multiplied(start, stop)
        ]  # fmt: skip
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def look_up(self, index: Tensor) -> Tensor:
        """Returns the dequantized rows [T, K] with the numbers ``index`` int64 [T]. The matrix must have one row
        block."""
        (rows,) = self.stored(0, self.row_blocks[0].rows)
        found = rows[index]
        return self.ops.dequantize_rows(found).to(self.dtype) if isinstance(found, QuantizedRows) else found


def _parameters(tensors: Iterable[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in tensors)


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b over packed tokens, with W quantized. The weights are uninitialised until a loader fills them.

    ``borders`` are the first outputs of ranges that are also computed without the other outputs (``rows``).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        row_blocks: Iterable[RowBlock],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        borders: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.out_features, self.borders = out_features, borders
        self.weight = QuantizedMatrix(in_features, row_blocks, dtype=dtype, device=device)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        else:
            self.bias = None

    @property
    def packed_twice(self) -> int:
        """Bytes of the rows that ``pack`` will store twice, in the checkpoint's format."""
        return self.weight.nbytes if self.borders and len(self.weight.row_blocks) == 1 else 0

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] in the dtype of ``x``."""
        return self.rows(x, 0, self.out_features)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Computes only the outputs ``start`` to ``stop``: [T, in_features] -> [T, stop - start]. No weights are
        copied."""
        product: Tensor = self.weight(x, start, stop)
        return product if self.bias is None else product.add_(self.bias[start:stop])
