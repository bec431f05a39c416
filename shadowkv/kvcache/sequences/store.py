"""The memory of a group of layers: all tiers, the named views of their pages, and the fitted states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import GRANULE, Blocks, Field, Tier
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.memory.streams import Numbers
from shadowkv.kvcache.parts.base import EXCLUDED
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer
from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class ExactRows:
    """Tokens in exact pages: granules of the pages and rows there, int64 [n] each."""

    pages: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class CachedSegment:
    """A segment of a cached sequence, as later tokens attend to it.

    Attributes:
        row: a batch of one row.
        static: its sink and outliers.
        ids: of its state, its pages and those of its values: the same for sequences that share it.
    """

    row: CompressedBatch
    static: ExactRows
    ids: tuple[int, ...]


def exact_rows(numbers: Numbers, pages: list[int], start: int, stop: int) -> Callable[[Tensor], ExactRows]:
    """Where the tokens of positions ``start`` to ``stop`` are in a ring of exact ``pages``, once ``numbers`` are on
    the device."""
    position = np.arange(start, stop)
    page_ids = np.asarray(pages, np.int64)[position // PAGE % max(1, len(pages))]
    rows = numbers.add(np.stack((page_ids, position % PAGE)))
    return lambda x: ExactRows(*x[rows].view(2, -1))


class GroupStore(CompressedStore):
    """Tensors by name and layer of the group, those that parts see and all others.

    Attributes:
        tiers: the tiers by name; those where the policy keeps nothing have no bytes.
        k, v: [num_layers, page ids, H, 64, d], exact pages.
        buffer: fetched chunks, [num_layers, segment slots, *field.shape] except for the counters; None without one.
    """

    def __init__(
        self,
        layout: GroupLayout,
        ops: Ops,
        rotary: RotaryTables,
        slots: int,
        memory: Blocks,
        device: torch.device,
        weights: Sequence[Mapping[str, Tensor]] = (),
    ) -> None:
        layers, fixed = layout.shape.num_layers, layout.fixed_blocks(slots)
        self.layout = layout
        self.tiers: dict[str, Tier] = {}
        for tier in layout.tiers:
            pinned, count = tier.pinned and device.type == "cuda", memory[tier.name] if tier.paged else fixed[tier.name]
            self.tiers[tier.name] = Tier(tier.name, layers, tier.block_bytes, count, device, pinned, tier.paged)
        on_device, on_host = self.tiers["device"], self.tiers["host"]
        exact = on_device.views(layout.exact_fields)
        self.k, self.v = exact["k"], exact["v"]
        compressed, across_bus = on_device.views(layout.compressed_fields), on_host.views(layout.host_fields)
        states = self.tiers["states"].views(layout.state_fields)
        page, head_dim = compressed | across_bus, layout.shape.head_dim
        super().__init__(ops, rotary, layout.layers, device, head_dim, page, states, set(across_bus), weights)
        self.buffer: ChunkBuffer | None = None
        if layout.buffer_fields:

            def of_segments(field: Field) -> Tensor:  # one more, for the rows that pad a captured batch
                return torch.zeros(layers, fixed["segment_slots"] + 1, *field.shape, dtype=field.dtype, device=device)

            counters = torch.zeros(2, dtype=torch.int64, device=device)
            self.buffer = ChunkBuffer(counters=counters, **{x.name: of_segments(x) for x in layout.buffer_fields})
            self.buffer.reset(slice(None))

    def compressed_page_ids(self, blocks: list[int]) -> list[int]:
        """Ids of the compressed pages that fit in device ``blocks``, in order."""
        step = self.layout.compressed_bytes // GRANULE
        return [block + i * step for block in blocks for i in range(self.layout.compressed_per_block)]

    def exact_page_ids(self, blocks: list[int]) -> list[int]:
        """Ids of the exact pages that fit in device ``blocks``, in order."""
        step = self.layout.exact_bytes // GRANULE
        return [block + i * step for block in blocks for i in range(self.layout.exact_per_block)]

    def read_exact(self, layers: slice, rows: ExactRows) -> tuple[Tensor, Tensor]:
        """RoPE-rotated keys and values [L, n, H, d] of exact pages."""
        keys, values = (x[layers][:, rows.pages, :, rows.offsets].transpose(0, 1) for x in (self.k, self.v))
        return keys, values

    def excluded(self, layer: int, pages: Tensor, first: Tensor) -> Tensor:
        """Which chunks bool [R, H, P * C] of the compressed pages [R, P] of segments are exact elsewhere.

        Args:
            first: int64 [R], positions of their first tokens.
        """
        if self.layout.excluded_fields:
            return self.page[EXCLUDED][layer][pages].transpose(1, 2).flatten(2)
        spec = self.layout.spec  # has no outliers
        chunk = torch.arange(pages.shape[1] * PAGE // spec.chunk, device=pages.device)
        sink = (chunk < spec.sink_chunks) & (first == 0)[:, None]
        return sink[:, None].expand(-1, self.layout.shape.num_kv_heads, -1)

    def write_tokens(self, layers: slice, rows: ExactRows, rope_keys: Tensor, values: Tensor) -> None:
        """Writes tokens [L, n, H, d] to exact pages."""
        for exact, tokens in ((self.k[layers], rope_keys), (self.v[layers], values)):
            # A GPU scatters elements one by one: with 8 bytes each, there are fewer.
            wide = exact.dtype if exact.shape[-1] * exact.itemsize % 8 else torch.int64
            exact.view(wide)[:, rows.pages, :, rows.offsets] = tokens.to(exact.dtype).transpose(0, 1).view(wide)
