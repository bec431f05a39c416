"""What a policy stores where: the bytes of pages and sequences, from which pools, planner and admission all count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shadowkv.kvcache.memory.arenas import GRANULE, Blocks, Field, page_bytes
from shadowkv.kvcache.parts import build_parts, resolve
from shadowkv.kvcache.parts.base import EXCLUDED
from shadowkv.kvcache.policy.growth import MOST_SEGMENTS, Growth, Standing
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import FETCH_BUFFER, PAGE, KVSpec


@dataclass(frozen=True)
class TierLayout:
    """A tier as a policy uses it.

    Attributes:
        block_bytes: bytes of a block in one layer.
        skipped_bytes: the same for a layer that the policy skips; 0 where nothing of it is in the tier.
        pinned: whether it is the host's memory, which the device reads and writes across the bus.
        paged: whether its blocks are divided into pages.
    """

    name: str
    block_bytes: int
    skipped_bytes: int = 0
    pinned: bool = False
    paged: bool = True


@dataclass(frozen=True)
class PageCount:
    """What a sequence needs to reach its full length: pages of each kind, and slots and states of segments to come."""

    dense: int = 0
    static: int = 0
    ring: int = 0
    sealed: int = 0
    host: int = 0
    segments: int = 0

    def lacking(self, owned: PageCount) -> PageCount:
        """What is missing of each kind beyond what is ``owned``."""
        return PageCount(*(max(0, needed - held) for needed, held in zip(self.counts, owned.counts, strict=True)))

    def __add__(self, other: PageCount) -> PageCount:
        return PageCount(*map(sum, zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, ...]:
        """All counts, in order."""
        return tuple(vars(self).values())


MOST_ENTRIES = 32767
"""Most chunks that the buffer can number."""

LEAST_WASTE = 0.02
"""Share of a block that may be lost where sealed pages do not fill it, and half the share for exact pages: long
sequences are what fills a device."""

SPARE_SEGMENTS = 16
"""At full occupancy, one sequence in this many may have a second segment."""


def pack(exact: int, sealed: int) -> tuple[int, int, int]:
    """Pages of either kind in a block, and its bytes: the smallest block that loses little, whichever kind it holds."""
    best, least = (1, 1, max(exact, sealed)), 1.0
    for count in range(1, 9):
        other = max(1, round(count * exact / sealed))
        size = max(count * exact, other * sealed)
        waste = 1 - min((size + count * exact) / 2, other * sealed) / size
        if waste < least:
            best, least = (count, other, size), waste
        if least <= LEAST_WASTE:
            break
    return best


class Layout:
    """A policy on a model: its parts, and page and state sizes per layer. All that is counted, planned and stored.

    Args:
        spec: the policy; resolved here for ``shape``, which raises ValueError where it cannot be used.
        shape: the model's attention sizes.
        dtype: dtype of exact keys and values and of what the parts store at full precision.
        max_model_len: longest sequence, in tokens.
        fetch_buffer: chunks of a segment's buffer of fetched values, as a multiple of those that a step selects from
            the longest context: at least 1, or 0 for no buffer.

    Attributes:
        parts: the policy's parts.
        exact_fields, sealed_fields: fields of pages in the device tier.
        excluded_fields: among the sealed ones, ``EXCLUDED`` where the policy has it.
        host_fields: fields of pages in the host tier.
        state_fields: fields of a fitted state.
        buffer_fields: fields of a segment's buffer of fetched values.
        compressed: the layers that the policy does not skip; all where it skips none.
        runs: layers that are alike, one run after the other: those skipped, the compressed ones, those skipped.
        tiers: the tiers that pages and states are stored in.
        growth: when tokens get a state of their own.
    """

    def __init__(
        self,
        spec: KVSpec,
        shape: ModelShape,
        dtype: torch.dtype,
        max_model_len: int,
        fetch_buffer: float = FETCH_BUFFER,
    ) -> None:
        spec = resolve(spec, shape)
        parts = build_parts(spec, shape, dtype)
        self.spec, self.shape, self.dtype, self.parts = spec, shape, dtype, parts
        self.max_model_len, self.fetch_buffer = max_model_len, fetch_buffer
        layers, skipped = shape.num_layers, spec.skip_layers
        self.compressed = range(skipped, layers - skipped)
        self.runs = tuple(x for x in (range(skipped), self.compressed, range(layers - skipped, layers)) if x)
        heads = (shape.num_kv_heads, PAGE, shape.head_dim)
        self.exact_fields = (Field("k", heads, dtype), Field("v", heads, dtype))
        on_device = [*parts.keys.page_fields(), *parts.index.page_fields()]
        values = parts.values.page_fields()
        self.excluded_fields: tuple[Field, ...] = ()
        self.sealed_fields: tuple[Field, ...] = ()
        self.host_fields: tuple[Field, ...] = ()
        self.state_fields: tuple[Field, ...] = ()
        if spec.seals:
            on_host = spec.place == "host" and self.compressed
            self.host_fields = (parts.values.placed_field,) if on_host else ()
            if spec.outliers or parts.index.reads_excluded:
                self.excluded_fields = (Field(EXCLUDED, (shape.num_kv_heads, PAGE // spec.chunk), torch.bool),)
            on_values = (x for x in values if x not in self.host_fields)
            self.sealed_fields = (*on_device, *self.excluded_fields, *on_values)
            self.state_fields = tuple(field for part in parts for field in part.state_fields())
        self.growth = Growth(spec, bool(self.state_fields))
        self.buffer_fields = self._buffer_fields()
        self.exact_bytes, self.sealed_bytes = page_bytes(self.exact_fields), page_bytes(self.sealed_fields)
        self.exact_per_block, self.sealed_per_block, self.block_bytes = 1, 0, self.exact_bytes
        if spec.seals:
            self.exact_per_block, self.sealed_per_block, self.block_bytes = pack(self.exact_bytes, self.sealed_bytes)
        self.tiers = (
            TierLayout("device", self.block_bytes, self._skipped_bytes() if skipped else 0),
            TierLayout("host", page_bytes(self.host_fields), pinned=True),
            TierLayout("states", page_bytes(self.state_fields), paged=False),
        )

    def resized(self, max_model_len: int) -> Layout:
        """The same layout for another ``max_model_len``."""
        return Layout(self.spec, self.shape, self.dtype, max_model_len, self.fetch_buffer)

    def with_fields(self, **fields: Any) -> Layout:
        """The same layout for another policy: with these fields of a KVSpec, all others as they are."""
        return Layout(replace(self.spec, **fields), self.shape, self.dtype, self.max_model_len, self.fetch_buffer)

    def skips(self, layer: int) -> bool:
        """Whether a layer is one that the policy leaves exact."""
        return layer not in self.compressed

    def alike(self, most: int) -> Iterator[slice]:
        """All layers in order, at most ``most`` at a time, and together only those that are alike."""
        for run in self.runs:
            for first in run[::most]:
                yield slice(first, min(first + most, run.stop))

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the values of one chunk and kv head that are fetched from the host; 0 where none are."""
        if not self.buffer_fields:
            return 0
        (values,) = self.host_fields
        return math.prod(values.shape[2:]) * values.dtype.itemsize

    def bytes_per_block(self) -> Blocks:
        """Bytes of one block of each tier over all layers, and of a segment's slot: its buffer of fetched values."""
        layers, skipped = len(self.compressed), 2 * self.spec.skip_layers
        sizes = {tier.name: layers * tier.block_bytes + skipped * tier.skipped_bytes for tier in self.tiers}
        return Blocks(sizes, segment_slots=layers * sum(field.nbytes for field in self.buffer_fields))

    def fixed_blocks(self, sequences: int) -> Blocks:
        """What that many sequences of any length have: their numbers, and slots and states of segments."""
        if not self.spec.seals:
            return Blocks(sequences=sequences)
        segments = sequences
        if self.growth.learns:
            segments += max(MOST_SEGMENTS - 1, sequences // SPARE_SEGMENTS)  # one may have as many as are allowed
        return Blocks(sequences=sequences, segment_slots=segments, states=segments if self.growth.learns else 0)

    def fixed_bytes(self, sequences: int) -> int:
        """Device bytes of that; one more of each pads captured batches."""
        count, unit = self.fixed_blocks(sequences), self.bytes_per_block()
        return sum((count[kind] + 1) * unit[kind] for kind in ("segment_slots", "states"))

    def pages(self, start: int, capacity: int, at: Standing | None = None) -> PageCount:
        """What a sequence needs whose prompt reaches ``start`` tokens and that may grow to ``capacity`` tokens.

        A sequence that starts dense and may outgrow ``late_limit`` holds both kinds: it is compressed on the way.

        Args:
            at: how far it is sealed already; its segments and their static pages are not counted. None is a new one.
        """
        spec, at = self.spec, at or Standing()
        if not spec.seals:
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
        sealed = spec.sealed_pages(capacity)
        return PageCount(dense, static, ring, sealed, sealed if self.host_fields else 0, to_come.segments)

    def most_pages(self, capacity: int) -> PageCount:
        """The most of each kind that a sequence of up to ``capacity`` tokens may have, whether its prompt is compressed
        or not."""
        both = self.pages(0, capacity), self.pages(capacity, capacity)
        return PageCount(*map(max, *(pages.counts for pages in both)))

    def blocks(self, pages: PageCount) -> Blocks:
        """Blocks that hold ``pages``, kind by kind: a block holds pages of one kind."""
        exact = math.ceil(pages.dense / self.exact_per_block) + math.ceil(
            (pages.static + pages.ring) / self.exact_per_block
        )
        sealed = math.ceil(pages.sealed / self.sealed_per_block) if pages.sealed else 0
        return Blocks(
            device=exact + sealed,
            host=pages.host,
            segment_slots=pages.segments,
            states=pages.segments if self.growth.learns else 0,
        )

    def demand(self, start: int, capacity: int) -> Blocks:
        """What a new sequence takes: blocks of each tier, slots and states of segments, and its own slot."""
        return self.blocks(self.pages(start, capacity)) + Blocks(sequences=1)

    def most_demand(self, capacity: int) -> Blocks:
        """The most of each that a new sequence of up to ``capacity`` tokens takes, however long its prompt is."""
        short, long = self.demand(1, capacity), self.demand(capacity, capacity)
        return Blocks({kind: max(short[kind], long[kind]) for kind in {**short, **long}})

    def snapshot_bytes(self, capacity: int) -> int:
        """Bytes of a snapshot of ``capacity`` tokens, at most."""
        exact = 2 * self.spec.skip_layers * self._exact_layer_bytes(capacity)
        return len(self.compressed) * self._compressed_layer_bytes(capacity) + exact

    def snapshot_layer_bytes(self, capacity: int) -> int:
        """The same for any of its layers."""
        exact = self._exact_layer_bytes(capacity) if self.spec.skip_layers else 0
        return max(self._compressed_layer_bytes(capacity), exact)

    def _exact_layer_bytes(self, capacity: int) -> int:
        return math.ceil(capacity / PAGE) * self.exact_bytes

    def _compressed_layer_bytes(self, capacity: int) -> int:
        pages = self.most_pages(capacity)
        sealed = pages.sealed * self.sealed_bytes + pages.host * page_bytes(self.host_fields)
        most = max(pages.dense * self.exact_bytes, sealed + (pages.static + pages.ring) * self.exact_bytes)
        return most + max(1, pages.segments) * page_bytes(self.state_fields)

    def _skipped_bytes(self) -> int:
        """Bytes of a block of the device tier in a skipped layer: its sealed pages are exact ones.

        Names are further apart, by a multiple of 16 bytes, as vector loads require.
        """
        apart = max(GRANULE, -(-self.exact_bytes // (self.sealed_bytes // GRANULE) // 16) * 16)
        return self.block_bytes // GRANULE * apart

    def _buffer_fields(self) -> tuple[Field, ...]:
        """The fields of a segment's ``ChunkBuffer``; none where nothing is chosen or it cannot hold a step."""
        spec, heads = self.spec, self.shape.num_kv_heads
        if not self.host_fields or not spec.selects or not self.fetch_buffer:
            return ()
        (values,) = self.host_fields
        row = values.shape[2:]
        chunks = spec.sealed_pages(self.max_model_len) * values.shape[1]
        # Captured steps select for up to a page more than the longest sequence has.
        selected = min(chunks, int(spec.budget_chunks(np.asarray(self.max_model_len + PAGE))))
        entries = min(chunks, math.ceil(self.fetch_buffer * selected), MOST_ENTRIES)
        if not entries or entries < selected:
            return ()
        return (
            Field("rows", (heads, entries, *row), values.dtype),
            Field("owner", (heads, entries), torch.int32),
            Field("entry", (heads, chunks), torch.int16),
            Field("used", (heads, entries), torch.int32),
            Field("step", (heads,), torch.int32),
        )
