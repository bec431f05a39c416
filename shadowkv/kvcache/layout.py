"""What a policy stores where: the bytes of pages and sequences, from which pools, planner and admission all count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from shadowkv.kvcache.memory import Field, page_bytes
from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import PAGE, KVSpec


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


class Layout:
    """Page and state sizes of ``spec`` (resolved) for ``shape`` at the cache's ``dtype``, per layer."""

    def __init__(self, spec: KVSpec, shape: ModelShape, dtype: torch.dtype, parts: Parts) -> None:
        self.spec = spec
        self.shape = shape
        heads = (shape.num_kv_heads, PAGE, shape.head_dim)
        self.exact_fields = (Field("k", heads, dtype), Field("v", heads, dtype))
        on_device = [*parts.keys.page_fields(), *parts.index.page_fields()]
        # A bit per kv head and chunk: exact elsewhere (sink, outlier), so neither scored nor selected.
        excluded = Field("excluded", (shape.num_kv_heads, PAGE // spec.chunk), torch.bool)
        values = parts.values.page_fields()
        self.sealed_fields: tuple[Field, ...] = ()
        self.host_fields: tuple[Field, ...] = ()
        if spec.seals:
            host = spec.place == "host"
            self.sealed_fields = (*on_device, excluded, *(() if host else values))
            self.host_fields = values if host else ()
        self.state_fields = (*parts.keys.state_fields(), *parts.index.state_fields()) if spec.seals else ()
        self.exact_bytes = page_bytes(self.exact_fields)
        self.sealed_bytes = page_bytes(self.sealed_fields)
        self.block_bytes = max(self.exact_bytes, self.sealed_bytes)
        self.host_block_bytes = page_bytes(self.host_fields)
        self.sealed_per_block = self.block_bytes // self.sealed_bytes if spec.seals else 0

    @property
    def state_bytes(self) -> int:
        """Device bytes of one sequence's state over all layers."""
        return self.shape.num_layers * sum(field.nbytes for field in self.state_fields)

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

    def blocks(self, pages: PageCount) -> Blocks:
        """Blocks of each tier that hold ``pages``."""
        sealed = math.ceil(pages.sealed / self.sealed_per_block) if pages.sealed else 0
        host = pages.sealed if self.host_fields else 0
        return Blocks(pages.dense + pages.static + pages.ring + sealed, host)
