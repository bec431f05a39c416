"""What parts may touch of a cache's memory: sealed pages and fitted states, by name and layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from shadowkv.kvcache.memory.by_layer import ByLayer
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.registry import Ops
from shadowkv.ops.rotations import random_rotation


class SealedStore:
    """Tensors by name and layer, for the layers that the policy does not skip, and what else parts compute with.

    Args:
        head_dim: the size of the fixed rotations.
        across_bus: the names of the fields of ``page`` that are in the host's memory.

    Attributes:
        ops: the cache's ops.
        rotary: tables for the positions of its tokens.
        compute: the device that it computes on.
        page: per field [num_layers, names, *field.shape], sealed pages.
        state: per field [num_layers, states, *field.shape], fitted states.
    """

    def __init__(
        self,
        ops: Ops,
        rotary: RotaryTables,
        compute: torch.device,
        head_dim: int,
        page: Mapping[str, Tensor | ByLayer],
        state: Mapping[str, Tensor | ByLayer],
        across_bus: Collection[str],
    ) -> None:
        self.ops, self.rotary, self.compute = ops, rotary, compute
        self.page, self.state = page, state
        self._head_dim, self._across_bus = head_dim, across_bus
        self._rotations: dict[str, Tensor] = {}

    def rotation(self, name: str, matrix: Callable[[int, str], Tensor] = random_rotation) -> Tensor:
        """The fixed rotation of that name, float32 [d, d], where the cache computes: created once, by ``matrix``."""
        if name not in self._rotations:
            self._rotations[name] = matrix(self._head_dim, name).to(self.compute)
        return self._rotations[name]

    def write(self, name: str, layers: slice, pages: Tensor, rows: Tensor) -> None:
        """Writes pages [L, n, *field.shape] of some layers."""
        self.page[name][layers][:, pages] = rows

    def write_heads(self, name: str, layers: slice, pages: Tensor, tokens: Tensor) -> None:
        """Writes [L, n, 64, H, x] into a field of shape [H, C, c, x]."""
        self.ops.write_rows(tokens, self.page[name][layers], pages, name in self._across_bus)
