"""``RowTable``: a large table of which a step reads a few rows. It is on the device, in host memory, or in the model's
files."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shadowkv.kvcache.memory.arenas import pinned_for
from shadowkv.kvcache.policy.shape import share
from shadowkv.layers.group import ALONE, Group
from shadowkv.layers.spec import TableForm


class RowTable(nn.Module):
    """A table of rows of W numbers, or this rank's part of them. Each rank has a range of the rows.

    Args:
        rows, columns: number of rows on all ranks together, and W.
        form: how the table is stored.
        dtype: dtype of the rows that are returned.
        device: device of the rows that are returned. ``meta`` allocates nothing.
        group: the ranks that have the table.

    Attributes:
        first, rows: this rank's first row, and its number of rows, R.
        place: where the table is, as in ``TableForm``.
        stored: dtype of the stored numbers.
        weight: a parameter [R, W], if the table is on the device; else None.
        host: [R, W] on the CPU, if the table is in host memory; else None. A loader fills it.
        parts: the rows of a table that is not on the device, as tensors that ``device`` reads: the first row of each
            tensor, counted from ``first``, and the tensor [n, W]. They are in the order of rows.
    """

    def __init__(
        self, rows: int, columns: int, form: TableForm, dtype: torch.dtype, device: torch.device, group: Group = ALONE
    ) -> None:
        super().__init__()
        self.first, stop = share(rows, group.rank, group.size)
        self.rows, self.columns, self.dtype, self.group = stop - self.first, columns, dtype, group
        self.place, self.stored = form.place, form.dtype or dtype
        self.weight: nn.Parameter | None = None
        self.host: Tensor | None = None
        self.parts: list[tuple[int, Tensor]] = []
        if self.place == "device":
            weight = torch.empty(self.rows, columns, dtype=self.stored, device=device)
            self.weight = nn.Parameter(weight, requires_grad=False)
        elif self.place == "host" and device.type != "meta":
            memory = np.zeros(self.nbytes, np.uint8)
            self.host = self._as_rows(torch.from_numpy(memory))
            self.use([(0, self.host if device.type == "cpu" else self._as_rows(pinned_for(device, memory)))])

    @property
    def num_values(self) -> int:
        """Number of this rank's numbers."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's numbers, wherever they are."""
        return self.num_values * self.stored.itemsize

    def use(self, parts: Iterable[tuple[int, Tensor]]) -> None:
        """Sets ``parts``, which together have this rank's rows. A table in files needs them before its first call."""
        self.parts = sorted(parts, key=lambda part: part[0])
        self._starts = torch.tensor([start for start, _ in self.parts])

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the rows with the numbers ``rows``, int64 [T, n]: [T, n, W]. The result is the same on all ranks. If
        there is only one part, the call can be captured in a CUDA graph."""
        if self.group.size == 1:
            return self._own(rows)
        rows = rows - self.first
        here = (rows >= 0) & (rows < self.rows)
        return self.group.sum(self._own(torch.where(here, rows, 0)) * here.unsqueeze(-1))

    def _own(self, rows: Tensor) -> Tensor:
        """Returns the rows with the numbers ``rows``, counted from this rank's first row."""
        if self.weight is not None:
            return self._read(self.weight, rows)
        if len(self.parts) == 1:
            return self._read(self.parts[0][1], rows)
        wanted = rows.flatten()
        numbers, order = torch.bucketize(wanted, self._starts, right=True).sub_(1).sort()
        found, counts = numbers.unique_consecutive(return_counts=True)
        out = rows.new_empty(len(wanted), self.columns, dtype=self.dtype)
        for number, own in zip(found.tolist(), order.split(counts.tolist()), strict=True):
            start, part = self.parts[number]
            out[own] = self._read(part, wanted[own] - start)
        return out.view(*rows.shape, self.columns)

    def _as_rows(self, data: Tensor) -> Tensor:
        return data.view(self.stored).view(self.rows, self.columns)

    def _read(self, part: Tensor, rows: Tensor) -> Tensor:
        if part.dtype == torch.float8_e4m3fn:  # looked up as bytes: 8-bit floats are new to PyTorch's look-ups
            return F.embedding(rows, part.view(torch.uint8)).view(part.dtype).to(self.dtype)
        return F.embedding(rows, part).to(self.dtype)
