"""``Snapshots``: sequences as bytes and back. The cache that loads a snapshot can differ from the cache that made it in
its blocks, its budget and the place of its values."""

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
    TAIL_INDEX_KEYS,
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
"""Version of snapshots and of the bytes of all codecs. Increment it if either changes and no field's shape or dtype
shows the change: snapshots in files are loaded by later versions of the program."""


class Snapshots:
    """Snapshots of a cache's sequences, and sequences made from snapshots.

    Attributes:
        form: digest of all that another cache must have in common with this one to load its snapshots (``form_of``).
    """

    def __init__(self, pools: SequencePools, rope: RopeConfig, device: torch.device) -> None:
        self.pools, self.layout, self.device = pools, pools.layout, device
        self.form = form_of(pools.layout, rope)
        self._contents = [GroupContents(group, self.form) for group in pools.layout.groups]
        recurrent = pools.layout.recurrent
        self._recurrent = None if recurrent is None else RecurrentContents(recurrent, self.form, self.layout.shape)

    def describe(self, sequence: CachedSequence, start: int = 0, stop: int | None = None) -> SnapshotHeader:
        """Returns the header of a snapshot of ``sequence`` without its first ``start`` tokens. ``start`` is 0 or a fork
        point. Only data on the host is used. Raises ValueError if the sequence cannot be forked at ``start`` or
        ``stop``.

        Args:
            stop: number of tokens after which the snapshot ends, a fork point. Later tokens of ``sequence`` then do not
                change the snapshot. None for all tokens, with the exact tail.
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
        """Begins to read the snapshot that ``describe`` describes, layer by layer. The ``Reading`` holds the blocks
        that it reads until it is closed.

        Raises ValueError as ``describe`` does, and if there is nothing to read. Raises OutOfBlocks if too many
        checkpoints of recurrent states are being read.
        """
        header = self.describe(sequence, start, stop)
        if header.length == start:
            raise ValueError(f"the sequence has nothing to read after its first {start} tokens")
        self.pools.await_layers(sequence)
        return Reading(self.pools, sequence, header)

    def demand(self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None) -> Blocks:
        """Blocks that ``restore`` takes. Raises ValueError as ``restore`` does."""
        return self.pools.demand(self._outlines(chain, start, capacity, parent), start, capacity)

    def restore(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None = None
    ) -> Restoring:
        """Makes a new sequence from the used parts of snapshots. The caller then writes the bytes of these parts. The
        sequence has room to grow to ``start`` tokens by a prompt, and to ``capacity`` tokens by decoding.

        Raises OutOfBlocks and then takes nothing. Raises ValueError if this cache stores sequences in another form, or
        if the chain has gaps.

        Args:
            chain: headers, each with the position up to which its snapshot is used. This is a fork point, and the next
                snapshot starts there. The last snapshot can also be used up to any token of a dense sequence or of the
                exact tail.
            parent: a sequence with the tokens before the chain. The new sequence shares them. None if the chain starts
                at 0.
        """
        outlines = self._outlines(chain, start, capacity, parent)
        if parent is not None:
            self.pools.await_layers(parent)  # the new sequence will wait only for its own layers
        sequence = self.pools.restore(outlines, start, capacity, parent)
        header, stop = chain[-1]
        for number, of_group in enumerate(header.of_groups[: len(self._contents)]):
            in_group = sequence.of_group(number)
            in_group.observed = of_group.cut(stop).observed and bool(in_group.state_reserve)
        try:
            return Restoring(self.pools, chain, sequence)
        except BaseException:  # for example, if the device has no memory for the numbers that are copied to it
            self.pools.release(sequence)
            raise

    def export(self, sequence: CachedSequence, start: int = 0) -> Snapshot:
        """Copies everything of ``sequence`` after its first ``start`` tokens (``describe``) into a snapshot on the
        cache's device."""
        with self.open_reading(sequence, start) as reading:
            header = reading.header
            snapshot = Snapshot(header, torch.empty(header.pieces, dtype=torch.uint8, device=self.device))
            for layer in range(header.num_layers):
                reading.read_layer(layer, snapshot.layer(layer))
        return snapshot

    def load(self, snapshots: Snapshot | Sequence[tuple[Snapshot, int]], capacity: int) -> CachedSequence:
        """Makes a new sequence from a snapshot, or from a chain of them (``restore``). It can grow to ``capacity``
        tokens.

        Raises ValueError if this cache stores sequences in another form. Raises OutOfBlocks if the cache has no room,
        and then takes nothing.
        """
        chain = [(snapshots, snapshots.header.length)] if isinstance(snapshots, Snapshot) else snapshots
        links = [Link(snapshot.header, stop) for snapshot, stop in chain]
        restoring = self.restore(links, links[-1].stop, capacity)
        for number, (snapshot, _) in enumerate(chain):
            for layer in range(snapshot.header.num_layers):
                restoring.write_layer(number, layer, snapshot.layer(layer).to(self.device))
        return restoring.sequence

    def stored_alike(self, other: Snapshots, tokens: int) -> bool:
        """Whether this cache can load what ``other`` exports after a prompt of ``tokens`` tokens."""
        specs = [group.spec for layout in (self.layout, other.layout) for group in layout.groups]
        return self.form == other.form and all(tokens > spec.dense_limit or not spec.compresses for spec in specs)

    def _outlines(
        self, chain: Sequence[Link], start: int, capacity: int, parent: CachedSequence | None
    ) -> list[Outline]:
        """Returns the outlines, one for each group, of a sequence that is made from a chain. Raises ValueError if this
        cache cannot make it."""
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
    """Makes and checks headers of snapshots of the layers with a recurrent state.

    Args:
        form: digest of all that caches must have in common to read the snapshots (``form_of``).
    """

    def __init__(self, layout: RecurrentLayout, form: str, shape: ModelShape) -> None:
        self.layout, self.form, self.num_layers = layout, form, shape.num_layers
        self._state = laid_out((f"recurrent.{one.name}", one.shape, one.dtype) for one in layout.fields)

    def header(self, sequence: CachedSequence, start: int, stop: int) -> SnapshotHeader:
        """Returns the header of a snapshot that ends after ``stop`` tokens. It contains the state after these tokens if
        that state was kept."""
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

    def counterpart(self, header: SnapshotHeader) -> SnapshotHeader:
        """Converts the header of another rank's recurrent layers to this rank's header of the same tokens."""
        fields, layer_bytes = self._state if header.fields else ((), 0)
        return replace(header, form=self.form, fields=fields, layer_bytes=layer_bytes)

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
    """Makes and checks headers of snapshots of a group of layers.

    Args:
        form: digest of all that caches must have in common to read the snapshots (``form_of``).
    """

    def __init__(self, layout: GroupLayout, form: str) -> None:
        self.layout, self.form = layout, form
        self.layers = layout.layers if layout.shape.num_layers < layout.model_layers else ()

    def header(
        self, sequence: CachedSequence, start: int, stop: int | None, other_groups: tuple[SnapshotHeader, ...] = ()
    ) -> SnapshotHeader:
        """Returns the header of a snapshot of the group's ``sequence`` (``Snapshots.describe``). ``other_groups`` are
        the headers of the other groups."""
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

    def counterpart(self, header: SnapshotHeader, other_groups: tuple[SnapshotHeader, ...] = ()) -> SnapshotHeader:
        """Converts the header of the same group of layers on another rank to this rank's header of the same tokens."""
        fields, layer_bytes = self._laid_out(header)
        return replace(header, form=self.form, fields=fields, layer_bytes=layer_bytes, other_groups=other_groups)

    def outline(self, chain: Sequence[Link], before: Outline, start: int, capacity: int) -> Outline:
        """Returns the outline of a sequence that begins with ``before`` and continues with a chain of the group's
        headers. Raises ValueError if this cache cannot make it."""
        for header, stop in chain:
            self._check(header, stop)
        outline = _followed_by(before, chain)
        if len(outline.spans) > MAX_SEGMENTS:
            raise ValueError(f"the sequence has {len(outline.spans)} segments, more than {MAX_SEGMENTS}")
        length, final = outline.length, outline.length == capacity or outline.length < start
        late_limit, spec = self.layout.growth.late_limit(0), self.layout.spec
        if spec.compresses and not outline.spans and (length > late_limit or (length == late_limit and not final)):
            raise ValueError(f"the snapshot has all {length} tokens exact, and this cache would compress some of them")
        return outline

    def _content(self, sequence: CachedSequence, start: int, stop: int | None) -> Cut:
        """Returns the part of the sequence that a snapshot contains."""
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

    def _laid_out(self, content: Cut | SnapshotHeader) -> tuple[tuple[SnapshotField, ...], int]:
        """Returns the fields of a layer of ``content``, and the layer's bytes."""
        return laid_out((field.name, field.shape, field.dtype) for field in self._arrays(content))

    def _arrays(self, content: Cut | SnapshotHeader) -> Iterator[Field]:
        """Yields the arrays of a layer. Arrays are sorted by name where their order depends on the place of values,
        because caches can have different places."""
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
            if layout.indexer is not None:
                yield Field(TAIL_INDEX_KEYS, (1, content.tail_tokens, 1, layout.shape.head_dim), layout.dtype)
        if content.observed:
            for x in state:
                yield Field(f"observed.{x.name}", x.shape, x.dtype)

    def _check(self, header: SnapshotHeader, stop: int) -> None:
        """Raises ValueError unless this cache would make the same header for such a sequence, and the snapshot can be
        cut at ``stop``."""
        size = self._laid_out(header)
        described = header.fields, header.layer_bytes, header.num_layers, header.layers, header.window
        if described != (*size, self.layout.model_layers, self.layers, self.layout.window or 0):
            raise ValueError("the fields of the snapshot are not those that this cache stores of such a sequence")
        spec = self.layout.spec
        for segment in header.segments:
            static = spec.outliers * spec.chunk if segment.first else spec.static_tokens
            if segment.static_tokens != static or static > segment.fitted - segment.first:
                raise ValueError(f"{segment.static_tokens} exact tokens of a segment: this cache has {static}")
            if spec.outliers and segment.first < stop < segment.fitted:
                raise ValueError(f"a snapshot cannot be cut at {stop}: its exact outliers are from pages on both sides")


def counterpart(header: SnapshotHeader, layout: Layout, form: str) -> SnapshotHeader:
    """Returns the header of the same tokens in the cache of another tensor-parallel rank.

    The ranks' sequences have the same segments and tails, but each rank has the fields of its own heads.

    Args:
        header: the header in one rank's cache.
        layout, form: the layout of the other rank's cache, and the form of its snapshots.

    Raises ValueError if the layout has other groups of layers.
    """
    first, *others = (GroupContents(group, form) for group in layout.groups)
    rest: list[GroupContents | RecurrentContents] = [*others]
    if layout.recurrent is not None:
        rest.append(RecurrentContents(layout.recurrent, form, layout.shape))
    if len(header.other_groups) != len(rest):
        raise ValueError(f"the snapshot is of {len(header.of_groups)} groups of layers, not {1 + len(rest)}")
    other_groups = (contents.counterpart(own) for contents, own in zip(rest, header.other_groups, strict=True))
    return first.counterpart(header, tuple(other_groups))


def _followed_by(outline: Outline, chain: Sequence[Link]) -> Outline:
    """Returns ``outline`` followed by the tokens of ``chain``.

    Raises:
        ValueError: a snapshot does not begin where the one before it is cut, or has another form.
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
    """Returns ``spans`` followed by the segment ``new``. If the segment continues the last span, that span is
    extended."""
    span, compressed = Span(*(getattr(new, name) for name in Span._fields)), spans[-1].compressed if spans else 0
    if not new.continued and new.first == compressed:
        return [*spans, span]
    if new.continued and spans and (new.first, new.static_tokens) == (spans[-1].first, spans[-1].static_tokens):
        return [*spans[:-1], span._replace(num_pages=spans[-1].num_pages + new.num_pages)]
    raise ValueError(f"a segment from token {new.first} on does not continue what is compressed up to {compressed}")


def form_of(layout: Layout, rope: RopeConfig) -> str:
    """Returns a digest of format, sizes, RoPE, fields and policy, as 64 hexadecimal digits. It leaves out how much is
    selected, how many of the newest tokens stay exact, and where values are stored. It does not cover the model's
    weights; callers compare these."""
    forms = [_form_of_group(group, group.rope or rope) for group in layout.groups]
    if len(forms) == 1 and layout.recurrent is None:
        return forms[0]
    of_groups: list[tuple[Any, ...]] = [(form, group.layers) for form, group in zip(forms, layout.groups, strict=True)]
    if layout.recurrent is not None:
        fields = [(field.name, field.shape, str(field.dtype)) for field in layout.recurrent.fields]
        of_groups.append((fields, layout.recurrent.layers))
    return sha256(json.dumps(of_groups).encode()).hexdigest()


def _form_of_group(layout: GroupLayout, rope: RopeConfig) -> str:
    spec, prefill = replace(layout.spec, budget=None, local=1, place="device"), layout.spec.prefill or "dense"
    spec = replace(spec, prefill=prefill, settings=stored_settings(layout.spec))
    fields = (*layout.compressed_fields, *layout.host_fields, *layout.state_fields)
    form = {
        "format": FORMAT,
        "spec": {
            name: value
            for name, value in spec.as_dict().items()
            if name != "min_budget" and (name, value) != ("drafts", False)
        },
        # ``key_bias`` is left out, because its effects are in the policy. Fields that change no page are left out, too.
        "shape": {
            name: value
            for name, value in asdict(layout.shape).items()
            if value != () and name not in ("key_bias", "sinks", "reused")
        },
        "rope": {name: value for name, value in asdict(rope).items() if (name, value) != ("proportion", 1.0)},
        "dtype": str(layout.dtype),
        "fields": sorted((field.name, field.shape, str(field.dtype)) for field in fields),
    }
    if layout.window is not None:
        form["window"] = layout.window
    return sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
