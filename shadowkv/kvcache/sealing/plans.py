"""Where new tokens go: found on the host for all sequences of a batch, and brought to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.memory.upload import upload
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.batch import (
    CachedSegment,
    ExactRows,
    LastQueries,
    NewTokens,
    Places,
    PrefillBatch,
    ToStore,
)
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence, Segment


class Numbers:
    """Numbers on their way to the device: each array that is added is a part of the one that is copied."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._size = 0

    def add(self, numbers: ArrayLike) -> slice:
        """Adds ``numbers``; returns where they will be in the copy."""
        array = np.asarray(numbers, np.int64).ravel()
        self._arrays.append(array)
        self._size += len(array)
        return slice(self._size - len(array), self._size)

    def on(self, device: torch.device) -> Tensor:
        """All of them, int64 [n]."""
        return upload(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *self._arrays])), device)


def exact_rows(numbers: Numbers, pages: list[int], start: int, stop: int) -> Callable[[Tensor], ExactRows]:
    """Where the tokens of positions ``start`` to ``stop`` are in a ring of exact ``pages``, once ``numbers`` are on
    the device."""
    position = np.arange(start, stop)
    names = np.asarray(pages, np.int64)[position // PAGE % max(1, len(pages))]
    rows = numbers.add(np.stack((names, position % PAGE)))
    return lambda x: ExactRows(*x[rows].view(2, -1))


class Placing:
    """Finds places in a pool, and begins the segments that new tokens need."""

    def __init__(self, pool: SequencePool) -> None:
        self.pool, self.layout, self.device = pool, pool.layout, pool.store.compute

    def find(self, work: Iterable[tuple[CachedSequence, int]]) -> list[Places]:
        """Where ``count`` new tokens of each sequence go; it gets a new segment if a state is to be fitted on them."""
        numbers = Numbers()
        found = [self._find(numbers, sequence, count) for sequence, count in work]
        there = numbers.on(self.device)
        return [places(there) for places in found]

    def _find(self, numbers: Numbers, sequence: CachedSequence, count: int) -> Callable[[Tensor], Places]:
        """The same for one sequence, once its ``numbers`` are on the device."""
        start, before = sequence.length, sequence.sealed
        length = start + count
        after = self.layout.growth.sealed(sequence.standing, length, length == sequence.capacity)
        tail_ring = sequence.ring if sequence.path else sequence.dense
        tail = exact_rows(numbers, tail_ring, before, start)
        cached = [self._cached(numbers, segment) for segment in sequence.path]
        if after.fits:
            self.pool.begin_segment(sequence, length)
        sealed, reserve = after.tokens - before, sequence.sealed_reserve
        values = sequence.host_reserve if self.layout.host_fields else reserve
        pages, value_pages = (numbers.add(names[: sealed // PAGE]) for names in (reserve, values))
        page_starts = numbers.add(np.arange(before, before + sealed, PAGE))
        segment, reserved = sequence.path[-1] if sequence.path else None, sequence.state_reserve
        learning = None
        if after.fits and segment is not None and segment.state is not None:
            learning = segment.state
        elif segment is None and reserved:
            learning = reserved[0]
        static_tokens = segment.static_tokens if segment is not None and after.fits else 0
        static = exact_rows(numbers, segment.static if segment is not None else [], 0, static_tokens)
        ring = sequence.dense if segment is None else sequence.ring
        exact = exact_rows(numbers, ring, after.tokens if sealed else start, length)
        state = numbers.add([0 if segment is None else segment.state or 0])
        observed = None if learning is None else numbers.add([learning])
        return lambda x: Places(
            length=length,
            before=before,
            sealed=sealed,
            fits=after.fits,
            state=x[state],
            observed=None if observed is None else x[observed],
            first=before,
            pages=x[pages],
            value_pages=x[value_pages],
            page_starts=x[page_starts],
            static=static(x),
            tail=tail(x),
            exact=exact(x),
            cached=tuple(one(x) for one in cached),
        )

    def _cached(self, numbers: Numbers, segment: Segment) -> Callable[[Tensor], CachedSegment]:
        """A segment that later tokens attend to in full."""
        count = len(segment.pages)
        chunks = count * PAGE // self.layout.spec.chunk
        one = numbers.add([segment.slot, segment.state or 0, segment.first, count, chunks])
        pages, value_pages = numbers.add(segment.pages), numbers.add(segment.value_pages)
        static = exact_rows(numbers, segment.static, 0, segment.static_tokens)
        names = segment.state or 0, segment.first, *segment.pages, *segment.value_pages

        def there(x: Tensor) -> CachedSegment:
            slot, state, first, num_pages, num_chunks = x[one].split(1)
            sealed = SealedBatch(
                slots=slot,
                states=state,
                first=first,
                pages=x[pages].unsqueeze(0),
                value_pages=x[value_pages].unsqueeze(0),
                num_pages=num_pages,
                num_chunks=num_chunks,
                budget=num_chunks,
                max_budget=chunks,
            )
            return CachedSegment(sealed, static(x), names)

        return there


def to_store(batch: PrefillBatch, found: Sequence[tuple[NewTokens, Places]]) -> ToStore:
    """What is stored of some of a batch's sequences; ``found`` gives them with their places."""
    sealed = [(slice(one.start, one.stop), places) for one, places in found if places.sealed]
    return ToStore(_observed(batch, found), list(_exact(found)), sealed)


def _observed(batch: PrefillBatch, found: Sequence[tuple[NewTokens, Places]]) -> list[LastQueries]:
    """Which of the sequences learn from their last queries; those that keep equally many queries are grouped."""
    alike: dict[int, list[tuple[Tensor, np.ndarray, int]]] = {}
    for one, places in found:
        if places.observed is not None:
            rows = batch.last_of(one)
            first = places.length - len(rows) - places.first
            alike.setdefault(len(rows), []).append((places.observed, rows, first))
    together = []
    for count, same in alike.items():
        states, rows_of_each, first_of_each = zip(*same, strict=True)
        numbers = Numbers()
        numbers.add(np.stack((*rows_of_each,)))
        numbers.add(first_of_each)
        kept, positions = numbers.on(batch.positions.device).split([count * len(same), len(same)])
        together.append(LastQueries(torch.cat(states), kept.view(-1, count), positions))
    return together


def _exact(found: Sequence[tuple[NewTokens, Places]]) -> Iterator[tuple[slice, ExactRows]]:
    """Rows of sequences that stay exact, and where they go; adjacent ones are joined."""
    start, stop, together = 0, 0, list[ExactRows]()

    def joined() -> tuple[slice, ExactRows]:
        pages, offsets = (torch.cat([getattr(one, name) for one in together]) for name in ("pages", "offsets"))
        return slice(start, stop), ExactRows(pages, offsets)

    for one, places in found:
        if together and (places.sealed or one.start != stop):
            yield joined()
            together = []
        if not places.sealed:
            start, stop = start if together else one.start, one.stop
            together.append(places.exact)
    if together:
        yield joined()
