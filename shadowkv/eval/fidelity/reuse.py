"""How often a step selects what earlier steps selected: hits in buffers that evict the least recently used.

Counted from the selections alone, so that it is available for policies whose values are on the device as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (1, 2, 4)
"""Sizes of the buffers, in multiples of the chunks that a step may select."""


class Reuse:
    """A buffer per size, layer, row and kv head.

    Args:
        chunks: chunks of the longest sequence.
    """

    def __init__(self, layers: int, rows: int, heads: int, chunks: int, device: torch.device) -> None:
        # Step of last use, from 1; 0 is never. The entry after the last chunk takes what is not selected.
        self._used = torch.zeros(layers, rows, heads, chunks + 1, dtype=torch.int32, device=device)
        self._steps = [0] * layers
        self._hits = torch.zeros(len(SIZES), layers, rows, dtype=torch.int64, device=device)
        self._selected = torch.zeros(layers, rows, dtype=torch.int64, device=device)

    def take(self, layer: int, selected: Tensor) -> None:
        """Adds a step's chunks int64 [B, H, k], -1 for none. The first step of a layer only fills the buffers."""
        used, nobody = self._used[layer], self._used.shape[-1] - 1
        places = selected.where(selected >= 0, nobody)
        if self._steps[layer]:
            order = used.argsort(dim=-1, descending=True, stable=True)
            rank = torch.empty_like(order)
            rank.scatter_(-1, order, torch.arange(nobody + 1, device=order.device).expand_as(order))
            known, rank = used.gather(-1, places) > 0, rank.gather(-1, places)
            for number, size in enumerate(SIZES):
                self._hits[number, layer] += (known & (rank < size * selected.shape[-1])).sum((1, 2))
            self._selected[layer] += (selected >= 0).sum((1, 2))
        self._steps[layer] += 1
        used.scatter_(-1, places, self._steps[layer])
        used[..., nobody] = 0

    def hit_rates(self) -> Tensor | None:
        """[sizes, num_layers, rows] after the first step; None where no later step selected anything."""
        return (self._hits / self._selected).cpu() if self._selected.all() else None
