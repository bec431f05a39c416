"""``GroupStore``: the memory of a group of layers, with its tiers, the fields of its pages, and the fitted states.

Shapes: L layers, n tokens, R rows (segments), P compressed pages of a row, C chunks per page, H kv heads, d dimensions
of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import GRANULE, Blocks, Field, Tier
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.memory.streams import Numbers
from shadowkv.kvcache.parts.base import EXCLUDED, INDEX_KEYS
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.fetch_chunks.reference import ChunkBuffer
from shadowkv.ops.pooled_scores.reference import KeyNorm, pooled_keys
from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class ExactRows:
    """Places of n tokens in exact pages: page ids and rows within the pages, int64 [n] each."""

    pages: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class CachedSegment:
    """An earlier segment of a sequence, to which a prompt's new tokens attend.

    Attributes:
        row: the segment's compressed pages, as a batch of one row.
        static: exact rows of the segment's sink and outliers.
        ids: the segment's state, first position, page ids, and page ids of values. Sequences that share the segment
            have equal ids.
    """

    row: CompressedBatch
    static: ExactRows
    ids: tuple[int, ...]


def exact_rows(numbers: Numbers, pages: list[int], start: int, stop: int) -> Callable[[Tensor], ExactRows]:
    """Adds the places of the tokens ``start`` to ``stop``, in a ring of exact ``pages``, to ``numbers``. Returns a
    function that takes the copy of ``numbers`` on the device and returns these places."""
    position = np.arange(start, stop)
    page_ids = np.asarray(pages, np.int64)[position // PAGE % max(1, len(pages))]
    rows = numbers.add(np.stack((page_ids, position % PAGE)))
    return lambda x: ExactRows(*x[rows].view(2, -1))


class GroupStore(CompressedStore):
    """All memory of a group of layers: compressed pages and states, exact pages, and the fetch buffer.

    Attributes:
        tiers: the tiers by name. Unused tiers have no bytes.
        k, v: exact pages, [num_layers, page ids, H, 64, d].
        index_keys: index keys of exact pages, [num_layers, page ids, 1, 64, d]; None without an indexer.
        exact: ``k``, ``v``, and ``index_keys`` if there are any.
        buffer: the fetch buffer, [num_layers, segment slots, *field.shape] except for the counters; None without one.
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
        self.k, self.v, self.index_keys = exact["k"], exact["v"], exact.get(INDEX_KEYS)
        self.exact = tuple(exact.values())
        compressed, across_bus = on_device.views(layout.compressed_fields), on_host.views(layout.host_fields)
        states = self.tiers["states"].views(layout.state_fields)
        page, head_dim = compressed | across_bus, layout.shape.head_dim
        super().__init__(ops, rotary, layout.layers, device, head_dim, page, states, set(across_bus), weights)
        self.buffer: ChunkBuffer | None = None
        if layout.buffer_fields:

            def of_segments(field: Field) -> Tensor:  # one extra slot, for padding rows
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

    def read_exact(self, layers: slice, rows: ExactRows) -> tuple[Tensor, ...]:
        """Reads n tokens in exact pages: RoPE-rotated keys and values [L, n, H, d], and, in layers with an indexer,
        index keys [L, n, 1, d]."""
        return tuple(x[layers][:, rows.pages, :, rows.offsets].transpose(0, 1) for x in self.exact)

    def excluded(self, layer: int, pages: Tensor, first: Tensor) -> Tensor:
        """Returns bool [R, H, P * C]: which chunks of compressed ``pages`` [R, P] are stored exactly as well (sink,
        outliers).

        Args:
            first: int64 [R], positions of the segments' first tokens.
        """
        if self.layout.excluded_fields:
            return self.page[EXCLUDED][layer][pages].transpose(1, 2).flatten(2)
        spec = self.layout.spec  # without the field ``EXCLUDED``, the policy has no outliers
        chunk = torch.arange(pages.shape[1] * PAGE // spec.chunk, device=pages.device)
        sink = (chunk < spec.sink_chunks) & (first == 0)[:, None]
        return sink[:, None].expand(-1, self.layout.shape.num_kv_heads, -1)

    def append_index_keys(
        self, layer: int, index_keys: Tensor, positions: Tensor, pages: Tensor, offsets: Tensor
    ) -> None:
        """Writes index keys [n, 1, d] of tokens at ``positions`` to rows ``offsets`` of exact ``pages``, int64 [n]
        each. Applies RoPE first, except for a pooled indexer, for which the keys of blocks are rotated later."""
        assert self.index_keys is not None, "the layers have no indexer"
        assert self.layout.indexer is not None
        if self.layout.indexer.pooled is None:
            index_keys = self.ops.apply_rope(index_keys, positions, self.rotary)
        self.index_keys[layer][pages, 0, offsets] = index_keys.squeeze(1)

    def block_keys(self, keys: Tensor, first: Tensor, index: IndexQueries) -> Tensor:
        """Returns the keys [..., d] of blocks of a pooled indexer.

        Args:
            keys: [..., block_size, d], raw index keys of the blocks' tokens.
            first: int64 [...], position of each block's first token.
        """
        return pooled_keys(keys, first, self.key_norm(index), self.rotary, self.ops.apply_rope)

    def key_norm(self, index: IndexQueries) -> KeyNorm:
        """The norm of the keys of blocks of a pooled indexer."""
        indexer = self.layout.indexer
        assert indexer is not None and indexer.pooled is not None and index.key_norm is not None
        return KeyNorm(index.key_norm, indexer.pooled.dim, index.eps)

    def write_tokens(self, layers: slice, rows: ExactRows, *of_tokens: Tensor) -> None:
        """Writes n tokens to exact pages. ``of_tokens`` are tensors like those that ``read_exact`` returns."""
        for of_layers, tokens in zip(self.exact, of_tokens, strict=True):
            exact = of_layers[layers]
            # A GPU scatters elements one by one, so elements of 8 bytes are faster.
            wide = exact.dtype if exact.shape[-1] * exact.itemsize % 8 else torch.int64
            exact.view(wide)[:, rows.pages, :, rows.offsets] = tokens.to(exact.dtype).transpose(0, 1).view(wide)
