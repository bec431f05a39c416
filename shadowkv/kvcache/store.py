"""The memory behind a policy: all tiers, the named views of their pages, and the fitted states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shadowkv.kvcache.layout import Layout
from shadowkv.kvcache.memory import GRANULE, Blocks, Field, Tier
from shadowkv.kvcache.prefill_batch import ExactRows
from shadowkv.kvcache.spec import PAGE
from shadowkv.ops import Ops
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer
from shadowkv.ops.rotate.tables import RotaryTables
from shadowkv.ops.rotations import random_rotation


class Store:
    """Tensors by name and layer.

    Attributes:
        tiers: by name; those where the policy keeps nothing have no bytes.
        k, v: [num_layers, names, H, 64, d], exact pages.
        page: per field [num_layers, names, *field.shape], sealed pages.
        state: per field [num_layers, states, *field.shape], fitted states.
        buffer: fetched chunks of all layers, [num_layers, rows, *field.shape] but for the counters; None without one.
    """

    def __init__(
        self, layout: Layout, ops: Ops, rotary: RotaryTables, slots: int, memory: Blocks, device: torch.device
    ) -> None:
        layers, fixed = layout.shape.num_layers, layout.fixed_blocks(slots)
        self._rotations: dict[str, Tensor] = {}
        self.layout, self.ops, self.rotary, self.compute = layout, ops, rotary, device
        self.tiers: dict[str, Tier] = {}
        for one in layout.tiers:
            pinned, count = one.pinned and device.type == "cuda", memory[one.name] if one.paged else fixed[one.name]
            self.tiers[one.name] = Tier(one.name, layers, one.block_bytes, count, device, pinned, one.paged)
        on_device, on_host = self.tiers["device"], self.tiers["host"]
        exact = on_device.views(layout.exact_fields)
        self.k, self.v = exact["k"], exact["v"]
        self.page = {**on_device.views(layout.sealed_fields), **on_host.views(layout.host_fields)}
        self.state = self.tiers["states"].views(layout.state_fields)
        self.buffer: ChunkBuffer | None = None
        if layout.buffer_fields:

            def rows_of(field: Field) -> Tensor:  # one more, for the rows that fill up a captured batch
                return torch.zeros(layers, fixed["rows"] + 1, *field.shape, dtype=field.dtype, device=device)

            counters = torch.zeros(2, dtype=torch.int64, device=device)
            self.buffer = ChunkBuffer(counters=counters, **{x.name: rows_of(x) for x in layout.buffer_fields})
            self.buffer.reset(slice(None))

    def rotation(self, name: str, matrix: Callable[[int, str], Tensor] = random_rotation) -> Tensor:
        """The fixed rotation of that name, float32 [d, d], where the cache computes: ``matrix`` makes it once."""
        if name not in self._rotations:
            self._rotations[name] = matrix(self.layout.shape.head_dim, name).to(self.compute)
        return self._rotations[name]

    def sealed_names(self, blocks: list[int]) -> list[int]:
        """Names of the sealed pages that fit in device ``blocks``, in order."""
        step = self.layout.sealed_bytes // GRANULE
        return [block + i * step for block in blocks for i in range(self.layout.sealed_per_block)]

    def exact_names(self, blocks: list[int]) -> list[int]:
        """Names of the exact pages that fit in device ``blocks``, in order."""
        step = self.layout.exact_bytes // GRANULE
        return [block + i * step for block in blocks for i in range(self.layout.exact_per_block)]

    def read_exact(self, layers: slice, rows: ExactRows) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [L, n, H, d] of exact pages."""
        keys, values = (x[layers][:, rows.pages, :, rows.offsets].transpose(0, 1) for x in (self.k, self.v))
        return keys, values

    def excluded(self, layer: int, pages: Tensor, first: Tensor) -> Tensor:
        """Which chunks bool [R, H, P * C] of the sealed pages [R, P] of segments are exact elsewhere.

        Args:
            first: int64 [R], positions of their first tokens.
        """
        if "excluded" in self.page:
            return self.page["excluded"][layer][pages].transpose(1, 2).flatten(2)
        spec = self.layout.spec  # has no outliers
        chunk = torch.arange(pages.shape[1] * PAGE // spec.chunk, device=pages.device)
        sink = (chunk < spec.sink_chunks) & (first == 0)[:, None]
        return sink[:, None].expand(-1, self.layout.shape.num_kv_heads, -1)

    def write(self, name: str, layers: slice, pages: Tensor, rows: Tensor) -> None:
        """Writes pages [L, n, *field.shape] of some layers."""
        self.page[name][layers][:, pages] = rows

    def write_heads(self, name: str, layers: slice, pages: Tensor, tokens: Tensor) -> None:
        """Writes [L, n, 64, H, x] into a field of shape [H, C, c, x]."""
        across_bus = any(field.name == name for field in self.layout.host_fields)
        self.ops.write_rows(tokens, self.page[name][layers], pages, across_bus)
