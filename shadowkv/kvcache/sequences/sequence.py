"""A cached sequence in a group of layers: a path of segments and an exact tail; what a new one begins with; the tables
that kernels read.

Tokens of a dense sequence are all exact. A compressed one has compressed pages [0, compressed), the exact copies of its
sink and outliers (per kv head) and an exact tail [compressed, length) in a ring of pages. Its compressed pages are cut
into segments, each with one fitted state. Pages of a segment never change once they are compressed, and neither
does its state, so that any number of sequences can refer to them; each holds a reference to their blocks
(``memory.arenas.BlockPool``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from shadowkv.kvcache.memory.streams import upload
from shadowkv.kvcache.policy.growth import MAX_SEGMENTS, SegmentState, cut_short
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.group_layout import PageCount


class PendingLayers(Protocol):
    """What a restored sequence and those forked from it in the meantime wait for; layers arrive in order.

    A prefill waits for each layer before it reads it. A caller that decodes, trims or reads the sequence, or restores
    another one after it, waits for the last layer first. One that releases it ends the arrival. One that forks,
    extends or truncates it need not wait: the cache does so.
    """

    def wait(self, layer: int) -> None:
        """Returns once subsequent work on the current stream is ordered after the arrival of ``layer`` and all before
        it; may be called again for a layer. Raises if it will not arrive: the sequence can then only be released."""

    def end(self) -> None:
        """Orders subsequent work on the current stream after all writes still under way; nothing is written after
        those. Never raises; others may still wait."""


@dataclass(eq=False)
class Segment:
    """Compressed pages that follow one another, and the state that they are stored with.

    Attributes:
        slot: its slot in the page tables, which no other sequence uses.
        state: id of the fitted state, which other sequences may use too; None where nothing is fitted.
        first: position of its first token, a multiple of 64.
        end: position up to which its tokens took part in the fit.
        valid_until: position up to which pages of prompts may be compressed on the state.
        fitted: position after the pages that were compressed when it was fitted: all its outliers are among them.
        pages, value_pages: ids of its compressed pages and of those that hold their values.
        static: ids of exact pages with its sink and outliers.
        static_tokens: tokens in those, per kv head.
    """

    slot: int
    state: int | None
    first: int
    end: int
    valid_until: int
    fitted: int = 0
    pages: list[int] = field(default_factory=list)
    value_pages: list[int] = field(default_factory=list)
    static: list[int] = field(default_factory=list)
    static_tokens: int = 0

    @property
    def compressed(self) -> int:
        """Position after its last compressed token."""
        return self.first + PAGE * len(self.pages)

    def prefix(self, slot: int, stop: int) -> Segment:
        """Its pages up to position ``stop``, for a sequence that continues differently there."""
        count = min(len(self.pages), (stop - self.first) // PAGE)
        end, valid_until, fitted = cut_short(self.end, self.valid_until, self.fitted, stop)
        return replace(
            self,
            slot=slot,
            end=end,
            valid_until=valid_until,
            fitted=fitted,
            pages=self.pages[:count],
            value_pages=self.value_pages[:count],
            static=list(self.static),
        )


@dataclass(eq=False)
class CachedSequence:
    """Pages of one sequence in a group of layers, all owned from admission on: nothing is allocated while it decodes.

    A sequence of a cache is that in its first group, which has those in the others with it: they have the same tokens.

    Attributes:
        other_groups: the same sequence in the other groups of the cache, where this is the first.
        window: newest tokens that are attended to, where it is not all.
        begin: with a window, the position before which it has never had a token, or has lost it since.
        tables: the tables of all sequences.
        slot: its slot there.
        capacity: tokens it may grow to.
        observed: whether the first state that it holds in reserve has learned from a prompt's last queries.
        shared: tokens that it has, or had, in common with sequences forked from it or that it was forked from.
        readings: for each open reading, the token up to which it reads (``snapshots.layers.Reading``).
        pending_layers: for a restored one, what is still on its way, of all groups; None where everything is there, and
            in other groups.
        path: its segments, in order.
        dense: ids of the exact pages of a dense sequence's tokens; with a window, as a ring.
        ring: ids of the exact pages that hold a compressed sequence's tail, as a ring.
        compressed_reserve, host_reserve: ids of pages to be compressed.
        static_reserve: ids of exact pages for sinks and outliers of segments to come.
        slot_reserve, state_reserve: slots and states of segments to come.
    """

    tables: Tables
    slot: int
    capacity: int = 0
    shared: int = 0
    observed: bool = False
    readings: list[int] = field(default_factory=list)
    pending_layers: PendingLayers | None = None
    path: list[Segment] = field(default_factory=list)
    dense: list[int] = field(default_factory=list)
    ring: list[int] = field(default_factory=list)
    compressed_reserve: list[int] = field(default_factory=list)
    host_reserve: list[int] = field(default_factory=list)
    static_reserve: list[int] = field(default_factory=list)
    slot_reserve: list[int] = field(default_factory=list)
    state_reserve: list[int] = field(default_factory=list)
    other_groups: tuple[CachedSequence, ...] = ()
    window: int | None = None
    begin: int = 0

    def of_group(self, number: int) -> CachedSequence:
        """The same sequence in a group of the cache."""
        return self.other_groups[number - 1] if number else self

    @property
    def length(self) -> int:
        """Tokens cached."""
        return int(self.tables.length[self.slot])

    @property
    def seed(self) -> int:
        """The seed by which attended tokens are sampled, with the position of each new token: 0 until it is set, so
        that sequences without a request are reproducible. Only the low 64 bits of a number that is set count."""
        return int(self.tables.seed[self.slot])

    @seed.setter
    def seed(self, seed: int) -> None:
        self.tables.seed[self.slot] = seed & (1 << 64) - 1
        for sequence in self.other_groups:
            sequence.seed = seed

    @property
    def compressed(self) -> int:
        """Tokens that are compressed."""
        return self.path[-1].compressed if self.path else 0

    @property
    def fixed(self) -> int:
        """Tokens that may not change: the compressed ones, those that others may read in the same pages, and those
        without which a window would not be whole."""
        whole = self.oldest + self.window if self.window is not None and self.oldest else 0
        return max(self.compressed, self.shared, *self.readings, whole, *(one.fixed for one in self.other_groups))

    @property
    def oldest(self) -> int:
        """Position of the first token in the exact pages of a window."""
        return max(self.begin, PAGE * (-(-self.length // PAGE) - len(self.dense)))

    def window_start(self, length: int) -> int:
        """Position of the first token that those after the first ``length`` ones may attend to."""
        return 0 if self.window is None else max(0, length - self.window)

    @property
    def segment_state(self) -> SegmentState:
        """How far it is compressed, as the rules of growth see it."""
        return SegmentState.behind(self.path)

    @property
    def pages(self) -> list[int]:
        """Ids of its compressed pages, in order."""
        return [page_id for segment in self.path for page_id in segment.pages]

    @property
    def static(self) -> list[int]:
        """Names of the exact pages with sinks and outliers, in order."""
        return [page_id for segment in self.path for page_id in segment.static]

    @property
    def owned(self) -> PageCount:
        """What it has of each kind; for static pages and segments, those to come."""
        compressed = sum(len(segment.pages) for segment in self.path)
        return PageCount(
            dense=len(self.dense),
            static=len(self.static_reserve),
            ring=len(self.ring),
            compressed=compressed + len(self.compressed_reserve),
            host=compressed + len(self.host_reserve),
            segments=len(self.slot_reserve),
        )

    def device_pages(self, reserves: bool = True) -> Iterator[int]:
        """Names of all its pages of the device tier."""
        yield from self.dense
        yield from self.ring
        yield from self.static
        yield from self.pages
        if reserves:
            yield from self.compressed_reserve
            yield from self.static_reserve


class Span(NamedTuple):
    """A segment's place in its sequence; fields are those of ``Segment``."""

    first: int
    end: int
    valid_until: int
    fitted: int
    static_tokens: int
    num_pages: int

    @property
    def compressed(self) -> int:
        """Position after its last compressed token."""
        return self.first + PAGE * self.num_pages


@dataclass(frozen=True)
class Outline:
    """What a new sequence begins with.

    Attributes:
        spans: its segments.
        length: its tokens.
        shared: tokens that it shares with its parent, a multiple of 64.
        copied: tokens after which it was forked of a parent of which it has a copy.
    """

    spans: tuple[Span, ...] = ()
    length: int = 0
    shared: int = 0
    copied: int = 0

    @classmethod
    def fork(cls, parent: CachedSequence, length: int) -> Outline:
        """The first ``length`` tokens of ``parent``, a fork point."""
        path = (segment.prefix(segment.slot, length) for segment in parent.path if segment.first < length)
        spans = (Span(x.first, x.end, x.valid_until, x.fitted, x.static_tokens, len(x.pages)) for x in path)
        return cls(tuple(spans), length, length)

    @property
    def compressed(self) -> int:
        """Tokens that are compressed."""
        return self.spans[-1].compressed if self.spans else 0

    @property
    def segment_state(self) -> SegmentState:
        """How far it is compressed, as the rules of growth see it."""
        return SegmentState.behind(self.spans)


class Tables:
    """Numbers and page tables of all sequences and of their segments; numbers on the host, tables on the device.

    The slot after the last, of sequences and of segments, belongs to no sequence: rows that pad a captured batch name
    it.

    Attributes:
        padding_slot, padding_segment_slot: those after the last.
        length, compressed, valid_until: int64 [slots], tokens cached, tokens compressed, and the position up to which
            pages of generated tokens may be compressed on the last segment's state.
        static_pages, ring_pages: int64 [slots], the shape of the exact pages; a dense sequence is a ring as long as
            itself.
        segments: int64 [slots], how many segments a sequence has.
        seed: uint64 [slots], the seed that a sequence samples by.
        segment_slots: int64 [slots, MAX_SEGMENTS], the slots of those.
        state, first, end, static_tokens: int64 [segment slots], for a segment: its state, the positions of its first
            token and after its last, and how many of its tokens are exact elsewhere, per kv head.
        exact: int32 [slots, E], page ids; static_counts: int32 [slots, E], tokens in the static ones.
        pages, value_pages: int32 [segment slots, P], page ids.
    """

    def __init__(
        self,
        slots: int,
        segment_slots: int,
        exact_width: int,
        compressed_width: int,
        spare_state: int,
        device: torch.device,
    ) -> None:
        self.padding_slot, self.padding_segment_slot = slots, segment_slots
        self.length, self.compressed, self.valid_until = np.zeros((3, slots + 1), np.int64)
        self.static_pages, self.segments = np.zeros((2, slots + 1), np.int64)
        self.ring_pages = np.ones(slots + 1, np.int64)
        self.seed = np.zeros(slots + 1, np.uint64)
        self.segment_slots = np.full((slots + 1, MAX_SEGMENTS), segment_slots, np.int64)
        self.state = np.full(segment_slots + 1, spare_state, np.int64)
        self.first, self.end, self.static_tokens = np.zeros((3, segment_slots + 1), np.int64)
        self.exact, self.static_counts = torch.zeros(2, slots + 1, exact_width, dtype=torch.int32, device=device)
        self.pages, self.value_pages = torch.zeros(
            2, segment_slots + 1, compressed_width, dtype=torch.int32, device=device
        )

    def write(self, sequence: CachedSequence) -> None:
        """Writes the numbers of a sequence's segments."""
        slot, path = sequence.slot, sequence.path
        at = sequence.segment_state
        self.compressed[slot], self.valid_until[slot] = at.compressed, at.generated_valid_until
        self.segments[slot] = len(path)
        for number, segment in enumerate(path):
            self.segment_slots[slot, number] = segment.slot
            self.first[segment.slot], self.end[segment.slot] = segment.first, segment.compressed
            self.static_tokens[segment.slot] = segment.static_tokens
            if segment.state is not None:
                self.state[segment.slot] = segment.state

    def write_exact(self, sequence: CachedSequence) -> None:
        """Writes the ids of a sequence's exact pages."""
        static, ring = sequence.static, sequence.ring if sequence.path else sequence.dense
        self.static_pages[sequence.slot], self.ring_pages[sequence.slot] = len(static), max(1, len(ring))
        counts = [
            min(PAGE, segment.static_tokens - PAGE * number)
            for segment in sequence.path
            for number in range(len(segment.static))
        ]
        _write(self.exact, sequence.slot, static + ring)
        _write(self.static_counts, sequence.slot, counts)

    def write_pages(self, sequence: CachedSequence, values_elsewhere: bool) -> None:
        """Writes the ids of a sequence's compressed pages, and of those that the last segment is still to get."""
        for segment in sequence.path:
            last = segment is sequence.path[-1]
            width = self.pages.shape[1]
            pages = segment.pages + (sequence.compressed_reserve if last else [])
            _write(self.pages, segment.slot, pages[:width])
            values = segment.value_pages + (sequence.host_reserve if last else []) if values_elsewhere else pages
            _write(self.value_pages, segment.slot, values[:width])

    def ring_widths(self, slots: np.ndarray) -> np.ndarray:
        """Exact pages, after the static ones, that a step of these slots reads, int64 [slots]."""
        return np.where(
            self.segments[slots] > 0,
            self.ring_pages[slots],
            np.minimum(self.length[slots] // PAGE + 1, self.ring_pages[slots]),
        )

    def clear(self, slot: int) -> None:
        """Forgets what a slot held."""
        for array in (self.length, self.compressed, self.valid_until, self.static_pages, self.segments, self.seed):
            array[slot] = 0


def _write(table: torch.Tensor, row: int, page_ids: list[int]) -> None:
    table[row, : len(page_ids)] = upload(torch.tensor(page_ids, dtype=torch.int32), table.device)
