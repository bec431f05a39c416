"""What a new sequence begins with: tokens of an existing sequence, of snapshots, or of a sequence, then snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadowkv.kvcache.policy.growth import Standing
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.snapshots.contents import SnapshotSegment
from shadowkv.kvcache.snapshots.header import SnapshotHeader


class Link(NamedTuple):
    """A snapshot of a chain, and the token of the sequence up to which it is used."""

    header: SnapshotHeader
    stop: int


class Span(NamedTuple):
    """A segment's place in its sequence; fields are those of ``Segment``."""

    first: int
    end: int
    reach: int
    fitted: int
    static_tokens: int
    num_pages: int

    @property
    def sealed(self) -> int:
        """Position after its last sealed token."""
        return self.first + PAGE * self.num_pages


@dataclass(frozen=True)
class Outline:
    """What a new sequence begins with.

    Attributes:
        spans: its segments.
        length: its tokens.
        shared: tokens that it shares with its parent, a multiple of 64.
    """

    spans: tuple[Span, ...] = ()
    length: int = 0
    shared: int = 0

    @classmethod
    def fork(cls, parent: CachedSequence, length: int) -> Outline:
        """The first ``length`` tokens of ``parent``, a fork point."""
        path = (one.prefix(one.slot, length) for one in parent.path if one.first < length)
        spans = (Span(x.first, x.end, x.reach, x.fitted, x.static_tokens, len(x.pages)) for x in path)
        return cls(tuple(spans), length, length)

    @property
    def sealed(self) -> int:
        """Tokens that are sealed."""
        return self.spans[-1].sealed if self.spans else 0

    @property
    def standing(self) -> Standing:
        """How far it is sealed, as the rules of growth see it."""
        return Standing.behind(self.spans)

    def behind(self, chain: Sequence[Link]) -> Outline:
        """This outline, followed by the tokens of ``chain``.

        Raises:
            ValueError: a snapshot does not begin where the one before it is cut, or is in another form.
        """
        spans, at = list(self.spans), self.length
        for number, (header, stop) in enumerate(chain):
            if header.start != at or bool(header.segments) < bool(spans) or (at and not spans and header.segments):
                raise ValueError(f"a snapshot from token {header.start} on does not continue what ends at {at}")
            used = header.cut(stop)
            if number < len(chain) - 1 and (stop % PAGE or (used.segments and used.tail_tokens)):
                raise ValueError(
                    f"nothing can follow the first {stop} tokens of a snapshot: they end in its exact tail"
                )
            for one in used.segments:
                spans = _with(spans, one)
            at = stop
        return Outline(tuple(spans), at, self.shared)


def _with(spans: list[Span], new: SnapshotSegment) -> list[Span]:
    """``spans`` followed by a segment, or with what it adds to the last one."""
    span, sealed = Span(*(getattr(new, name) for name in Span._fields)), spans[-1].sealed if spans else 0
    if not new.continued and new.first == sealed:
        return [*spans, span]
    if new.continued and spans and (new.first, new.static_tokens) == (spans[-1].first, spans[-1].static_tokens):
        return [*spans[:-1], span._replace(num_pages=spans[-1].num_pages + new.num_pages)]
    raise ValueError(f"a segment from token {new.first} on does not continue what is sealed up to {sealed}")
