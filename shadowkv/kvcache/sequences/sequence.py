"""``CachedSequence``: a sequence in a group of layers, with its segments and exact pages. ``Outline``: the start of a
new sequence. ``Tables``: the page tables that kernels read.

All tokens of a dense sequence are exact. A compressed sequence has compressed pages [0, compressed), exact copies of
its sink and outliers (per kv head), and an exact tail [compressed, length) in a ring of pages. Its compressed pages are
divided into segments, each with one fitted state. Compressed pages and states never change, so any number of sequences
can share them. Each of these sequences holds a reference to the blocks of the shared pages and states
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
from shadowkv.kvcache.recurrent.states import RecurrentSequence
from shadowkv.kvcache.sequences.group_layout import PageCount


class PendingLayers(Protocol):
    """The layers of a restored sequence that are still arriving, in order. Forks of the sequence share them.

    A prefill waits for each layer before it reads the layer. Decoding, trimming and reading the sequence, and restoring
    another sequence with this one as its parent, wait for the last layer first. Releasing the sequence ends the
    arrival. Forking, extending and truncating need no wait by the caller.
    """

    def wait(self, layer: int) -> None:
        """Orders later work on the current stream after the arrival of ``layer`` and all layers before it. Can be
        called several times for a layer. Raises if the layer will not arrive; the sequence can then only be
        released."""

    def end(self) -> None:
        """Orders later work on the current stream after all writes in progress, and stops further writes. Never raises.
        Forks that share the layers can still call ``wait``."""


@dataclass(eq=False)
class Segment:
    """Consecutive compressed pages and their state.

    Attributes:
        slot: slot in the page tables, which no other sequence uses.
        state: id of the fitted state, which other sequences can share; None if no part learns.
        first: position of the first token, a multiple of 64.
        end: position after the last token that the state is fitted on.
        valid_until: position up to which the state serves prompt tokens.
        fitted: position after the pages that were compressed when the state was fitted. All outliers are in these
            pages.
        pages, value_pages: ids of the compressed pages, and of the pages with their values.
        static: ids of the exact pages with the sink and outliers.
        static_tokens: number of tokens in ``static``, per kv head.
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
        """Position after the last compressed token."""
        return self.first + PAGE * len(self.pages)

    def prefix(self, slot: int, stop: int) -> Segment:
        """The segment with its pages up to position ``stop``, for a fork that continues differently there."""
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
    """The pages of one sequence in a group of layers. The sequence owns all its pages from admission on, so decoding
    allocates nothing.

    A sequence of a cache has one such object for each group of layers. The object of the first group stands for the
    whole sequence; its ``other_groups`` are the other objects, which have the same tokens.

    Attributes:
        other_groups: in the first group, the sequence's parts in the other groups; empty in other groups.
        window: number of newest tokens that a query attends to; None for all tokens.
        begin: with a window, the position before which the sequence has no tokens.
        tables: the tables of all sequences.
        slot: the sequence's row in ``tables``.
        capacity: maximum number of tokens.
        observed: whether the first state in ``state_reserve`` has learned from a prompt's last queries.
        shared: number of tokens that the sequence shares, or has shared, with its forks or with its parent.
        readings: for each open reading, the position up to which it reads (``snapshots.layers.Reading``).
        pending_layers: in the first group of a restored sequence, the layers of all groups that are still arriving;
            else None.
        recurrent: in the first group, the sequence's recurrent states; without any state if no layer has one.
        path: the segments, in order.
        dense: ids of the exact pages of a dense sequence; with a window, as a ring.
        ring: ids of the exact pages of a compressed sequence's tail, as a ring.
        compressed_reserve, host_reserve: ids of the pages for future compressed tokens.
        static_reserve: ids of the exact pages for sinks and outliers of future segments.
        slot_reserve, state_reserve: slots and states of future segments.
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
    recurrent: RecurrentSequence = field(default_factory=RecurrentSequence)
    window: int | None = None
    begin: int = 0

    def of_group(self, number: int) -> CachedSequence:
        """The sequence's part in a group of the cache."""
        return self.other_groups[number - 1] if number else self

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return int(self.tables.length[self.slot])

    @property
    def seed(self) -> int:
        """The seed of sampling the tokens to attend to. Every new token's position is combined with it. It is 0 until
        it is set, so that sequences without a request are reproducible. Only the low 64 bits count."""
        return int(self.tables.seed[self.slot])

    @seed.setter
    def seed(self, seed: int) -> None:
        self.tables.seed[self.slot] = seed & (1 << 64) - 1
        for sequence in self.other_groups:
            sequence.seed = seed

    @property
    def compressed(self) -> int:
        """Number of compressed tokens."""
        return self.path[-1].compressed if self.path else 0

    @property
    def fixed(self) -> int:
        """Number of first tokens that must not be removed: the compressed ones, those that other sequences or open
        readings read in the same pages, and those that a window or a recurrent state needs."""
        whole = self.oldest + self.window if self.window is not None and self.oldest else 0
        recurrent = self.recurrent.fixed(self.length) if self.recurrent.exists else 0
        others = (one.fixed for one in self.other_groups)
        return max(self.compressed, self.shared, *self.readings, whole, recurrent, *others)

    @property
    def oldest(self) -> int:
        """Position of the first token in the exact pages of a window."""
        return max(self.begin, PAGE * (-(-self.length // PAGE) - len(self.dense)))

    def window_start(self, length: int) -> int:
        """Position of the first token that tokens from position ``length`` on can attend to."""
        return 0 if self.window is None else max(0, length - self.window)

    @property
    def segment_state(self) -> SegmentState:
        """How far the sequence is compressed, for the rules in ``growth.py``."""
        return SegmentState.behind(self.path)

    @property
    def pages(self) -> list[int]:
        """Ids of the compressed pages, in order."""
        return [page_id for segment in self.path for page_id in segment.pages]

    @property
    def static(self) -> list[int]:
        """Ids of the exact pages with sinks and outliers, in order."""
        return [page_id for segment in self.path for page_id in segment.static]

    @property
    def owned(self) -> PageCount:
        """Numbers of pages that the sequence owns. Static pages and segments count only if they are reserved for the
        future."""
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
        """Ids of all pages of the sequence in the device tier, with or without the reserves."""
        yield from self.dense
        yield from self.ring
        yield from self.static
        yield from self.pages
        if reserves:
            yield from self.compressed_reserve
            yield from self.static_reserve


class Span(NamedTuple):
    """The numbers of a segment, without its pages. Fields are as in ``Segment``."""

    first: int
    end: int
    valid_until: int
    fitted: int
    static_tokens: int
    num_pages: int

    @property
    def compressed(self) -> int:
        """Position after the last compressed token."""
        return self.first + PAGE * self.num_pages


@dataclass(frozen=True)
class Outline:
    """The start of a new sequence: its segments and tokens before it grows.

    Attributes:
        spans: the segments.
        length: number of tokens.
        shared: number of tokens that the sequence shares with its parent, a multiple of 64.
        copied: for a fork with a window, the number of tokens at the fork. The parent's window before this position is
            copied. 0 if nothing is copied.
    """

    spans: tuple[Span, ...] = ()
    length: int = 0
    shared: int = 0
    copied: int = 0

    @classmethod
    def fork(cls, parent: CachedSequence, length: int) -> Outline:
        """The outline of a fork of ``parent`` at the fork point ``length``."""
        path = (segment.prefix(segment.slot, length) for segment in parent.path if segment.first < length)
        spans = (Span(x.first, x.end, x.valid_until, x.fitted, x.static_tokens, len(x.pages)) for x in path)
        return cls(tuple(spans), length, length)

    @property
    def compressed(self) -> int:
        """Number of compressed tokens."""
        return self.spans[-1].compressed if self.spans else 0

    @property
    def segment_state(self) -> SegmentState:
        """How far the sequence is compressed, for the rules in ``growth.py``."""
        return SegmentState.behind(self.spans)


class Tables:
    """Numbers and page tables of all sequences and segments. Numbers are on the host, page tables on the device.

    There is one extra slot of sequences and one of segments, each after the last slot of its kind. They belong to no
    sequence: padding rows of captured batches use them.

    Attributes:
        padding_slot, padding_segment_slot: the extra slots.
        length: int64 [slots], cached tokens.
        compressed: int64 [slots], compressed tokens.
        valid_until: int64 [slots], position up to which the last segment's state serves generated tokens.
        static_pages: int64 [slots], number of exact pages with sinks and outliers.
        ring_pages: int64 [slots], number of exact pages in the ring. A dense sequence has all its pages in the ring.
        segments: int64 [slots], number of segments.
        seed: uint64 [slots], seed of the sequence's sampling.
        segment_slots: int64 [slots, MAX_SEGMENTS], slots of the segments.
        state: int64 [segment slots], state of each segment.
        first, end: int64 [segment slots], positions of each segment's first token and after its last.
        static_tokens: int64 [segment slots], tokens of each segment that are exact (sink, outliers), per kv head.
        exact: int32 [slots, E], ids of at most E exact pages: the static ones, then the ring.
        static_counts: int32 [slots, E], tokens in the static pages.
        pages, value_pages: int32 [segment slots, P], ids of at most P compressed pages, and of the pages with their
            values.
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
        """Writes the ids of a sequence's compressed pages, and of the reserved pages after its last segment."""
        for segment in sequence.path:
            last = segment is sequence.path[-1]
            width = self.pages.shape[1]
            pages = segment.pages + (sequence.compressed_reserve if last else [])
            _write(self.pages, segment.slot, pages[:width])
            values = segment.value_pages + (sequence.host_reserve if last else []) if values_elsewhere else pages
            _write(self.value_pages, segment.slot, values[:width])

    def ring_widths(self, slots: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Number of ring pages that a step reads, int64 [n], for sequences in ``slots`` with ``length`` tokens."""
        return np.where(
            self.segments[slots] > 0,
            self.ring_pages[slots],
            np.minimum(length // PAGE + 1, self.ring_pages[slots]),
        )

    def clear(self, slot: int) -> None:
        """Resets the numbers of a slot."""
        for array in (self.length, self.compressed, self.valid_until, self.static_pages, self.segments, self.seed):
            array[slot] = 0


def _write(table: torch.Tensor, row: int, page_ids: list[int]) -> None:
    table[row, : len(page_ids)] = upload(torch.tensor(page_ids, dtype=torch.int32), table.device)
