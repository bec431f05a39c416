"""The memory behind a policy: both tiers, the named views of their pages, and the state of each slot."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.batch import ExactRows
from shadowkv.kvcache.layout import Layout
from shadowkv.kvcache.memory import GRANULE, Field, Tier
from shadowkv.kvcache.spec import PAGE
from shadowkv.ops import Ops
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer
from shadowkv.ops.rotate.tables import RotaryTables
from shadowkv.ops.rotations import random_rotation


class Store:
    """Tensors by name and layer.

    Attributes:
        device, host: the tiers; the host tier has no blocks where the policy keeps nothing there.
        k, v: [num_layers, granules, H, 64, d], exact pages.
        page: per field [num_layers, granules, *field.shape], sealed pages.
        state: per field [num_layers, slots, *field.shape].
        buffer: fetched chunks of all layers, [num_layers, slots, *field.shape] but for the counters; None without one.
    """

    def __init__(
        self,
        layout: Layout,
        ops: Ops,
        rotary: RotaryTables,
        slots: int,
        device_blocks: int,
        host_blocks: int,
        device: torch.device,
    ) -> None:
        layers = layout.shape.num_layers
        self._rotations: dict[str, Tensor] = {}
        self.layout, self.ops, self.rotary, self.compute = layout, ops, rotary, device
        self.device = Tier("device", layers, layout.block_bytes, device_blocks, device)
        self.host = Tier("host", layers, layout.host_block_bytes, host_blocks, device, pinned=device.type == "cuda")
        exact = self.device.views(layout.exact_fields)
        self.k, self.v = exact["k"], exact["v"]
        self.page = {**self.device.views(layout.sealed_fields), **self.host.views(layout.host_fields)}

        # One slot more than sequences can have, for the rows that fill up a captured batch.
        def state_of(field: Field) -> Tensor:
            return torch.zeros(layers, slots + 1, *field.shape, dtype=field.dtype, device=device)

        self.state = {field.name: state_of(field) for field in layout.state_fields}
        self.buffer: ChunkBuffer | None = None
        if layout.buffer_fields:
            counters = torch.zeros(2, dtype=torch.int64, device=device)
            self.buffer = ChunkBuffer(counters=counters, **{x.name: state_of(x) for x in layout.buffer_fields})
            self.buffer.reset(slice(None))

    def rotation(self, name: str) -> Tensor:
        """The fixed random rotation of that name, float32 [d, d], where the cache computes."""
        if name not in self._rotations:
            self._rotations[name] = random_rotation(self.layout.shape.head_dim, name).to(self.compute)
        return self._rotations[name]

    def sealed_granules(self, blocks: list[int]) -> list[int]:
        """Granules of the sealed pages that fit in device ``blocks``, in order."""
        step = self.layout.sealed_bytes // GRANULE
        return [block + i * step for block in blocks for i in range(self.layout.sealed_per_block)]

    def exact_granules(self, blocks: list[int]) -> list[int]:
        """Granules of the exact pages that fit in device ``blocks``, in order."""
        step = self.layout.exact_bytes // GRANULE
        return [block + i * step for block in blocks for i in range(self.layout.exact_per_block)]

    def read_exact(self, layer: int, rows: ExactRows) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [n, H, d] of exact pages."""
        return self.k[layer][rows.pages, :, rows.offsets], self.v[layer][rows.pages, :, rows.offsets]

    def excluded(self, layer: int, pages: Tensor) -> Tensor:
        """Which chunks bool [B, H, P * C] of sequences' sealed pages [B, P] are exact elsewhere."""
        if "excluded" in self.page:
            return self.page["excluded"][layer][pages].transpose(1, 2).flatten(2)
        spec = self.layout.spec  # has no outliers
        sink = torch.arange(pages.shape[1] * PAGE // spec.chunk, device=pages.device) < spec.sink_chunks
        return sink.expand(len(pages), self.layout.shape.num_kv_heads, -1)

    def write(self, name: str, layers: slice, pages: Tensor, rows: Tensor) -> None:
        """Writes pages [L, n, *field.shape] of some layers."""
        self.page[name][layers][:, pages] = rows

    def write_heads(self, name: str, layers: slice, pages: Tensor, tokens: Tensor) -> None:
        """Writes [L, n, 64, H, x] into a field of shape [H, C, c, x]."""
        across_bus = any(field.name == name for field in self.layout.host_fields)
        self.ops.write_rows(tokens, self.page[name][layers], pages, across_bus)
