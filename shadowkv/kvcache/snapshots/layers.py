"""Finds the fields of a snapshot in a cache's memory, and reads and writes them layer by layer.

A ``Reading`` copies a snapshot out of the cache. Meanwhile the sequence can go on, finish or be evicted. A
``Restoring`` copies snapshots into a new sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import BlockPool
from shadowkv.kvcache.memory.streams import Numbers
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.recurrent.states import RecurrentStates
from shadowkv.kvcache.sequences.pools import SequencePools
from shadowkv.kvcache.sequences.sequence import CachedSequence, Segment
from shadowkv.kvcache.sequences.store import ExactRows, GroupStore, exact_rows
from shadowkv.kvcache.snapshots.header import TAIL_INDEX_KEYS, Cut, Link, SnapshotField, SnapshotHeader

COPIED_AT_ONCE = 8192
"""Exact tokens that are copied at a time, to bound the temporary memory."""

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Dtypes in which pages are copied, the largest first. Copies of large words take fewer steps."""


class Location(Protocol):
    """The place of a field in the cache's memory, or of the field's used part."""

    def read(self, layer: int, out: Tensor) -> None:
        """Copies the field, in a layer of the group, into the bytes of this layer, uint8 [layer_bytes]."""

    def write(self, layer: int, data: Tensor) -> None:
        """Copies the field's used part from the bytes of a layer into the cache's memory."""


@dataclass(frozen=True)
class PagesLocation:
    """Compressed pages: ``page_ids`` int64 [n] of ``memory`` [num_layers, page ids, ...]."""

    field: SnapshotField
    memory: Tensor
    page_ids: Tensor

    def read(self, layer: int, out: Tensor) -> None:
        torch.index_select(_words(self.memory[layer]), 0, self.page_ids, out=_words(self.field.of(out)))

    def write(self, layer: int, data: Tensor) -> None:
        _words(self.memory[layer])[self.page_ids] = _words(self.field.of(data)[: len(self.page_ids)])


@dataclass(frozen=True)
class StateLocation:
    """A fitted state: ``state`` of ``memory`` [num_layers, states, ...]."""

    field: SnapshotField
    memory: Tensor
    state: int

    def read(self, layer: int, out: Tensor) -> None:
        self.field.of(out).copy_(self.memory[layer, self.state])

    def write(self, layer: int, data: Tensor) -> None:
        self.memory[layer, self.state].copy_(self.field.of(data))


@dataclass(frozen=True)
class TokensLocation:
    """Exact tokens: ``rows`` of keys and of values, or of index keys, each [num_layers, page ids, H, 64, d]."""

    field: SnapshotField
    memory: tuple[Tensor, ...]
    rows: ExactRows

    def read(self, layer: int, out: Tensor) -> None:
        for exact, tokens in zip(self.memory, self.field.of(out), strict=True):
            for portion, pages, offsets in self._portions():
                tokens[portion] = exact[layer][pages, :, offsets]

    def write(self, layer: int, data: Tensor) -> None:
        for exact, tokens in zip(self.memory, self.field.of(data), strict=True):
            for portion, pages, offsets in self._portions():
                exact[layer][pages, :, offsets] = tokens[portion]

    def _portions(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start in range(0, len(self.rows.pages), COPIED_AT_ONCE):
            portion = slice(start, min(start + COPIED_AT_ONCE, len(self.rows.pages)))
            yield portion, self.rows.pages[portion], self.rows.offsets[portion]


class SnapshotLocations:
    """The places of the ``used`` part of a snapshot in the memory of a group of layers, for the sequence that has it
    now.

    Attributes:
        held: ids of the device pages, the host pages and the states that contain this part.
    """

    def __init__(self, store: GroupStore, header: SnapshotHeader, used: Cut, sequence: CachedSequence) -> None:
        self._store, self._numbers = store, Numbers()
        self._fields = {field.name: field for field in header.fields}
        self._locations = list[Callable[[Tensor], list[Location]]]()
        self.held: dict[str, list[int]] = {"device": [], "host": [], "states": []}
        path = {segment.first: segment for segment in sequence.path}
        for number, stored in enumerate(used.segments):
            segment, name = path[stored.first], f"segments.{number}"
            first = (stored.begin(header.start) - stored.first) // PAGE
            self._add_pages(f"{name}.pages", segment, slice(first, first + stored.num_pages))
            if not stored.continued:
                self._add_state(f"{name}.state", segment.state)
                self._add_tokens(f"{name}.static", segment.static, 0, segment.static_tokens)
        ring = sequence.ring if sequence.path else sequence.dense
        self._add_tokens("tail", ring, header.exact, header.exact + used.tail_tokens)
        if used.observed and sequence.state_reserve:
            self._add_state("observed", sequence.state_reserve[0])

    def on_device(self) -> list[Location]:
        """Returns all locations, which are alike in every layer. Copies the numbers that they need to the device, all
        at once and without waiting."""
        numbers = self._numbers.on(self._store.compute)
        return [location for locate in self._locations for location in locate(numbers)]

    def _add_pages(self, name: str, segment: Segment, numbers: slice) -> None:
        pages, values = segment.pages[numbers], segment.value_pages[numbers]
        on_host = {field.name for field in self._store.layout.host_fields}
        self.held["device"] += pages
        self.held["host"] += values if on_host else []
        if not pages:
            return
        of_pages, of_values = self._numbers.add(pages), self._numbers.add(values)
        self._locations.append(
            lambda x: [
                PagesLocation(self._fields[f"{name}.{field}"], memory, x[of_values if field in on_host else of_pages])
                for field, memory in self._store.page.items()
            ]
        )

    def _add_state(self, name: str, state: int | None) -> None:
        if state is None:
            return
        self.held["states"].append(state)
        fields, arrays = self._fields, self._store.state.items()
        states = [StateLocation(fields[f"{name}.{field}"], memory, state) for field, memory in arrays]
        self._locations.append(lambda _: [*states])

    def _add_tokens(self, name: str, ring: list[int], start: int, stop: int) -> None:
        if start == stop:
            return
        self.held["device"] += [ring[number % len(ring)] for number in range(start // PAGE, -(-stop // PAGE))]
        rows = exact_rows(self._numbers, ring, start, stop)
        exact = self._store.k, self._store.v
        self._locations.append(lambda x: [TokensLocation(self._fields[name], exact, rows(x))])
        if (index_keys := self._store.index_keys) is not None:
            field = self._fields[TAIL_INDEX_KEYS]  # with an indexer there is no sink, so the tail has all exact tokens
            self._locations.append(lambda x: [TokensLocation(field, (index_keys,), rows(x))])


def _words(rows: Tensor) -> Tensor:
    """Views contiguous rows [n, ...] as [n, m] of the largest words whose size divides a row."""
    size = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    word = next(dtype for dtype in WORDS if size % dtype.itemsize == 0)
    return rows.flatten(1).view(word)


def recurrent_locations(states: RecurrentStates, header: SnapshotHeader, row: int) -> list[Location]:
    """Returns the places of a recurrent state."""
    arrays = {f"recurrent.{name}": array for name, array in states.arrays.items()}
    return [StateLocation(field, arrays[field.name], row) for field in header.fields]


class Reading:
    """Reads a snapshot of a sequence, as the sequence was when the reading began.

    This object holds the blocks that it reads until it is closed. Meanwhile the sequence may decode, and be trimmed,
    forked and released. Tokens that are read cannot be truncated. Later tokens overwrite an exact tail and a recurrent
    state. So a compressed sequence cannot be extended while its tail is read, and a sequence that still decodes should
    be read only up to a fork point.

    Layers may be read on any stream that is ordered after the work launched before the reading was opened.

    Attributes:
        header: the header of the snapshot.
    """

    def __init__(self, pools: SequencePools, sequence: CachedSequence, header: SnapshotHeader) -> None:
        self.header, self._places, self._open = header, pools.layout.places, True
        self._locations: list[list[Location]] = []
        self._held: list[tuple[BlockPool, list[int]]] = []
        self._sequences = [sequence.of_group(number) for number in range(len(pools.pools))]
        for pool, of_group, in_group in zip(pools.pools, header.of_groups, self._sequences):
            locations = SnapshotLocations(pool.store, of_group, of_group.cut(header.length), in_group)
            self._held += [(pool.pools[kind], pool.pools[kind].blocks_of(x)) for kind, x in locations.held.items()]
            self._locations.append(locations.on_device())
        self._copies = {
            number: self._copied(number, pool.layout.shape.num_layers, pool.store.compute)
            for number, pool in enumerate(pools.pools)
            if pool.layout.window
        }
        self._recurrent = pools.recurrent
        self._checkpoint = sequence.recurrent.at(header.length)
        if self._recurrent is not None:
            row = sequence.recurrent.find(header.length, sequence.length)
            states = [] if row is None else recurrent_locations(self._recurrent, header.of_groups[-1], row)
            self._locations.append(states)
            if self._checkpoint is not None:
                self._recurrent.open_reading(self._checkpoint)
        for blocks, ids in self._held:
            blocks.retain(ids)
        for in_group in self._sequences:
            in_group.readings.append(header.length)

    def read_layer(self, layer: int, out: Tensor) -> None:
        """Copies a layer into ``out``, uint8 [bytes of the layer] on the cache's device, which must begin at a multiple
        of 16 bytes. Bytes outside fields become 0. The host does not wait."""
        number, at = self._places[layer]
        if number in self._copies:
            copied = self._copies[number][at]
            out[: len(copied)].copy_(copied)
        else:
            self._read(number, at, out)

    def _copied(self, number: int, num_layers: int, device: torch.device) -> Tensor:
        """Copies all layers of a group at once, uint8 [layers, bytes of a layer], because later tokens soon overwrite a
        window."""
        header = self.header.of_groups[number]
        layers = torch.empty(num_layers, header.layer_bytes, dtype=torch.uint8, device=device)
        for at, layer in enumerate(layers):
            self._read(number, at, layer)
        return layers

    def _read(self, number: int, at: int, out: Tensor) -> None:
        """Copies layer ``at`` of a group."""
        header = self.header.of_groups[number]
        for location in self._locations[number]:
            location.read(at, out)
        starts = [*(field.offset for field in header.fields[1:]), header.layer_bytes]
        stops = [field.offset + field.nbytes for field in header.fields]
        for stop, start in zip(stops, starts, strict=bool(stops)):
            if stop < start:
                out[stop:start].zero_()

    def close(self) -> None:
        """Releases the blocks that this object reads. Later work on the device must be ordered after the copies of the
        layers."""
        if not self._open:
            return
        self._open = False
        if self._recurrent is not None and self._checkpoint is not None:
            self._recurrent.close_reading(self._checkpoint)
        for blocks, ids in self._held:
            blocks.release(ids)
        for in_group in self._sequences:
            in_group.readings.remove(self.header.length)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Restoring:
    """A new sequence whose bytes are not written yet. Keep this object until all layers are written.

    Until then, all users of the sequence must wait. If ``sequence.pending_layers`` is set, its ``wait`` waits for a
    layer. Layers may be written on any stream that is ordered after the work that was launched before this object was
    made.

    Attributes:
        sequence: the new sequence.
    """

    def __init__(self, pools: SequencePools, chain: Sequence[Link], sequence: CachedSequence) -> None:
        self.sequence, self._places = sequence, pools.layout.places
        self._locations = [
            [
                SnapshotLocations(pool.store, of_group, of_group.cut(stop), sequence.of_group(number)).on_device()
                for number, (pool, of_group) in enumerate(zip(pools.pools, header.of_groups))
            ]
            for header, stop in chain
        ]
        if pools.recurrent is not None:
            for of_link in self._locations:
                of_link.append([])
            own = chain[-1].header.of_groups[-1]
            for row in sequence.recurrent.restored_rows:
                self._locations[-1][-1] += recurrent_locations(pools.recurrent, own, row)

    def has(self, link: int, layer: int) -> bool:
        """Whether any bytes of a layer are used, in snapshot number ``link`` of the chain."""
        return bool(self._locations[link][self._places[layer][0]])

    def write_layer(self, link: int, layer: int, data: Tensor) -> None:
        """Copies the used part of a layer, from snapshot number ``link`` of the chain, into the sequence. The host does
        not wait.

        Args:
            data: uint8 [bytes of the layer] on the cache's device. It must begin at a multiple of 16 bytes.
        """
        number, at = self._places[layer]
        for location in self._locations[link][number]:
            location.write(at, data)
