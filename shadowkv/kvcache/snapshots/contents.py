"""What snapshots contain of a group of layers: their headers, and what sequences made from them begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.sequence import CachedSequence, Outline, Span
from shadowkv.kvcache.snapshots.header import (
    Cut,
    Link,
    SnapshotField,
    SnapshotHeader,
    SnapshotSegment,
    laid_out,
)


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
        outline = followed_by(before, chain)
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


def followed_by(outline: Outline, chain: Sequence[Link]) -> Outline:
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
