"""Sequences as bytes and back: snapshots of what a cache holds, for caches with any blocks, budgets and places."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

import torch

from shadowkv.kvcache.memory.arenas import Blocks, Field
from shadowkv.kvcache.parts import stored_settings
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.recurrent.layout import RecurrentLayout
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pools import SequencePools
from shadowkv.kvcache.sequences.sequence import CachedSequence, Outline, Span
from shadowkv.kvcache.snapshots.header import (
    Cut,
    Link,
    Snapshot,
    SnapshotField,
    SnapshotHeader,
    SnapshotSegment,
    laid_out,
)
from shadowkv.kvcache.snapshots.layers import Reading, Restoring
from shadowkv.ops.apply_rope.tables import RopeConfig

FORMAT = 2
"""Version of snapshots and of all codecs' bytes: to be incremented when either changes and no shape or dtype of a field
shows it already, as files outlive the program."""


class Snapshots:
    """Snapshots of a cache's sequences, and sequences made from snapshots.

    Attributes:
        form: what another cache must have in common with this one.
    """

    def __init__(self, pools: SequencePools, rope: RopeConfig, device: torch.device) -> None:
        self.pools, self.layout, self.device = pools, pools.layout, device
        self.form = form_of(pools.layout, rope)
        self._contents = [GroupContents(group, self.form) for group in pools.layout.groups]
        recurrent = pools.layout.recurrent
        self._recurrent = None if recurrent is None else RecurrentContents(recurrent, self.form, self.layout.shape)

    def describe(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> SnapshotHeader:
        """What a snapshot of ``sequence`` after its first ``start`` tokens, a fork point or 0, contains; found on the
        host alone. Raises ValueError where it cannot be forked there.

        Args:
            stop: tokens after which it ends, a fork point: it is then that of a fork there, however ``sequence``
                continues, and nothing in it changes any more. None for all there are, with the exact tail.
        """
        for point, possible in ((start, self.pools.can_follow), (stop, self.pools.can_end)):
            if point and not possible(sequence, point):
                raise ValueError(f"a sequence of {sequence.length} tokens cannot be forked after {point}")
        if stop is not None and stop < start:
            raise ValueError(f"a snapshot from token {start} on cannot end after {stop}")
        first, *other_groups = enumerate(self._contents)
        headers = [contents.header(sequence.of_group(number), start, stop) for number, contents in other_groups]
        if self._recurrent is not None:
            headers.append(self._recurrent.header(sequence, start, sequence.length if stop is None else stop))
        return first[1].header(sequence, start, stop, tuple(headers))

    def open_reading(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> Reading:
        """Begins to read what ``describe`` says, layer by layer; holds what it reads until it is closed.

        Raises ValueError as ``describe`` does, and where there is nothing to read.
        """
        header = self.describe(sequence, start, stop)
        if header.length == start:
            raise ValueError(f"the sequence has nothing to read behind {start} tokens")
        self.pools.await_layers(sequence)
        return Reading(self.pools, sequence, header)

    def demand(self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None) -> Blocks:
        """Blocks that ``restore`` takes; raises the same ValueErrors."""
        return self.pools.demand(self._outlines(chain, start, capacity, parent), start, capacity)

    def restore(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> Restoring:
        """A new sequence from the used parts of snapshots, which are then to be written, extended to ``start`` tokens
        by a prompt and to ``capacity`` by decoding.

        Raises OutOfBlocks, with nothing taken, and ValueError where this cache stores other bytes, or where the chain
        has gaps.

        Args:
            chain: headers, and the token up to which each is used: the next one starts there. That is a point where the
                sequence can be forked; for the last one also any token that is dense or in its exact tail.
            parent: a sequence that has what comes before the chain, which is shared up to the first header's start.
        """
        outlines = self._outlines(chain, start, capacity, parent)
        if parent is not None:
            self.pools.await_layers(parent)  # the new one waits only for what is written to it
        sequence = self.pools.restore(outlines, start, capacity, parent)
        header, stop = chain[-1]
        for number, of_group in enumerate(header.of_groups[: len(self._contents)]):
            in_group = sequence.of_group(number)
            in_group.observed = of_group.cut(stop).observed and bool(in_group.state_reserve)
        try:
            return Restoring(self.pools, chain, sequence)
        except BaseException:  # out of memory, say: the locations to write to are copied to the device
            self.pools.release(sequence)
            raise

    def export(self, sequence: CachedSequence, start: int = 0) -> Snapshot:
        """Everything of ``sequence`` after its first ``start`` tokens (``describe``), as bytes of its own on the
        cache's device."""
        with self.open_reading(sequence, start) as reading:
            header = reading.header
            snapshot = Snapshot(header, torch.empty(header.pieces, dtype=torch.uint8, device=self.device))
            for layer in range(header.num_layers):
                reading.read_layer(layer, snapshot.layer(layer))
        return snapshot

    def load(self, snapshots: Snapshot | Sequence[tuple[Snapshot, int]], capacity: int) -> CachedSequence:
        """A new sequence from a snapshot, or from a chain of them (``restore``), that may grow to ``capacity`` tokens.

        Raises ValueError where this cache stores other bytes, OutOfBlocks, with nothing taken, where it has no room.
        """
        chain = [(snapshots, snapshots.header.length)] if isinstance(snapshots, Snapshot) else snapshots
        links = [Link(snapshot.header, stop) for snapshot, stop in chain]
        restoring = self.restore(links, links[-1].stop, capacity)
        for number, (snapshot, _) in enumerate(chain):
            for layer in range(snapshot.header.num_layers):
                restoring.write_layer(number, layer, snapshot.layer(layer).to(self.device))
        return restoring.sequence

    def stored_alike(self, other: Snapshots, tokens: int) -> bool:
        """Whether what ``other`` exports of a prompt of ``tokens`` can be loaded here."""
        specs = [group.spec for layout in (self.layout, other.layout) for group in layout.groups]
        return self.form == other.form and all(tokens > spec.dense_limit or not spec.compresses for spec in specs)

    def _outlines(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None
    ) -> list[Outline]:
        """What a sequence from a chain begins with in each group; raises ValueError where it cannot be made here."""
        if not chain:
            raise ValueError("a sequence is restored of at least one snapshot")
        for header, _ in chain:
            if header.form != self.form:
                raise ValueError(f"the sequence is stored as form {header.form}, this cache stores form {self.form}")
            groups = len(self._contents) + (self._recurrent is not None)
            if len(header.of_groups) != groups:
                raise ValueError(f"the snapshot is of {len(header.of_groups)} groups of layers, not {groups}")
        if self._recurrent is not None:
            self._recurrent.check(chain)
        before = [Outline()] * len(self._contents)
        if parent is not None:
            before = self.pools.forked(parent, chain[0][0].start)
        return [
            contents.outline([Link(header.of_groups[number], stop) for header, stop in chain], own, start, capacity)
            for number, (contents, own) in enumerate(zip(self._contents, before, strict=True))
        ]


class RecurrentContents:
    """Contents of snapshots of the layers with a recurrent state.

    Args:
        form: what caches must have in common to read them.
    """

    def __init__(self, layout: RecurrentLayout, form: str, shape: ModelShape) -> None:
        self.layout, self.form, self.num_layers = layout, form, shape.num_layers
        self._state = laid_out((f"recurrent.{one.name}", one.shape, torch.float32) for one in layout.arrays)

    def header(self, sequence: CachedSequence, start: int, stop: int) -> SnapshotHeader:
        """The header of a snapshot that ends after ``stop`` tokens: with the state, if there is one."""
        row = sequence.recurrent.find(stop, sequence.length)
        fields, layer_bytes = ((), 0) if row is None else self._state
        return SnapshotHeader(
            form=self.form,
            start=start,
            length=stop,
            segments=(),
            tail_tokens=0,
            observed=False,
            fields=fields,
            num_layers=self.num_layers,
            layer_bytes=layer_bytes,
            layers=self.layout.layers,
            recurrent=True,
        )

    def check(self, chain: Sequence[Link]) -> None:
        """Raises ValueError unless ``chain`` ends with a state of this cache's form."""
        for header, _ in chain:
            own = header.of_groups[-1]
            known = (own.fields, own.layer_bytes) in (self._state, ((), 0))
            if not own.recurrent or own.layers != self.layout.layers or not known:
                raise ValueError("the recurrent states of the snapshot are not those that this cache stores")
        header, stop = chain[-1]
        if stop != header.length or not header.of_groups[-1].fields:
            raise ValueError(f"there is no recurrent state after {stop} tokens")


class GroupContents:
    """Contents of snapshots of a group of layers.

    Args:
        form: what caches must have in common to read them.
    """

    def __init__(self, layout: GroupLayout, form: str) -> None:
        self.layout, self.form = layout, form
        self.layers = layout.layers if layout.shape.num_layers < layout.model_layers else ()

    def header(
        self, sequence: CachedSequence, start: int, stop: int | None, other_groups: tuple[SnapshotHeader, ...] = ()
    ) -> SnapshotHeader:
        """The header of a snapshot of the group's ``sequence`` (``Snapshots.describe``), with those of other groups."""
        content = self._content(sequence, start, stop)
        fields, layer_bytes = self._laid_out(content)
        length = sequence.length if stop is None else stop
        return SnapshotHeader(
            form=self.form,
            start=start,
            length=length,
            segments=content.segments,
            tail_tokens=content.tail_tokens,
            observed=content.observed,
            fields=fields,
            num_layers=self.layout.model_layers,
            layer_bytes=layer_bytes,
            layers=self.layers,
            window=self.layout.window or 0,
            other_groups=other_groups,
        )

    def outline(self, chain: Sequence[Link], before: Outline, start: int, capacity: int) -> Outline:
        """What a sequence from the group's headers of a chain begins with, after what it has ``before``; raises
        ValueError where it cannot be made here."""
        for header, stop in chain:
            self._check(header, stop)
        outline = _followed_by(before, chain)
        if len(outline.spans) > MAX_SEGMENTS:
            raise ValueError(f"the sequence has {len(outline.spans)} segments, more than {MAX_SEGMENTS}")
        length, final = outline.length, outline.length == capacity or outline.length < start
        late_limit, spec = self.layout.growth.late_limit(0), self.layout.spec
        if spec.compresses and not outline.spans and (length > late_limit or (length == late_limit and not final)):
            raise ValueError(f"{length} tokens are all exact there, and would be compressed here")
        return outline

    def _content(self, sequence: CachedSequence, start: int, stop: int | None) -> Cut:
        """What a snapshot contains."""
        if not sequence.path:
            length = sequence.length if stop is None else stop
            return Cut((), length - max(start, sequence.window_start(length)), stop is None and sequence.observed)
        segments = tuple(
            SnapshotSegment(
                first=segment.first,
                end=segment.end,
                valid_until=segment.valid_until,
                fitted=segment.fitted,
                static_tokens=segment.static_tokens,
                num_pages=(segment.compressed - max(start, segment.first)) // PAGE,
                continued=segment.first < start,
            )
            for segment in sequence.path
            if segment.compressed > start or segment is sequence.path[-1]
        )
        if stop is None:
            return Cut(segments, sequence.length - sequence.compressed, False)
        return Cut(tuple(segment.cut(start, stop) for segment in segments if segment.begin(start) < stop), 0, False)

    def _laid_out(self, content: Cut) -> tuple[tuple[SnapshotField, ...], int]:
        """The fields of a layer of ``content``, and its bytes."""
        return laid_out((field.name, field.shape, field.dtype) for field in self._arrays(content))

    def _arrays(self, content: Cut) -> Iterator[Field]:
        """Arrays of a layer, sorted by name where caches may keep them in different orders, as places differ."""
        layout, token = self.layout, (self.layout.shape.num_kv_heads, self.layout.shape.head_dim)
        compressed = sorted((*layout.compressed_fields, *layout.host_fields), key=lambda field: field.name)
        state = sorted(layout.state_fields, key=lambda field: field.name)
        for number, segment in enumerate(content.segments):
            name = f"segments.{number}"
            if segment.num_pages:
                for x in compressed:
                    yield Field(f"{name}.pages.{x.name}", (segment.num_pages, *x.shape), x.dtype)
            if not segment.continued:
                for x in state:
                    yield Field(f"{name}.state.{x.name}", x.shape, x.dtype)
                if segment.static_tokens:
                    yield Field(f"{name}.static", (2, segment.static_tokens, *token), layout.dtype)
        if content.tail_tokens:
            yield Field("tail", (2, content.tail_tokens, *token), layout.dtype)
        if content.observed:
            for x in state:
                yield Field(f"observed.{x.name}", x.shape, x.dtype)

    def _check(self, header: SnapshotHeader, stop: int) -> None:
        """Raises ValueError unless ``header`` is what this cache would make of such a sequence and can be cut there."""
        size = self._laid_out(Cut(header.segments, header.tail_tokens, header.observed))
        described = header.fields, header.layer_bytes, header.num_layers, header.layers, header.window
        if described != (*size, self.layout.model_layers, self.layers, self.layout.window or 0):
            raise ValueError("the fields of the snapshot are not those that this cache stores of such a sequence")
        spec = self.layout.spec
        for segment in header.segments:
            static = spec.outliers * spec.chunk if segment.first else spec.static_tokens
            if segment.static_tokens != static or static > segment.fitted - segment.first:
                raise ValueError(f"{segment.static_tokens} exact tokens of a segment: this cache has {static}")
            if spec.outliers and segment.first < stop < segment.fitted:
                raise ValueError(f"a snapshot cannot be cut at {stop}, among pages of which outliers are exact")


def _followed_by(outline: Outline, chain: Sequence[Link]) -> Outline:
    """``outline``, followed by the tokens of ``chain``.

    Raises:
        ValueError: a snapshot does not begin where the one before it is cut, or is in another form.
    """
    spans, at = list(outline.spans), outline.length
    for number, (header, stop) in enumerate(chain):
        if header.start != at or bool(header.segments) < bool(spans) or (at and not spans and header.segments):
            raise ValueError(f"a snapshot from token {header.start} on does not continue what ends at {at}")
        used = header.cut(stop)
        if number < len(chain) - 1 and (stop % PAGE or (used.segments and used.tail_tokens)):
            raise ValueError(f"nothing can follow the first {stop} tokens of a snapshot: they end in its exact tail")
        for segment in used.segments:
            spans = _with(spans, segment)
        at = stop
    return replace(outline, spans=tuple(spans), length=at)


def _with(spans: list[Span], new: SnapshotSegment) -> list[Span]:
    """``spans`` followed by a segment, or with what it adds to the last one."""
    span, compressed = Span(*(getattr(new, name) for name in Span._fields)), spans[-1].compressed if spans else 0
    if not new.continued and new.first == compressed:
        return [*spans, span]
    if new.continued and spans and (new.first, new.static_tokens) == (spans[-1].first, spans[-1].static_tokens):
        return [*spans[:-1], span._replace(num_pages=spans[-1].num_pages + new.num_pages)]
    raise ValueError(f"a segment from token {new.first} on does not continue what is compressed up to {compressed}")


def form_of(layout: Layout, rope: RopeConfig) -> str:
    """A digest, in 64 hexadecimal digits, of format, sizes, RoPE, fields and policy, except for how much is
    selected, how much stays exact after what is compressed, and where it is stored. Comparing weights is left to
    others."""
    forms = [_form_of_group(group, group.rope or rope) for group in layout.groups]
    if len(forms) == 1 and layout.recurrent is None:
        return forms[0]
    of_groups: list[tuple[Any, ...]] = [(form, group.layers) for form, group in zip(forms, layout.groups, strict=True)]
    if layout.recurrent is not None:
        of_groups.append((layout.recurrent.arrays, layout.recurrent.layers))
    return sha256(json.dumps(of_groups).encode()).hexdigest()


def _form_of_group(layout: GroupLayout, rope: RopeConfig) -> str:
    spec, prefill = replace(layout.spec, budget=None, local=1, place="device"), layout.spec.prefill or "dense"
    spec = replace(spec, prefill=prefill, settings=stored_settings(layout.spec))
    fields = (*layout.compressed_fields, *layout.host_fields, *layout.state_fields)
    form = {
        "format": FORMAT,
        "spec": spec.as_dict(),
        # What key_bias decides is in the policy, and sinks are in no page.
        "shape": {
            name: value
            for name, value in asdict(layout.shape).items()
            if value != () and name not in ("key_bias", "sinks")
        },
        "rope": asdict(rope),
        "dtype": str(layout.dtype),
        "fields": sorted((field.name, field.shape, str(field.dtype)) for field in fields),
    }
    if layout.window is not None:
        form["window"] = layout.window
    return sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
