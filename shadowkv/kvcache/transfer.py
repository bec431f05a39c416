"""Sequences as tensors of their own: what moves from cache to cache, whatever their blocks, budgets and places are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shadowkv.kvcache.growth import Standing
from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.pool import SequencePool, Span
from shadowkv.kvcache.sequence import Segment, Sequence
from shadowkv.kvcache.shape import ModelShape
from shadowkv.kvcache.spec import PAGE, PREFILLS, KVSpec
from shadowkv.kvcache.store import Store


@dataclass(frozen=True)
class Form:
    """What two caches must have in common for one to take over what the other has stored.

    Attributes:
        spec: the policy without what says how much is selected, stays exact or lies where.
        fields: of sealed pages and of fitted states.
    """

    spec: KVSpec
    shape: ModelShape
    dtype: torch.dtype
    fields: frozenset[Field]


@dataclass(frozen=True)
class ExportedSegment:
    """A segment's bytes.

    Attributes:
        first, end, reach, static_tokens: as a ``Segment`` has them.
        pages: by field, [num_layers, pages, *field.shape].
        state: by field, [num_layers, *field.shape].
        static: keys and values of its sink and outliers, [2, num_layers, n, H, d].
    """

    first: int
    end: int
    reach: int
    static_tokens: int
    pages: dict[str, Tensor]
    state: dict[str, Tensor]
    static: Tensor

    @property
    def num_pages(self) -> int:
        """Sealed pages."""
        return next(iter(self.pages.values())).shape[1]


@dataclass(frozen=True)
class Exported:
    """A sequence.

    Attributes:
        length: tokens.
        segments: what is sealed, in order.
        tail: rotated keys and values of the other tokens, [2, num_layers, n, H, d].
        observed: of a dense sequence that may be compressed, what is known of its state, by field; else empty.
    """

    form: Form
    length: int
    segments: tuple[ExportedSegment, ...]
    tail: Tensor
    observed: dict[str, Tensor]


class Transfer:
    """Export and import of a cache's sequences."""

    def __init__(self, store: Store, pool: SequencePool) -> None:
        self.store, self.pool, self.layout = store, pool, store.layout
        layout = store.layout
        spec = replace(layout.spec, budget=None, mass=None, drawn=0.0, local=1, place="device")
        spec = replace(spec, prefill=spec.prefill or PREFILLS[0])
        fields = frozenset((*layout.sealed_fields, *layout.host_fields, *layout.state_fields))
        self.form = Form(spec, layout.shape, layout.dtype, fields)

    def export(self, sequence: Sequence) -> Exported:
        """Copies, on the device that computes."""
        segments = tuple(map(self._export_segment, sequence.path))
        ring = sequence.ring if sequence.path else sequence.dense
        tail = self._read(ring, sequence.sealed, sequence.length)
        observed = self._state(sequence.state_reserve[0]) if sequence.observed else {}
        return Exported(self.form, sequence.length, segments, tail, observed)

    def load(self, exported: Exported, capacity: int) -> Sequence:
        """A new sequence with copies of what ``exported`` has; see ``KVCache.load``."""
        if exported.form != self.form:
            raise ValueError(f"the sequence is stored as {exported.form}, this cache stores {self.form}")
        length, compressed = exported.length, bool(exported.segments)
        if not compressed and self.layout.growth.sealed(Standing(), length, length == capacity).fits:
            raise ValueError(f"{length} tokens are all exact there, and would be sealed here")
        spans = [Span(one.first, one.end, one.reach, one.static_tokens, one.num_pages) for one in exported.segments]
        sequence = self.pool.restore(spans, length, capacity)
        for segment, one in zip(sequence.path, exported.segments, strict=True):
            self._load_segment(segment, one)
        ring = sequence.ring if compressed else sequence.dense
        self._write(ring, sequence.sealed, exported.tail)
        if exported.observed and sequence.state_reserve:
            self._load_state(sequence.state_reserve[0], exported.observed)
            sequence.observed = True
        return sequence

    def _export_segment(self, segment: Segment) -> ExportedSegment:
        return ExportedSegment(
            segment.first,
            segment.end,
            segment.reach,
            segment.static_tokens,
            {name: self.store.page[name][:, self._names(pages)] for name, pages in self._pages(segment)},
            {} if segment.state is None else self._state(segment.state),
            self._read(segment.static, 0, segment.static_tokens),
        )

    def _load_segment(self, segment: Segment, one: ExportedSegment) -> None:
        for name, pages in self._pages(segment):
            self.store.page[name][:, self._names(pages)] = one.pages[name]
        if segment.state is not None:
            self._load_state(segment.state, one.state)
        self._write(segment.static, 0, one.static)

    def _state(self, name: int) -> dict[str, Tensor]:
        return {field: state[:, name].clone() for field, state in self.store.state.items()}

    def _load_state(self, name: int, found: dict[str, Tensor]) -> None:
        for field, state in self.store.state.items():
            state[:, name] = found[field]

    def _pages(self, segment: Segment) -> list[tuple[str, list[int]]]:
        """Fields of sealed pages, and the names of those that have them."""
        on_host = {field.name for field in self.layout.host_fields}
        return [(name, segment.value_pages if name in on_host else segment.pages) for name in self.store.page]

    def _names(self, pages: list[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.store.compute)

    def _places(self, pages: list[int], start: int, count: int) -> tuple[Tensor, Tensor]:
        """Names and rows of ``count`` tokens from position ``start`` on in a ring of exact pages."""
        position = torch.arange(start, start + count, device=self.store.compute)
        return self._names(pages)[position // PAGE % max(1, len(pages))], position % PAGE

    def _read(self, pages: list[int], start: int, stop: int) -> Tensor:
        names, rows = self._places(pages, start, stop - start)
        return torch.stack([x[:, names, :, rows].transpose(0, 1) for x in (self.store.k, self.store.v)])

    def _write(self, pages: list[int], start: int, tokens: Tensor) -> None:
        names, rows = self._places(pages, start, tokens.shape[2])
        for x, new in zip((self.store.k, self.store.v), tokens, strict=True):
            x[:, names, :, rows] = new.transpose(0, 1)
