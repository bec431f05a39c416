"""What a policy stores where: the bytes of pages and sequences, from which pools, planner and admission all count."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch

from shadowkv.kvcache.memory import Field, page_bytes
from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import FETCH_BUFFER, PAGE, KVSpec


@dataclass(frozen=True)
class Blocks:
    """A number of blocks of each tier."""

    device: int
    host: int

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.device + other.device, self.host + other.host)

    def __sub__(self, other: Blocks) -> Blocks:
        return Blocks(self.device - other.device, self.host - other.host)

    def within(self, other: Blocks) -> bool:
        """Whether both numbers are at most those of ``other``."""
        return self.device <= other.device and self.host <= other.host


@dataclass(frozen=True)
class PageCount:
    """Pages of each kind that a sequence needs to reach its full length."""

    dense: int = 0
    static: int = 0
    ring: int = 0
    sealed: int = 0


@dataclass(frozen=True)
class BlockCount:
    """Blocks by what their pages hold; a block holds pages of one kind."""

    dense: int = 0
    exact: int = 0
    sealed: int = 0
    host: int = 0

    @property
    def total(self) -> Blocks:
        """Blocks of each tier."""
        return Blocks(self.dense + self.exact + self.sealed, self.host)

    def lacking(self, owned: BlockCount) -> BlockCount:
        """What is missing of each kind where ``owned`` is there."""
        kinds = [field.name for field in fields(self)]
        return BlockCount(*(max(0, getattr(self, kind) - getattr(owned, kind)) for kind in kinds))


MOST_ENTRIES = 32767
"""Chunks that the buffer can number."""

LEAST_WASTE = 0.02
"""Share of a block that may be lost to pages that do not fill it."""


def pack(exact: int, sealed: int) -> tuple[int, int, int]:
    """Pages of either kind in a block, and its bytes: the smallest block that loses little, whichever it holds."""
    best, least = (1, 1, max(exact, sealed)), 1.0
    for count in range(1, 9):
        other = max(1, round(count * exact / sealed))
        size = max(count * exact, other * sealed)
        waste = 1 - min(count * exact, other * sealed) / size
        if waste < least:
            best, least = (count, other, size), waste
        if least <= LEAST_WASTE:
            break
    return best


class Layout:
    """Page and state sizes of ``spec`` (resolved) for ``shape`` at the cache's ``dtype``, per layer.

    Args:
        max_model_len: longest sequence, in tokens.
        fetch_buffer: chunks of a sequence's buffer of fetched values, in those that a step selects of the longest
            context: at least 1, or 0 for no buffer.
    """

    def __init__(
        self,
        spec: KVSpec,
        shape: ModelShape,
        dtype: torch.dtype,
        parts: Parts,
        max_model_len: int,
        fetch_buffer: float = FETCH_BUFFER,
    ) -> None:
        self.spec, self.shape, self.dtype, self.parts = spec, shape, dtype, parts
        self.max_model_len, self.fetch_buffer = max_model_len, fetch_buffer
        heads = (shape.num_kv_heads, PAGE, shape.head_dim)
        self.exact_fields = (Field("k", heads, dtype), Field("v", heads, dtype))
        on_device = [*parts.keys.page_fields(), *parts.index.page_fields()]
        if spec.outliers or parts.index.reads_excluded:
            # A byte per kv head and chunk: exact elsewhere (sink, outlier), so neither scored nor selected.
            on_device.append(Field("excluded", (shape.num_kv_heads, PAGE // spec.chunk), torch.bool))
        values = parts.values.page_fields()
        self.sealed_fields: tuple[Field, ...] = ()
        self.host_fields: tuple[Field, ...] = ()
        if spec.seals:
            self.host_fields = tuple(x for x in values if x.name == "values") if spec.place == "host" else ()
            self.sealed_fields = (*on_device, *(x for x in values if x not in self.host_fields))
        self.state_fields = (*parts.keys.state_fields(), *parts.index.state_fields()) if spec.seals else ()
        self.buffer_fields = self._buffer_fields()
        self.exact_bytes = page_bytes(self.exact_fields)
        self.sealed_bytes = page_bytes(self.sealed_fields)
        self.host_block_bytes = page_bytes(self.host_fields)
        self.exact_per_block, self.sealed_per_block, self.block_bytes = 1, 0, self.exact_bytes
        if spec.seals:
            self.exact_per_block, self.sealed_per_block, self.block_bytes = pack(self.exact_bytes, self.sealed_bytes)

    @property
    def state_bytes(self) -> int:
        """Device bytes of one sequence's state over all layers, its buffer of fetched chunks included."""
        return self.shape.num_layers * sum(field.nbytes for field in (*self.state_fields, *self.buffer_fields))

    def resized(self, max_model_len: int) -> Layout:
        """The same for other longest sequences."""
        return Layout(self.spec, self.shape, self.dtype, self.parts, max_model_len, self.fetch_buffer)

    def bytes_per_block(self) -> Blocks:
        """Bytes of one block of each tier over all layers."""
        return Blocks(self.shape.num_layers * self.block_bytes, self.shape.num_layers * self.host_block_bytes)

    def pages(self, start: int, capacity: int) -> PageCount:
        """Pages of a sequence whose prompt has ``start`` tokens and that may grow to ``capacity`` tokens.

        A sequence that starts dense and may outgrow ``dense_limit`` holds both kinds: it is compressed on the way.
        """
        spec = self.spec
        if not spec.seals:
            return PageCount(dense=math.ceil(capacity / PAGE))
        dense = math.ceil(min(capacity, spec.dense_limit) / PAGE) if start <= spec.dense_limit else 0
        if capacity <= spec.dense_limit:
            return PageCount(dense=dense)
        return PageCount(dense, spec.static_pages, spec.ring_pages, spec.sealed_pages(capacity))

    def block_count(self, pages: PageCount) -> BlockCount:
        """Blocks that hold ``pages``."""
        return BlockCount(
            math.ceil(pages.dense / self.exact_per_block),
            math.ceil((pages.static + pages.ring) / self.exact_per_block),
            math.ceil(pages.sealed / self.sealed_per_block) if pages.sealed else 0,
            pages.sealed if self.host_fields else 0,
        )

    def blocks(self, pages: PageCount) -> Blocks:
        """Blocks of each tier that hold ``pages``."""
        return self.block_count(pages).total

    def _buffer_fields(self) -> tuple[Field, ...]:
        """The fields of a sequence's ``ChunkBuffer``; none where it has nothing to choose or cannot hold a step."""
        spec, heads = self.spec, self.shape.num_kv_heads
        if not self.host_fields or spec.index == "none" or not self.fetch_buffer:
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
