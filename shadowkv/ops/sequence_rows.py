"""``SequenceRows``: which rows of a decode step belong to one sequence. Steps with drafts have a row for each new token
of a sequence. Ops whose arguments include ``SequenceRows`` give the same results without it, up to rounding. With it,
a backend can read the keys and values of a sequence once for all its rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceRows:
    """The rows of S sequences in a step of B rows. The rows of a sequence follow one another.

    Attributes:
        starts: int64 [S + 1], the first row of each sequence, and B. A sequence can have no rows.
        most: maximum number of rows of a sequence.
    """

    starts: Tensor
    most: int

    @cached_property
    def first(self) -> Tensor:
        """The first row of each sequence, int64 [S]. Of a sequence without rows it is any row."""
        return self._rows[:, 0]

    @cached_property
    def _rows(self) -> Tensor:
        """The rows of each sequence, int64 [S, most]. If there are fewer than ``most``, the last one is repeated."""
        starts, stops = self.starts[:-1, None], self.starts[1:, None]
        rows = starts + torch.arange(self.most, device=starts.device)
        return rows.minimum(stops - 1).clamp(min=0)

    def fold(self, q: Tensor, heads: int) -> Tensor:
        """Turns the queries of a sequence's rows into further query heads of each of H = ``heads`` kv heads: [B, H * G,
        d] becomes [S, H * most * G, d], for G query heads per kv head."""
        return q[self._rows].unflatten(2, (heads, -1)).transpose(1, 2).flatten(1, 3)

    def unfold(self, x: Tensor, heads: int, rows: int) -> Tensor:
        """Undoes ``fold`` for results x [S, H * most * G, ...] of B = ``rows`` rows. Returns [B, H * G, ...]."""
        of_rows = x.unflatten(1, (heads, self.most, -1)).transpose(1, 2).flatten(2, 3)
        row = torch.arange(rows, device=x.device)
        sequence = torch.searchsorted(self.starts[1:], row, right=True)
        return of_rows[sequence, row - self.starts[sequence]]
