"""Decode: one more token for each sequence of a batch, attended to over [sink | outliers | selected | tail].

Every segment of a sequence is searched and attended to separately, with the state that it is stored with and its share
of the budget; the results and that of the exact tokens are merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import DecodeBatch, DecodePlan, SealedBatch, SegmentNumbers, SequenceNumbers
from shadowkv.kvcache.decode.fetching import Fetching
from shadowkv.kvcache.decode.planning import padding_numbers
from shadowkv.kvcache.memory.streams import SideStream
from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.attention import Prefill
from shadowkv.kvcache.sealing.pages import Sealing
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import Store
from shadowkv.ops.sampling import Sampling, row_seeds

SelectionHook = Callable[[int, Tensor, SealedBatch, Selection], Selection]
"""Sees layer, RoPE-rotated queries [R, H_q, d], the batch and what the index selects; what it returns is attended
to."""


class Decode:
    """The decode half of the cache.

    Attributes:
        hook: public hook for selections; to be set before steps are captured in graphs.
    """

    def __init__(self, store: Store, parts: Parts, pool: SequencePool, sealing: Sealing, prefill: Prefill) -> None:
        self.store, self.parts, self.pool, self.sealing, self.prefill = store, parts, pool, sealing, prefill
        self.tables, self.ops, self.spec = pool.tables, store.ops, store.layout.spec
        self.side_stream = SideStream(store.compute, captured=True)
        self.fetching = Fetching(store, self.side_stream) if store.buffer is not None else None
        self.hook: SelectionHook | None = None

    # -- a step ----------------------------------------------------------------------------------------------------

    def plan(self, sequences: Sequence[CachedSequence]) -> DecodePlan:
        """Turns tails that have outgrown their state into segments, and plans the sealing that is due and one more
        token for each."""
        tables, spec = self.tables, self.spec
        for sequence in sequences:
            self.pool.arrived(sequence)
        slots = np.fromiter((sequence.slot for sequence in sequences), np.int64, len(sequences))
        capacity = np.fromiter((sequence.capacity for sequence in sequences), np.int64, len(sequences))
        if (tables.length[slots] >= capacity).any():
            raise ValueError(f"a sequence is at its capacity: lengths {tables.length[slots]}, capacities {capacity}")
        sealing = None
        if spec.seals:
            tail = tables.length[slots] - tables.sealed[slots]
            growth = self.store.layout.growth
            limit = np.where(tables.segments[slots] > 0, growth.late_limit(1), growth.late_limit(0))
            outgrown = (tables.sealed[slots] + PAGE > tables.reach[slots]) & (tail >= limit)
            if outgrown.any():
                self.prefill.seal_tails([sequences[int(row)] for row in outgrown.nonzero()[0]])
            due = self.sealing.due(slots)
            if due.any():
                sealing = self.sealing.numbers(slots[due])
                for row in map(int, due.nonzero()[0]):
                    self.pool.seal(sequences[row], sequences[row].sealed + PAGE)
        names = "length", "sealed", "ring_pages", "static_pages"
        numbers = SequenceNumbers(slots, *(getattr(tables, name)[slots] for name in names))
        segments, of_sequence = self._segments(numbers)
        budget = segments.top_k + segments.sampled
        return DecodePlan(
            numbers,
            segments,
            of_sequence,
            int((numbers.static_pages + tables.ring_widths(slots)).max()),
            int((segments.end - segments.first).max()) // PAGE,
            int(budget.max()),
            1 if self.fetching is None or of_sequence is not None else self.fetching.micro_batches(budget),
            sealing,
        )

    def forecast(
        self, sequences: Sequence[CachedSequence], joining: Sequence[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        """A plan of padding rows with the shapes of a step that ``sequences`` will take together with others, once
        prompts of that many tokens are computed in those. None where shapes depend on more than that: on segments,
        where a sequence has several, or on the micro-batches of values on the host."""
        if self.fetching is not None or not sequences:
            return None
        tables, layout = self.tables, self.store.layout
        slots = np.fromiter((one.slot for one in sequences), np.int64, len(sequences))
        segments = int(tables.segments[slots].max())
        exact = int((tables.static_pages[slots] + tables.ring_widths(slots)).max())
        sealed = int(tables.sealed[slots].max())
        for sequence, length in joining:
            at = sequence.standing
            after = layout.growth.sealed(at, length, length == sequence.capacity)
            segments = max(segments, at.segments + after.fits)
            static = len(sequence.static) if at.segments else self.spec.static_pages
            compressed = static + len(sequence.ring)
            exact = max(exact, compressed if after.tokens else length // PAGE + 1)
            sealed = max(sealed, after.tokens)
        if segments > 1:
            return None
        count = len(sequences) + len(joining)
        padding = padding_numbers(tables)
        rows = (np.repeat(np.array(numbers)[:, None], count, axis=1) for numbers in padding)
        return DecodePlan(SequenceNumbers(*next(rows)), SegmentNumbers(*next(rows)), None, exact, sealed // PAGE, 0)

    def _segments(self, numbers: SequenceNumbers) -> tuple[SegmentNumbers, np.ndarray | None]:
        """The segments of a batch, and which of them each sequence has."""
        tables, spec = self.tables, self.spec
        count, slots = tables.segments[numbers.slot], numbers.slot
        if count.max() <= 1:
            sequence, last, of_sequence = np.arange(len(slots)), True, None
            slot = np.where(count > 0, tables.segment_slots[slots, 0], tables.padding_segment_slot)
        else:
            there = np.arange(count.max()) < count[:, None]
            of_sequence = np.where(there, there.ravel().cumsum().reshape(there.shape) - 1, count.sum())
            sequence, place = there.nonzero()
            slot, last = tables.segment_slots[slots[sequence], place], place == count[sequence] - 1
        first, end = tables.first[slot], tables.end[slot]
        budget = spec.budget_chunks(np.where(last, numbers.length[sequence], end) - first)
        if isinstance(spec.budget, int):  # for the whole sequence
            budget = -(-budget * (end - first) // np.maximum(1, numbers.sealed[sequence]))
        budget = np.where(end > first, budget, 0)
        sampled = spec.sampled_chunks(budget, end - first - tables.static_tokens[slot])
        seed = row_seeds(tables.seed[slots[sequence]], numbers.length[sequence], first)
        return SegmentNumbers(
            slot, tables.state[slot], sequence, first, end, budget - sampled, sampled, seed
        ), of_sequence

    def batch(self, plan: DecodePlan, numbers: Tensor | None = None) -> DecodeBatch:
        """``plan`` as the device sees it, from shapes that the plan fixes and numbers that the device has.

        Args:
            numbers: the plan's, packed, already on the device, with what is due sealed already; then only the plan's
                shapes are used, so that the result can be captured in a graph and used for other plans of the same
                shapes.
        """
        if numbers is None:
            if plan.sealing is not None:
                self.sealing.seal_pages(torch.from_numpy(plan.sealing).to(self.store.compute))
            numbers = torch.from_numpy(plan.packed()).to(self.store.compute)
        sequences, segments, of_sequence = plan.unpacked(numbers)
        slot, length, _, ring, static_pages = sequences
        pages = self.tables.exact[slot, : plan.exact_pages].long()
        counts = _exact_counts(sequences, self.tables.static_counts[slot, : plan.exact_pages])
        sealed = sequence = whole = None
        if plan.sealed_pages:
            if self.spec.skip_layers:
                whole = self._whole(plan, segments, of_sequence, pages, counts, static_pages)
            # On a GPU shapes may not depend on which rows are empty, as steps are captured in graphs; micro-batches,
            # which only a GPU uses, are cut by rows of the whole batch.
            there = segments.end > segments.first
            if of_sequence is not None:
                sequence = segments.sequence
            elif self.store.compute.type == "cpu" and plan.micro_batches == 1 and not there.all():
                sequence = there.nonzero().squeeze(1)
                segments = SegmentNumbers(*(x[sequence] for x in segments))
            sealed = self._sealed_batch(plan, segments)
        return DecodeBatch(
            length,
            pages,
            counts,
            pages.gather(1, (static_pages + length // PAGE % ring)[:, None]).squeeze(1),
            length % PAGE,
            sealed,
            sequence,
            of_sequence,
            whole,
        )

    def _whole(
        self,
        plan: DecodePlan,
        segments: SegmentNumbers,
        of_sequence: Tensor | None,
        pages: Tensor,
        counts: Tensor,
        static_pages: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``DecodeBatch.whole``: sealed pages of all segments [B, S * P] and exact ones [B, E], where those of sink
        and outliers count 0 tokens: these are in the sealed ones."""
        sealed = self.tables.pages[segments.slot, : plan.sealed_pages].long()
        page = torch.arange(plan.sealed_pages, device=sealed.device)
        filled = ((segments.end - segments.first)[:, None] - PAGE * page).clamp(0, PAGE)
        if of_sequence is not None:  # an empty row for sequences that have fewer segments than others
            sealed, filled = (torch.cat((x, torch.zeros_like(x[:1])))[of_sequence].flatten(1) for x in (sealed, filled))
        static = torch.arange(pages.shape[1], device=pages.device) < static_pages[:, None]
        return torch.cat((sealed, pages), 1), torch.cat((filled, counts.masked_fill(static, 0)), 1)

    def _sealed_batch(self, plan: DecodePlan, segments: SegmentNumbers) -> SealedBatch:
        pages = value_pages = self.tables.pages[segments.slot, : plan.sealed_pages].long()
        if self.spec.place == "host":  # otherwise a single tensor tells kernels to look each page up only once
            value_pages = self.tables.value_pages[segments.slot, : plan.sealed_pages].long()
        tokens, span = segments.end - segments.first, None
        if not self.spec.selects:
            span = (segments.first == 0) * (self.spec.sink_chunks * self.spec.chunk), tokens
        return SealedBatch(
            slots=segments.slot,
            states=segments.state,
            first=segments.first,
            pages=pages,
            value_pages=value_pages,
            num_pages=tokens // PAGE,
            num_chunks=tokens // self.spec.chunk,
            budget=segments.top_k,
            max_budget=plan.max_budget,
            sampling=Sampling(segments.sampled, segments.seed) if self.spec.sampled else None,
            span=span,
        )

    def end(self, plan: DecodePlan) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.tables.length[plan.sequences.slot] += 1
        if self.fetching is not None:
            self.fetching.publish()

    # -- a layer ---------------------------------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch) -> None:
        """Takes keys (before RoPE) and values [B, H, d] of the new tokens."""
        if batch.sealed is None or self.fetching is not None or self.store.layout.skips(layer):
            self._append(layer, k, v, batch)
        else:  # on the same stream as exact attention, which reads them
            self.side_stream.start(lambda: self._append(layer, k, v, batch))

    def apply_rope(self, q: Tensor, batch: DecodeBatch) -> Tensor:
        """Queries [B, H_q, d] after RoPE."""
        rope_q: Tensor = self.ops.apply_rope(q, batch.positions, self.store.rotary)
        return rope_q

    def begin(self, layer: int, q: Tensor, batch: DecodeBatch) -> Callable[[], Tensor]:
        """Begins attention of queries [B, H_q, d] before RoPE; the returned function finishes it."""
        q = self.apply_rope(q, batch)
        if batch.whole is not None and self.store.layout.skips(layer):
            exact: Tensor = self.ops.paged_attention(q, self.store.k[layer], self.store.v[layer], *batch.whole)[0]
            return lambda: exact
        if batch.sealed is not None and self.fetching is not None:
            return self._begin_fetched(layer, q, batch, batch.sealed, self.fetching)
        out = self._attend(layer, q, batch)
        return lambda: out

    def _select(self, layer: int, q: Tensor, batch: SealedBatch) -> Selection:
        selected = self.parts.index.select(self.store, layer, q, batch)
        return selected if self.hook is None else self.hook(layer, q, batch, selected)

    def _attend(self, layer: int, q: Tensor, batch: DecodeBatch) -> Tensor:
        if batch.sealed is None:
            return self._attend_exact(layer, q, batch)[0]
        exact = self.side_stream.start(
            lambda: self._attend_exact(layer, q, batch)
        )  # little work, while chunks are searched
        sealed = self._attend_sealed(layer, batch.of_sealed(q), batch.sealed)
        return self._merge(exact(), sealed, batch)

    def _append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch) -> None:
        pages = self.store.k[layer], self.store.v[layer]
        self.ops.append_tokens(k, v, batch.positions, self.store.rotary, *pages, batch.write_page, batch.write_offset)

    def _attend_exact(self, layer: int, q: Tensor, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        out, lse = self.ops.paged_attention(q, self.store.k[layer], self.store.v[layer], batch.pages, batch.counts)
        return out, lse

    def _attend_sealed(self, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        keys = self.parts.keys.source(self.store, layer, batch)
        values = self.parts.values.source(self.store, layer, batch)
        if not self.spec.selects:
            assert batch.span is not None, "batches of decode steps have it"
            out, lse = self.ops.attend_coded(q, keys, values, *batch.span)
            return out, lse
        selected = self._select(layer, q, batch)
        out, lse = self.ops.attend_selected(q, keys, values, selected.chunks, selected.log_weight)
        return out, lse

    def _merge(self, exact: tuple[Tensor, Tensor], sealed: tuple[Tensor, Tensor], batch: DecodeBatch) -> Tensor:
        """Attention [B, H_q, d] over exact tokens and over sealed ones of each segment [R, H_q, d]."""
        merge = self.ops.merge_attention
        if batch.of_sequence is None:
            merged: Tensor = merge([(batch.of_sealed(exact[0]), batch.of_sealed(exact[1])), sealed])
            return merged if batch.sequence is None else exact[0].index_copy(0, batch.sequence, merged)
        out, lse = exact
        # An empty row for sequences that have fewer segments than others.
        outs = torch.cat((sealed[0], torch.zeros_like(sealed[0][:1])))
        sums = torch.cat((sealed[1], torch.full_like(sealed[1][:1], float("-inf"))))
        for rows in batch.of_sequence.unbind(1):
            out, lse = merge([(out, lse), (outs[rows], sums[rows])]), torch.logaddexp(lse, sums[rows])
        return out

    def _begin_fetched(
        self, layer: int, q: Tensor, batch: DecodeBatch, sealed: SealedBatch, fetching: Fetching
    ) -> Callable[[], Tensor]:
        """In portions of the rows: values of one cross the bus while others are scored or attended to."""
        queries, started = batch.of_sealed(q), []
        for rows in fetching.portions(sealed):
            portion = sealed.part(rows)
            selected = self._select(layer, queries[rows], portion).chunks
            fetch = fetching.start(layer, selected, portion, self.parts.values.source(self.store, layer, portion))
            started.append((rows, portion, selected, fetch))
        exact = self._attend_exact(layer, q, batch)  # while the bus is busy

        def finish() -> Tensor:
            parts = []
            for rows, portion, selected, fetch in started:
                keys = self.parts.keys.source(self.store, layer, portion)
                parts.append(self.ops.attend_selected(queries[rows], keys, fetch.wait(), selected))
            outs, sums = zip(*parts, strict=True)
            return self._merge(exact, (torch.cat(outs), torch.cat(sums)) if len(outs) > 1 else parts[0], batch)

        return finish


def _exact_counts(numbers: SequenceNumbers, static: Tensor) -> Tensor:
    """Valid tokens int64 [B, E] of each exact page: first ``static`` [B, E], then the ring that holds the tail."""
    _, length, sealed, ring_pages, static_pages = numbers
    column = torch.arange(static.shape[1], device=static.device)
    ring, first = ring_pages[:, None], static_pages[:, None]
    age = (column - first - sealed[:, None] // PAGE) % ring  # how many pages after the tail's oldest
    in_ring = (column >= first) & (column < first + ring)
    tail = (length + 1 - sealed)[:, None]
    counts = torch.where(in_ring, tail - PAGE * age, torch.where(column < first, static, 0))
    return counts.clamp(0, PAGE)
