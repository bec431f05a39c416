"""``GroupLayout``: the fields and tiers of a policy in a group of layers, and the pages and bytes of a sequence. Pools,
the planner and admission count pages and bytes with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shadowkv.kvcache.memory.arenas import Blocks, Field, page_bytes
from shadowkv.kvcache.parts import build_parts
from shadowkv.kvcache.parts.base import EXCLUDED
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS, Growth, SegmentState
from shadowkv.kvcache.policy.shape import LayerKind, ModelShape
from shadowkv.kvcache.policy.spec import PAGE, KVSpec


@dataclass(frozen=True)
class TierLayout:
    """A tier of a policy.

    Attributes:
        block_bytes: bytes of a block in one layer.
        pinned: whether the tier is host memory, which the device reads and writes across the bus.
        paged: whether the tier's blocks are divided into pages.
    """

    name: str
    block_bytes: int
    pinned: bool = False
    paged: bool = True


@dataclass(frozen=True)
class PageCount:
    """Numbers of a sequence's pages and segments.

    Attributes:
        dense: exact pages of a dense sequence, or of a window's ring.
        static: exact pages for the sink and outliers of future segments.
        ring: exact pages of the ring of a compressed sequence's tail.
        compressed: compressed pages on the device.
        host: compressed pages on the host.
        segments: future segments, each with a slot and a state.
    """

    dense: int = 0
    static: int = 0
    ring: int = 0
    compressed: int = 0
    host: int = 0
    segments: int = 0

    def lacking(self, owned: PageCount) -> PageCount:
        """Returns how many pages of each kind are missing if the pages ``owned`` are there."""
        return PageCount(*(max(0, needed - held) for needed, held in zip(self.counts, owned.counts, strict=True)))

    def __add__(self, other: PageCount) -> PageCount:
        return PageCount(*map(sum, zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, ...]:
        """All counts, in order."""
        return tuple(vars(self).values())


MAX_ENTRIES = 32767
"""Maximum number of chunks in a fetch buffer, because int16 numbers them."""

MIN_WASTE = 0.02
"""Waste of a block at which ``pack`` tries no larger blocks. The waste is the share of the block that compressed pages
leave unused, or half of the share that exact pages leave unused, whichever is larger. Exact pages count half, because a
full device mostly holds long sequences, and these are compressed."""

SPARE_SEGMENTS = 16
"""At full occupancy, one sequence in this many can have a second segment."""


WINDOW_SLACK = 2
"""Number of pages of a ring beyond those that its window fills. One page is being filled. The other keeps older tokens:
up to a page of the newest tokens can be removed, or left out by a fork, and the window before them is then still
complete."""


def pack(exact: int, compressed: int) -> tuple[int, int, int]:
    """Chooses the size of a block. Returns its number of exact pages, its number of compressed pages, and its bytes.

    ``exact`` and ``compressed`` are bytes of a page. The smallest block with little waste for both kinds is chosen.
    """
    best, least = (1, 1, max(exact, compressed)), 1.0
    for count in range(1, 9):
        other = max(1, round(count * exact / compressed))
        size = max(count * exact, other * compressed)
        waste = 1 - min((size + count * exact) / 2, other * compressed) / size
        if waste < least:
            best, least = (count, other, size), waste
        if least <= MIN_WASTE:
            break
    return best


def neighbours(layers: Sequence[int], bounds: Collection[int] = ()) -> tuple[range, ...]:
    """Splits ``layers``, ascending layer numbers of the model, into ranges of indices. The layers of a range are
    consecutive. A layer in ``bounds`` starts a new range."""
    starts = [at for at, layer in enumerate(layers) if not at or layers[at - 1] + 1 != layer or layer in bounds]
    return tuple(map(range, starts, (*starts[1:], len(layers))))


class GroupLayout:
    """A policy on a group of layers: its parts, and the sizes of pages and states per layer.

    Layers are numbered within the group, except in ``layers``.

    Args:
        spec: the resolved policy.
        shape: attention sizes of the model. The attribute ``shape`` has the sizes of the group's layers.
        kind: kind of the layers' attention.
        dtype: dtype of exact keys and values, and of full-precision fields of the parts.
        max_model_len: longest sequence, in tokens.
        fetch_buffer: number of chunks in a segment's fetch buffer, as a multiple of the number of chunks that a step
            selects from the longest context: at least 1, or 0 for no buffer.
        layers: the group's layers in order, as numbered in the model.
        name: the group's name in ``Blocks``; empty for the first group.

    Attributes:
        model_layers: number of all layers of the model that store something.
        model_indexed: whether any layer of the model has an indexer.
        attending: number of layers of the model that attend to keys and values of the group.
        scratch: identifies scratch memory. Prefills of groups with equal ``scratch`` share it
            (``ModelShape.scratch_of``).
        window: number of newest tokens that a step attends to, which are exact in a ring of pages; None for all tokens.
        rope: the group's own RoPE; None for the model's.
        indexer: the indexer of the group's layers; None without one.
        parts: the policy's parts.
        exact_fields, compressed_fields: fields of pages in the device tier.
        excluded_fields: the field ``EXCLUDED`` of compressed pages, if the policy has it.
        host_fields: fields of pages in the host tier.
        state_fields: fields of a fitted state.
        buffer_fields: fields of a segment's fetch buffer.
        tiers: the tiers of pages and states.
        growth: the policy's rules for segments.
    """

    def __init__(
        self,
        spec: KVSpec,
        shape: ModelShape,
        kind: LayerKind,
        dtype: torch.dtype,
        max_model_len: int,
        fetch_buffer: float,
        layers: Sequence[int],
        name: str = "",
    ) -> None:
        self.name, self.layers, self.model_layers = name, tuple(layers), shape.num_layers
        self.window, self.rope, self.scratch = kind.window, kind.rope, shape.scratch_of(kind)
        self.indexer, self.model_indexed = kind.indexer, shape.indexed
        others = shape.kinds or (kind,) * shape.num_layers
        has_last = max(layer for layer, other in enumerate(others) if other == kind) in self.layers
        self.attending = len(self.layers) + (shape.reused.count(kind) if has_last else 0)
        shape = shape.of_layers(kind, len(self.layers))
        parts = build_parts(spec, shape, dtype)
        self.spec, self.shape, self.dtype, self.parts = spec, shape, dtype, parts
        self.max_model_len, self.fetch_buffer = max_model_len, fetch_buffer
        heads = (shape.num_kv_heads, PAGE, shape.head_dim)
        index_keys = parts.index.page_fields() if spec.native else ()
        self.exact_fields = (Field("k", heads, dtype), Field("v", heads, dtype), *index_keys)
        on_device = [*parts.keys.page_fields(), *parts.index.page_fields()]
        values = parts.values.page_fields()
        self.excluded_fields: tuple[Field, ...] = ()
        self.compressed_fields: tuple[Field, ...] = ()
        self.host_fields: tuple[Field, ...] = ()
        self.state_fields: tuple[Field, ...] = ()
        if spec.compresses:
            self.host_fields = (parts.values.placed_field,) if spec.place == "host" else ()
            if spec.outliers or parts.index.reads_excluded:
                self.excluded_fields = (Field(EXCLUDED, (shape.num_kv_heads, PAGE // spec.chunk), torch.bool),)
            on_values = (x for x in values if x not in self.host_fields)
            self.compressed_fields = (*on_device, *self.excluded_fields, *on_values)
            self.state_fields = tuple(field for part in parts for field in part.state_fields())
        self.growth = Growth(spec, bool(self.state_fields))
        self.buffer_fields = self._buffer_fields()
        self.exact_bytes, self.compressed_bytes = page_bytes(self.exact_fields), page_bytes(self.compressed_fields)
        self.exact_per_block, self.compressed_per_block, self.block_bytes = 1, 0, self.exact_bytes
        if spec.compresses:
            self.exact_per_block, self.compressed_per_block, self.block_bytes = pack(
                self.exact_bytes, self.compressed_bytes
            )
        self.tiers = (
            TierLayout("device", self.block_bytes),
            TierLayout("host", page_bytes(self.host_fields), pinned=True),
            TierLayout("states", page_bytes(self.state_fields), paged=False),
        )

    def portions(self, most: int) -> Iterator[slice]:
        """Slices of all layers in order, of at most ``most`` layers each."""
        count = self.shape.num_layers
        for first in range(0, count, most):
            yield slice(first, min(first + most, count))

    @property
    def fetched_bytes(self) -> int:
        """Bytes of one chunk's values of one kv head that are fetched from the host; 0 without fetching."""
        if not self.buffer_fields:
            return 0
        (values,) = self.host_fields
        return math.prod(values.shape[2:]) * values.dtype.itemsize

    def bytes_per_block(self) -> Blocks:
        """Bytes of one block of each tier, and of a segment's fetch buffer (``segment_slots``), over all layers."""
        layers = self.shape.num_layers
        sizes = {tier.name: layers * tier.block_bytes for tier in self.tiers}
        return Blocks(sizes, segment_slots=layers * sum(field.nbytes for field in self.buffer_fields))

    def fixed_blocks(self, sequences: int) -> Blocks:
        """Blocks of ``sequences`` sequences that do not depend on the sequences' lengths: the sequences themselves, and
        the slots and states of segments."""
        if not self.spec.compresses:
            return Blocks(sequences=sequences)
        segments = sequences
        if self.growth.learns:
            segments += max(MAX_SEGMENTS - 1, sequences // SPARE_SEGMENTS)  # enough for one sequence with MAX_SEGMENTS
        return Blocks(sequences=sequences, segment_slots=segments, states=segments if self.growth.learns else 0)

    def fixed_bytes(self, sequences: int) -> int:
        """Device bytes of ``fixed_blocks``, with one more slot and one more state for padding rows."""
        count, unit = self.fixed_blocks(sequences), self.bytes_per_block()
        return sum((count[kind] + 1) * unit[kind] for kind in ("segment_slots", "states"))

    def pages(self, start: int, capacity: int, at: SegmentState | None = None) -> PageCount:
        """Pages of a sequence with a prompt up to ``start`` tokens and a maximum length of ``capacity`` tokens.

        A sequence that starts dense and can outgrow ``late_limit`` holds exact and compressed pages, because it is
        compressed while it grows.

        Args:
            at: how far the sequence is compressed already. Its segments and their static pages are not counted. None
                for a new sequence.
        """
        spec, at = self.spec, at or SegmentState()
        if self.window is not None:
            return PageCount(dense=min(math.ceil(capacity / PAGE), math.ceil(self.window / PAGE) + WINDOW_SLACK))
        if not spec.compresses:
            return PageCount(dense=math.ceil(capacity / PAGE))
        dense = 0
        if not at.segments:
            longest = spec.late_limit if start <= spec.dense_limit else 0
            dense = math.ceil(min(capacity, longest) / PAGE)
            if capacity <= max(longest, spec.dense_limit):
                return PageCount(dense=dense)
        to_come = self.growth.forecast(at, start, capacity)
        static = 0
        if to_come.segments:
            later = to_come.segments - (not at.segments)
            static = later * spec.outlier_pages + (spec.static_pages if not at.segments else 0)
        ring = max(spec.ring_pages, math.ceil(to_come.tail / PAGE))
        compressed = spec.compressed_pages(capacity)
        return PageCount(dense, static, ring, compressed, compressed if self.host_fields else 0, to_come.segments)

    def most_pages(self, capacity: int) -> PageCount:
        """Maximum number of pages of each kind that a sequence of up to ``capacity`` tokens can have, with a short or a
        long prompt."""
        both = self.pages(0, capacity), self.pages(capacity, capacity)
        return PageCount(*map(max, *(pages.counts for pages in both)))

    def blocks(self, pages: PageCount) -> Blocks:
        """Blocks for ``pages``. A block holds pages of one kind."""
        exact = math.ceil(pages.dense / self.exact_per_block) + math.ceil(
            (pages.static + pages.ring) / self.exact_per_block
        )
        compressed = math.ceil(pages.compressed / self.compressed_per_block) if pages.compressed else 0
        return Blocks(
            device=exact + compressed,
            host=pages.host,
            segment_slots=pages.segments,
            states=pages.segments if self.growth.learns else 0,
        )

    def demand(self, start: int, capacity: int) -> Blocks:
        """Blocks of a new sequence: of each tier, slots and states of segments, and the sequence itself. Arguments are
        as in ``pages``."""
        return self.blocks(self.pages(start, capacity)) + Blocks(sequences=1)

    def most_demand(self, capacity: int) -> Blocks:
        """Maximum number of blocks of each kind that a new sequence of up to ``capacity`` tokens takes, with any
        prompt."""
        short, long = self.demand(1, capacity), self.demand(capacity, capacity)
        return Blocks({kind: max(short[kind], long[kind]) for kind in {**short, **long}})

    def snapshot_layer_bytes(self, capacity: int) -> int:
        """Maximum number of bytes of one layer of a snapshot of ``capacity`` tokens."""
        pages = self.most_pages(capacity)
        compressed = pages.compressed * self.compressed_bytes + pages.host * page_bytes(self.host_fields)
        most = max(pages.dense * self.exact_bytes, compressed + (pages.static + pages.ring) * self.exact_bytes)
        return most + max(1, pages.segments) * page_bytes(self.state_fields)

    def _buffer_fields(self) -> tuple[Field, ...]:
        """The fields of a segment's ``ChunkBuffer``; none if the policy selects nothing from the host, or if the buffer
        cannot hold one step's chunks."""
        spec, heads = self.spec, self.shape.num_kv_heads
        if not self.host_fields or not spec.selects or not self.fetch_buffer:
            return ()
        (values,) = self.host_fields
        row = values.shape[2:]
        chunks = spec.compressed_pages(self.max_model_len) * values.shape[1]
        # The shapes of a captured step can be rounded up to one page more than the longest sequence has.
        selected = min(chunks, int(spec.budget_chunks(np.asarray(self.max_model_len + PAGE))))
        entries = min(chunks, math.ceil(self.fetch_buffer * selected), MAX_ENTRIES)
        if not entries or entries < selected:
            return ()
        return (
            Field("rows", (heads, entries, *row), values.dtype),
            Field("owner", (heads, entries), torch.int32),
            Field("entry", (heads, chunks), torch.int16),
            Field("used", (heads, entries), torch.int32),
            Field("step", (heads,), torch.int32),
        )
