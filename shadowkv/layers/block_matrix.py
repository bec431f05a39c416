"""Matrices and projections in a GGUF file's blocks of quantised numbers, in runs of rows that may differ in format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.layers.computing import Computing
from shadowkv.ops.dequantise_blocks.reference import FORMATS


@dataclass(frozen=True)
class Run:
    """Rows of a matrix that are stored in the same way.

    Attributes:
        rows: their number.
        form: format of their blocks, one of ``FORMATS``; None for plain numbers.
    """

    rows: int
    form: str | None


class BlockMatrix(Computing):
    """W [N, K], which stays in blocks. Its rows are uninitialised until a loader fills them.

    Args:
        columns: K, whole blocks of every run.
        runs: of all rows, in order; neighbours with the same format are merged.
        dtype: of rows that are plain numbers, and of those that are looked up.

    Attributes:
        parts: one per run, uint8 [rows, bytes] in blocks or [rows, K].
    """

    calls = ("dequantise_blocks", "quantised_matmul")

    def __init__(self, columns: int, runs: Iterable[Run], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        grouped = groupby(runs, lambda run: run.form)
        self.runs = tuple(Run(sum(run.rows for run in alike), form) for form, alike in grouped)
        self.columns, self.dtype = columns, dtype
        self.parts = nn.ParameterList(self._empty(run, device) for run in self.runs)

    def _empty(self, run: Run, device: torch.device) -> nn.Parameter:
        width, dtype = self.columns, self.dtype
        if run.form is not None:
            width, dtype = width // FORMATS[run.form].values * FORMATS[run.form].bytes, torch.uint8
        return nn.Parameter(torch.empty(run.rows, width, dtype=dtype, device=device), requires_grad=False)

    @property
    def num_values(self) -> int:
        """N x K."""
        return self.columns * sum(run.rows for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def stored(self, start: int, stop: int) -> Iterator[tuple[Tensor, str | None]]:
        """Rows ``start`` to ``stop`` as they are stored, and their format, run by run."""
        for part, run in zip(self.parts, self.runs, strict=True):
            if start < min(stop, run.rows):
                yield part[start:stop], run.form
            start, stop = max(0, start - run.rows), stop - run.rows

    def forward(self, x: Tensor, start: int, stop: int) -> Tensor:
        """x Wᵀ for rows ``start`` to ``stop``: [T, K] -> [T, stop - start] in the dtype of ``x``."""
        products = [
            F.linear(x, rows) if form is None else self.ops.quantised_matmul(x, rows, form)
            for rows, form in self.stored(start, stop)
        ]
        return products[0] if len(products) == 1 else torch.cat(products, -1)

    def look_up(self, index: Tensor) -> Tensor:
        """Rows int64 [T] of a matrix of one run -> [T, K]."""
        (part,), (run,) = self.parts, self.runs
        rows = part[index]
        return rows if run.form is None else self.ops.dequantise_blocks(rows, run.form).to(self.dtype)


class BlockLinear(nn.Module):
    """y = x Wᵀ + b over packed tokens, with W in blocks. The weights are uninitialised until a loader fills them."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        runs: Iterable[Run],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = BlockMatrix(in_features, runs, dtype=dtype, device=device)
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] in the dtype of ``x``."""
        return self.rows(x, 0, self.out_features)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Outputs ``start`` to ``stop`` only: [T, in_features] -> [T, stop - start]; no weight is copied."""
        product: Tensor = self.weight(x, start, stop)
        return product if self.bias is None else product.add_(self.bias[start:stop])
