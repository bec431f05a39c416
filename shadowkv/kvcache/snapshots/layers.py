"""Where the fields of a snapshot's layer are in a cache's memory, to read them from there and write them there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shadowkv.kvcache.memory.by_layer import ByLayer
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.batch import ExactRows
from shadowkv.kvcache.sealing.plans import Numbers, exact_rows
from shadowkv.kvcache.sequences.sequence import CachedSequence, Segment
from shadowkv.kvcache.sequences.store import Store
from shadowkv.kvcache.snapshots.fields import SnapshotField
from shadowkv.kvcache.snapshots.header import Cut, SnapshotHeader

TOKENS_AT_ONCE = 8192
"""Exact tokens that are copied at a time, to bound the temporary memory."""

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Words that pages are copied in: copies in the largest words take the fewest steps."""


class Place(Protocol):
    """Where a field is, or the part of it that is used."""

    def read(self, layer: int, out: Tensor) -> None:
        """Copies it to its place in a layer of bytes, uint8 [layer_bytes]."""

    def write(self, layer: int, data: Tensor) -> None:
        """Copies the part of it that is used from there."""


@dataclass(frozen=True)
class PagesPlace:
    """Sealed pages: ``names`` int64 [n] of ``memory`` [num_layers, names, ...]."""

    field: SnapshotField
    memory: Tensor | ByLayer
    names: Tensor

    def read(self, layer: int, out: Tensor) -> None:
        torch.index_select(_words(self.memory[layer]), 0, self.names, out=_words(self.field.of(out)))

    def write(self, layer: int, data: Tensor) -> None:
        _words(self.memory[layer])[self.names] = _words(self.field.of(data)[: len(self.names)])


@dataclass(frozen=True)
class StatePlace:
    """A fitted state: number ``name`` of ``memory`` [num_layers, states, ...]."""

    field: SnapshotField
    memory: Tensor | ByLayer
    name: int

    def read(self, layer: int, out: Tensor) -> None:
        self.field.of(out).copy_(self.memory[layer, self.name])

    def write(self, layer: int, data: Tensor) -> None:
        self.memory[layer, self.name].copy_(self.field.of(data))


@dataclass(frozen=True)
class TokensPlace:
    """Exact tokens: ``rows`` of keys and of values [num_layers, names, H, 64, d]."""

    field: SnapshotField
    memory: tuple[Tensor | ByLayer, Tensor | ByLayer]
    rows: ExactRows

    def read(self, layer: int, out: Tensor) -> None:
        for exact, tokens in zip(self.memory, self.field.of(out), strict=True):
            for some, pages, offsets in self._parts():
                tokens[some] = exact[layer][pages, :, offsets]

    def write(self, layer: int, data: Tensor) -> None:
        for exact, tokens in zip(self.memory, self.field.of(data), strict=True):
            for some, pages, offsets in self._parts():
                exact[layer][pages, :, offsets] = tokens[some]

    def _parts(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, len(self.rows.pages), TOKENS_AT_ONCE):
            some = slice(start, min(start + TOKENS_AT_ONCE, len(self.rows.pages)))
            yield some, self.rows.pages[some], self.rows.offsets[some]


class SnapshotPlaces:
    """The places of the part of a snapshot that is ``used``, in a sequence as it is now.

    Attributes:
        held: names of the device pages, the host pages and the states that it is in.
    """

    def __init__(self, store: Store, header: SnapshotHeader, used: Cut, sequence: CachedSequence) -> None:
        self._store, self._numbers = store, Numbers()
        self._fields = {field.name: field for field in (*header.fields, *header.exact_fields)}
        self._found, self._exact = list[Callable[[Tensor], Place]](), list[Callable[[Tensor], Place]]()
        self.held: dict[str, list[int]] = {"device": [], "host": [], "states": []}
        path = {segment.first: segment for segment in sequence.path}
        for number, one in enumerate(used.segments):
            segment, name = path[one.first], f"segments.{number}"
            first = (one.begin(header.start) - one.first) // PAGE
            self._add_pages(f"{name}.pages", segment, slice(first, first + one.num_pages))
            if not one.continued:
                self._add_state(f"{name}.state", segment.state)
                self._add_tokens(f"{name}.static", segment.static, 0, segment.static_tokens)
        ring = sequence.ring if sequence.path else sequence.dense
        self._add_tokens("tail", ring, header.exact, header.exact + used.tail_tokens)
        if header.exact_fields:
            self._add_exact(sequence.pages, ring, header.start, used.end(header.start))
        if used.observed and sequence.state_reserve:
            self._add_state("observed", sequence.state_reserve[0])

    def found(self) -> Callable[[int], list[Place]]:
        """All places, by layer; the numbers that they need are copied to the device at once, without waiting."""
        there = self._numbers.on(self._store.compute)
        compressed, exact = ([place(there) for place in places] for places in (self._found, self._exact))
        return lambda layer: exact if self._store.layout.skips(layer) else compressed

    def _add_pages(self, name: str, segment: Segment, some: slice) -> None:
        pages, values = segment.pages[some], segment.value_pages[some]
        on_host = {field.name for field in self._store.layout.host_fields}
        self.held["device"] += pages
        self.held["host"] += values if on_host else []
        if not pages:
            return
        for field, memory in self._store.page.items():
            names = self._numbers.add(values if field in on_host else pages)
            self._found.append(partial(_pages_place, self._fields[f"{name}.{field}"], memory, names))

    def _add_state(self, name: str, state: int | None) -> None:
        if state is None:
            return
        self.held["states"].append(state)
        for field, memory in self._store.state.items():
            self._found.append(partial(_state_place, self._fields[f"{name}.{field}"], memory, state))

    def _add_tokens(self, name: str, ring: list[int], start: int, stop: int) -> None:
        if start == stop:
            return
        self.held["device"] += [ring[number % len(ring)] for number in range(start // PAGE, -(-stop // PAGE))]
        rows = exact_rows(self._numbers, ring, start, stop)
        self._found.append(lambda x: TokensPlace(self._fields[name], (self._store.k, self._store.v), rows(x)))

    def _add_exact(self, sealed: list[int], ring: list[int], start: int, stop: int) -> None:
        """Tokens of skipped layers: first those in pages that other layers have sealed, then those in the ring."""
        later = range(len(sealed), -(-stop // PAGE))
        rows = exact_rows(self._numbers, [*sealed, *(ring[page % len(ring)] for page in later)], start, stop)
        self._exact.append(lambda x: TokensPlace(self._fields["tokens"], (self._store.k, self._store.v), rows(x)))


def _pages_place(field: SnapshotField, memory: Tensor | ByLayer, names: slice, numbers: Tensor) -> Place:
    return PagesPlace(field, memory, numbers[names])


def _state_place(field: SnapshotField, memory: Tensor | ByLayer, name: int, numbers: Tensor) -> Place:
    return StatePlace(field, memory, name)


def _words(rows: Tensor) -> Tensor:
    """[n, ...], each row in one piece, as [n, m] of the largest words that a row is a multiple of."""
    size = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    word = next(dtype for dtype in WORDS if size % dtype.itemsize == 0)
    return rows.flatten(1).view(word)
