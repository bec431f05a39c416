"""Sequences as bytes and back: snapshots of what a cache holds, for caches with any blocks, budgets and places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shadowkv.kvcache.memory.arenas import Blocks, Field
from shadowkv.kvcache.policy.growth import MOST_SEGMENTS
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.outline import Link, Outline
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import Store
from shadowkv.kvcache.snapshots.contents import SnapshotSegment
from shadowkv.kvcache.snapshots.fields import SnapshotField, laid_out
from shadowkv.kvcache.snapshots.form import form_of
from shadowkv.kvcache.snapshots.header import Cut, Snapshot, SnapshotHeader
from shadowkv.kvcache.snapshots.reading import Reading
from shadowkv.kvcache.snapshots.restoring import Restoring


class Transfer:
    """Snapshots of a cache's sequences, and sequences made from snapshots.

    Attributes:
        form: what another cache must have in common with this one.
    """

    def __init__(self, store: Store, pool: SequencePool) -> None:
        self.store, self.pool, self.layout = store, pool, store.layout
        self.form = form_of(store.layout, store.rotary.config)

    def describe(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> SnapshotHeader:
        """What a snapshot of ``sequence`` after ``start`` tokens contains; see ``KVCache.describe``."""
        for point in (start, stop):
            if point and self.pool.fork_point(sequence, point) != point:
                raise ValueError(f"a sequence of {sequence.length} tokens cannot be forked after {point}")
        if stop is not None and stop < start:
            raise ValueError(f"a snapshot from token {start} on cannot end after {stop}")
        content = self._content(sequence, start, stop)
        fields, layer_bytes = self._laid_out(content)
        length = content.end(start)
        return SnapshotHeader(
            form=self.form,
            start=start,
            length=length,
            segments=content.segments,
            tail_tokens=content.tail_tokens,
            observed=content.observed,
            fields=fields,
            num_layers=self.layout.shape.num_layers,
            layer_bytes=layer_bytes,
            skip_layers=self.layout.spec.skip_layers,
            exact_fields=self._exact_fields(length - start),
        )

    def open_reading(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> Reading:
        """Begins to read what ``describe`` says; see ``KVCache.open_reading``."""
        header = self.describe(sequence, start, stop)
        if header.length == start:
            raise ValueError(f"the sequence has nothing to read behind {start} tokens")
        self.pool.arrived(sequence)
        return Reading(self.pool, sequence, header)

    def demand(self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None) -> Blocks:
        """Blocks that ``restore`` takes."""
        return self.pool.demand(self._outline(chain, start, capacity, parent), start, capacity)

    def restore(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> Restoring:
        """A new sequence from snapshots that are still to be written; see ``KVCache.restore``."""
        outline = self._outline(chain, start, capacity, parent)
        if parent is not None:
            self.pool.arrived(parent)  # the new one waits only for what is written to it
        sequence = self.pool.restore(outline, start, capacity, parent)
        header, stop = chain[-1]
        sequence.observed = header.cut(stop).observed and bool(sequence.state_reserve)
        try:
            return Restoring(self.store, chain, sequence)
        except BaseException:  # out of memory, say: the places to write to are copied to the device
            self.pool.release(sequence)
            raise

    def export(self, sequence: CachedSequence, start: int = 0) -> Snapshot:
        """A snapshot on the cache's device."""
        with self.open_reading(sequence, start) as reading:
            header = reading.header
            snapshot = Snapshot(header, torch.empty(header.runs, dtype=torch.uint8, device=self.store.compute))
            for layer in range(header.num_layers):
                reading.read_layer(layer, snapshot.layer(layer))
        return snapshot

    def load(self, chain: Sequence[tuple[Snapshot, int]], capacity: int) -> CachedSequence:
        """A new sequence from snapshots; see ``KVCache.load``."""
        links = [Link(snapshot.header, stop) for snapshot, stop in chain]
        restoring = self.restore(links, links[-1].stop, capacity)
        for number, (snapshot, _) in enumerate(chain):
            for layer in range(snapshot.header.num_layers):
                restoring.write_layer(number, layer, snapshot.layer(layer).to(self.store.compute))
        return restoring.sequence

    def _content(self, sequence: CachedSequence, start: int, stop: int | None) -> Cut:
        """What a snapshot contains."""
        if not sequence.path:
            return Cut((), (sequence.length if stop is None else stop) - start, stop is None and sequence.observed)
        segments = tuple(
            SnapshotSegment(
                first=one.first,
                end=one.end,
                reach=one.reach,
                fitted=one.fitted,
                static_tokens=one.static_tokens,
                num_pages=(one.sealed - max(start, one.first)) // PAGE,
                continued=one.first < start,
            )
            for one in sequence.path
            if one.sealed > start or one is sequence.path[-1]
        )
        if stop is None:
            return Cut(segments, sequence.length - sequence.sealed, False)
        return Cut(tuple(one.cut(start, stop) for one in segments if one.begin(start) < stop), 0, False)

    def _laid_out(self, content: Cut) -> tuple[tuple[SnapshotField, ...], int]:
        """The fields of a layer of ``content``, and its bytes."""
        return laid_out((field.name, field.shape, field.dtype) for field in self._arrays(content))

    def _exact_fields(self, tokens: int) -> tuple[SnapshotField, ...]:
        """The fields of a skipped layer."""
        if not (self.layout.spec.skip_layers and tokens):
            return ()
        shape = 2, tokens, self.layout.shape.num_kv_heads, self.layout.shape.head_dim
        return laid_out([("tokens", shape, self.layout.dtype)])[0]

    def _arrays(self, content: Cut) -> Iterator[Field]:
        """Arrays of a layer, sorted by name where caches may keep them in different orders, as places differ."""
        layout, token = self.layout, (self.layout.shape.num_kv_heads, self.layout.shape.head_dim)
        sealed = sorted((*layout.sealed_fields, *layout.host_fields), key=lambda field: field.name)
        state = sorted(layout.state_fields, key=lambda field: field.name)
        for number, one in enumerate(content.segments):
            name = f"segments.{number}"
            if one.num_pages:
                for x in sealed:
                    yield Field(f"{name}.pages.{x.name}", (one.num_pages, *x.shape), x.dtype)
            if not one.continued:
                for x in state:
                    yield Field(f"{name}.state.{x.name}", x.shape, x.dtype)
                if one.static_tokens:
                    yield Field(f"{name}.static", (2, one.static_tokens, *token), layout.dtype)
        if content.tail_tokens:
            yield Field("tail", (2, content.tail_tokens, *token), layout.dtype)
        if content.observed:
            for x in state:
                yield Field(f"observed.{x.name}", x.shape, x.dtype)

    def _outline(self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None) -> Outline:
        """What a sequence from a chain begins with; raises ValueError where it cannot be made here."""
        if not chain:
            raise ValueError("a sequence is restored of at least one snapshot")
        for header, stop in chain:
            self._check(header, stop)
        before = Outline() if parent is None else self.pool.forked(parent, chain[0][0].start)
        outline = before.behind(chain)
        if len(outline.spans) > MOST_SEGMENTS:
            raise ValueError(f"the sequence has {len(outline.spans)} segments, more than {MOST_SEGMENTS}")
        length, final = outline.length, outline.length == capacity or outline.length < start
        most, spec = self.layout.growth.late_limit(0), self.layout.spec
        if spec.seals and not outline.spans and (length > most or (length == most and not final)):
            raise ValueError(f"{length} tokens are all exact there, and would be sealed here")
        return outline

    def _check(self, header: SnapshotHeader, stop: int) -> None:
        """Raises ValueError unless ``header`` is what this cache would make of such a sequence and can be cut there."""
        if header.form != self.form:
            raise ValueError(f"the sequence is stored as form {header.form}, this cache stores form {self.form}")
        size = self._laid_out(Cut(header.segments, header.tail_tokens, header.observed))
        exact = self.layout.spec.skip_layers, self._exact_fields(header.length - header.start)
        there = header.fields, header.layer_bytes, header.num_layers, header.skip_layers, header.exact_fields
        if there != (*size, self.layout.shape.num_layers, *exact):
            raise ValueError("the fields of the snapshot are not those that this cache stores of such a sequence")
        spec = self.layout.spec
        for one in header.segments:
            static = spec.outliers * spec.chunk if one.first else spec.static_tokens
            if one.static_tokens != static or static > one.fitted - one.first:
                raise ValueError(f"{one.static_tokens} exact tokens of a segment: this cache has {static}")
            if spec.outliers and one.first < stop < one.fitted:
                raise ValueError(f"a snapshot cannot be cut at {stop}, among pages of which outliers are exact")
