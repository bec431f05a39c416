"""Prefill of new tokens into empty or cached sequences: exact attention, and storing, layer by layer.

A new sequence's tokens are stored while the last of them attend in the same layer, where a device can do both at once;
those of short prompts several layers at a time.
New tokens of a cached sequence attend to everything before them: exact tokens, rebuilt keys and fetched values, block
by block with merged softmax, so that nothing is lost to selection outside decode.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from shadowkv.kvcache.batch import (
    STATES_AT_ONCE,
    TOKENS_AT_ONCE,
    CachedSegment,
    ExactRows,
    NewTokens,
    Places,
    PrefillBatch,
    PrefillBlock,
    SealedBatch,
)
from shadowkv.kvcache.cached import CachedTokens
from shadowkv.kvcache.growth import fitted_with_earlier
from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.parts.base import FittedTokens, SealedTokens
from shadowkv.kvcache.pool import SequencePool
from shadowkv.kvcache.sealing import Sealing
from shadowkv.kvcache.sequence import Segment, Sequence
from shadowkv.kvcache.sparse_prefill import SparsePrefill
from shadowkv.kvcache.spec import PAGE
from shadowkv.kvcache.store import Store
from shadowkv.ops.attend_selected.sources import DenseRows


class Prefill:
    """The prefill half of the cache."""

    def __init__(self, store: Store, parts: Parts, pool: SequencePool, sealing: Sealing) -> None:
        self.store, self.parts, self.pool, self.sealing = store, parts, pool, sealing
        self.tables, self.layout, self.ops = pool.tables, store.layout, store.ops
        self.spec, self.shape = store.layout.spec, store.layout.shape
        # Of high priority: what takes little finds its way between the blocks of the kernels that take all.
        self.side = torch.cuda.Stream(store.compute, priority=-1) if store.compute.type == "cuda" else None
        self.cached = CachedTokens(store, parts)
        self.sparse = SparsePrefill(self.ops, store.compute) if self.spec.prefill == "sparse" else None

    def batch(self, sequences: list[tuple[Sequence, int]]) -> PrefillBatch:
        """Packs the new tokens of pairs of an admitted sequence and how many tokens it gains."""
        new, start = [], 0
        for sequence, count in sequences:
            new.append(NewTokens(sequence, start, start + count, sequence.length))
            start += count
        return PrefillBatch(new, self.store.compute, self.shape, self.store.k[0].dtype)

    def append(self, layer: int, k: Tensor, v: Tensor, block: PrefillBlock) -> None:
        """Takes keys (before the rotation) and values [n, H, d] of a block of tokens."""
        batch, rows = block.batch, slice(block.start, block.stop)
        place = batch.place(layer)
        batch.keys[place, rows], batch.values[place, rows] = k, v
        batch.rotated[place, rows] = self.ops.rotate(k, batch.positions[rows], self.store.rotary)

    def attend(self, layer: int, q: Tensor, block: PrefillBlock) -> Tensor:
        """Exact attention [n, H_q, d] of a block of tokens, every block of the layer having been appended; the
        last block last.

        Its attention is under way while the layer is stored: by then all queries are known from which
        an index learns.
        """
        batch = block.batch
        q = self.ops.rotate(q, batch.positions[block.start : block.stop], self.store.rotary)
        out = torch.empty_like(q)
        here = []
        for segment in batch.new:
            start, stop = max(block.start, segment.start), min(block.stop, segment.stop)
            if start < stop:
                rows = slice(start - block.start, stop - block.start)
                batch.keep_queries(layer, segment, q[rows], start)
                here.append((segment, start, stop, rows))
        if self.side is not None and block.stop == batch.num_tokens:
            self._start_storing(layer, batch, self.side)
        for segment, start, stop, rows in here:
            out[rows] = self._attend_segment(layer, q[rows], batch, segment, start, stop)
        return out

    def finish_layer(self, layer: int, batch: PrefillBatch) -> None:
        """Stores what is not stored yet of the new tokens of a layer, or of several together once the last of them has
        been computed; their memory can be used again."""
        layers = batch.stored_after(layer)
        if layers is None:
            return
        for segment in batch.new:
            if segment.cached or batch.storing != layer:
                self._store(layers, batch, segment)
        self.join()

    def join(self) -> None:
        """Makes what is launched from now on wait for what is being stored."""
        if self.side is not None:
            torch.cuda.current_stream(self.store.compute).wait_stream(self.side)

    def end(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        for segment in batch.new:
            self._commit(segment.sequence, batch.places_of(segment, self._places))

    def seal_tails(self, sequences: list[Sequence]) -> None:
        """Makes the tails of sequences that have outgrown their last states, if they have one, segments with their own:
        those that are alike together."""
        alike: dict[tuple[int, ...], list[tuple[Sequence, Places]]] = {}
        for sequence in sequences:
            places = self._places(sequence, 0)
            key = len(places.tail.pages), places.sealed, places.fits, places.before
            alike.setdefault(key, []).append((sequence, places))
        for (tail, *_), found in alike.items():
            most = max(1, min(STATES_AT_ONCE, TOKENS_AT_ONCE // tail))
            for start in range(0, len(found), most):
                self._seal_tails(found[start : start + most], tail)

    def _seal_tails(self, tails: list[tuple[Sequence, Places]], length: int) -> None:
        shape = self.shape
        step = max(1, min(STATES_AT_ONCE, TOKENS_AT_ONCE // length) // len(tails))
        for first in range(0, shape.num_layers, step):
            layers = slice(first, min(first + step, shape.num_layers))
            none = self.store.k[layers].new_empty(layers.stop - first, 0, shape.num_kv_heads, shape.head_dim)
            gone = none.new_empty(len(none), 0, shape.num_query_heads, shape.head_dim)
            for sequence, places in tails:
                if places.observed is not None and not sequence.observed:
                    self._observe(layers, places, gone)
            self._write(layers, [places for _, places in tails], [(none, none, none)] * len(tails))
        for sequence, places in tails:
            sequence.observed = False
            self._commit(sequence, places)

    # -- storing ---------------------------------------------------------------------------------------------------

    def _start_storing(self, layer: int, batch: PrefillBatch, side: torch.cuda.Stream) -> None:
        """Stores the tokens of new sequences on another stream, if it is time: attention reads them from the batch.

        What is cached of others would be overwritten while their new tokens still read it.
        """
        layers = batch.stored_after(layer)
        if layers is None:
            return
        new = [segment for segment in batch.new if not segment.cached]
        for segment in new:
            batch.places_of(segment, self._places)  # on this stream: the host waits for it
        side.wait_stream(torch.cuda.current_stream(self.store.compute))
        with torch.cuda.stream(side):
            for segment in new:
                self._store(layers, batch, segment)
        batch.storing = layer

    def _store(self, layers: slice, batch: PrefillBatch, segment: NewTokens) -> None:
        count, rows = layers.stop - layers.start, slice(segment.start, segment.stop)
        places = batch.places_of(segment, self._places)
        if places.observed is not None:
            self._observe(layers, places, batch.queries[segment.start][:count])
            segment.sequence.observed = not places.sealed
        keys, rotated, values = (x[:count, rows] for x in (batch.keys, batch.rotated, batch.values))
        self._write(layers, [places], [(keys, rotated, values)])

    def _observe(self, layers: slice, places: Places, queries: Tensor) -> None:
        """Lets the parts learn from the last queries [L, w, H_q, d] of new tokens."""
        assert places.observed is not None
        first = places.length - queries.shape[1] - places.first
        for part in self.parts:
            part.observe(self.store, layers, places.observed, queries.unsqueeze(1), first)

    def _places(self, sequence: Sequence, count: int) -> Places:
        """Where ``count`` new tokens of a sequence go; it has a new segment if their state is to be fitted."""
        start, before, device = sequence.length, sequence.sealed, self.store.compute
        length = start + count
        after = self.layout.growth.sealed(sequence.standing, length, length == sequence.capacity)
        tail, cached = self._tail_rows(sequence), tuple(map(self._cached, sequence.path))
        if after.fits:
            self.pool.begin_segment(sequence, length)
        sealed, reserve = after.tokens - before, sequence.sealed_reserve
        values = sequence.host_reserve if self.layout.host_fields else reserve
        pages, value_pages = (
            torch.tensor(names[: sealed // PAGE], dtype=torch.int64, device=device) for names in (reserve, values)
        )
        segment, reserved = sequence.path[-1] if sequence.path else None, sequence.state_reserve
        observed = None
        if after.fits and segment is not None and segment.state is not None:
            observed = segment.state
        elif segment is None and reserved:
            observed = reserved[0]
        static = segment.static_tokens if segment is not None and after.fits else 0
        state = None if segment is None else segment.state
        ring = sequence.dense if segment is None else sequence.ring
        return Places(
            length=length,
            before=before,
            sealed=sealed,
            segment=segment,
            fits=after.fits,
            state=torch.tensor([state or 0], device=device),
            observed=None if observed is None else torch.tensor([observed], device=device),
            first=before,
            pages=pages,
            value_pages=value_pages,
            static=self._exact_rows(segment.static if segment is not None else [], 0, static),
            tail=tail,
            exact=self._exact_rows(ring, after.tokens if sealed else start, length),
            cached=cached,
        )

    def _write(self, layers: slice, all_places: list[Places], new: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Stores tokens of layers of sequences that are sealed alike, as many of each: those that were exact and
        the new ones, keys, rotated keys and values [L, n, H, d]."""
        places = all_places[0]
        if not places.sealed:
            for one, (_, rotated, values) in zip(all_places, new, strict=True):
                self._write_exact(layers, one.exact, rotated, values)
            return
        joined = [self._behind_exact(layers, one, *tokens) for one, tokens in zip(all_places, new, strict=True)]
        keys, rotated, values = (_stacked(x) for x in zip(*joined, strict=True))  # [L, n, S, H, d]
        states, count, excluded = torch.cat([one.state for one in all_places]), places.sealed, None
        if places.fits:
            seen = keys
            if fitted_with_earlier(places.before, places.before + keys.shape[2]) and self.parts.keys.state_fields():
                earlier = [self._earlier(layers, one) for one in all_places]
                seen = torch.cat((_stacked(earlier), keys), dim=2)
            for part in self.parts:
                part.fit(self.store, layers, states, FittedTokens(seen, rotated, values))
            excluded = torch.cat(
                [
                    self._write_static(layers, one, rotated[:, i, :count], values[:, i, :count])
                    for i, one in enumerate(all_places)
                ],
                dim=1,
            )
        if len(all_places) > 1:
            states = states.repeat_interleave(count // PAGE)
        tokens = (x[:, :, :count].unflatten(2, (-1, PAGE)).flatten(1, 2) for x in (keys, rotated, values))
        pages, value_pages = (
            torch.cat([getattr(one, name) for one in all_places]) for name in ("pages", "value_pages")
        )
        self.sealing.write(SealedTokens(layers, states, pages, value_pages, *tokens), excluded)
        for i, one in enumerate(all_places):
            self._write_exact(layers, one.exact, rotated[:, i, count:], values[:, i, count:])

    def _behind_exact(
        self, layers: slice, places: Places, keys: Tensor, rotated: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """New tokens [L, n, H, d] behind the exact tail that their sequence has."""
        count = len(places.tail.pages)
        if not count:
            return keys, rotated, values
        tail, tail_values = self.store.read_exact(layers, places.tail)
        positions = torch.arange(places.before, places.before + count, device=tail.device).expand(len(tail), -1)
        before = self.ops.rotate(tail, positions, self.store.rotary, inverse=True)
        pairs = ((before, keys), (tail, rotated), (tail_values, values))
        first, second, third = (torch.cat(pair, dim=1) for pair in pairs)
        return first, second, third

    def _earlier(self, layers: slice, places: Places) -> Tensor:
        """Keys before the rotation [L, n, H, d] of all that a sequence has sealed, rebuilt: new tokens that are too few
        for a subspace of their own are in one with those."""
        rebuilt = []
        for layer in range(layers.start, layers.stop):
            for one in places.cached:
                start = int(one.row.first)
                for block, _ in self.cached.blocks(layer, one):
                    positions = torch.arange(start, start + block.shape[1], device=block.device)
                    rows = block.transpose(0, 1).contiguous()
                    rebuilt.append(self.ops.rotate(rows, positions, self.store.rotary, inverse=True))
                    start += block.shape[1]
        return torch.cat(rebuilt).unflatten(0, (layers.stop - layers.start, -1))

    def _write_static(self, layers: slice, places: Places, rotated: Tensor, values: Tensor) -> Tensor:
        """Makes the sink, if it is here, and the outliers of tokens [L, n, H, d] exact; returns their bits, bool
        [L, pages, H, C]."""
        chunk, heads, spec = self.spec.chunk, self.shape.num_kv_heads, self.spec
        count, device = 0 if places.before else spec.sink_chunks, rotated.device
        sink = torch.arange(count, device=device).expand(len(rotated), heads, -1)
        outliers = torch.stack([self.ops.find_outliers(one, chunk, spec.outliers, count) for one in rotated])
        chosen = torch.cat((sink, outliers), dim=2)  # [L, H, chunks]
        tokens = (chosen.unsqueeze(-1) * chunk + torch.arange(chunk, device=device)).flatten(2)
        rows = tokens.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, rotated.shape[-1])
        self._write_exact(layers, places.static, rotated.gather(1, rows), values.gather(1, rows))
        bits = torch.zeros(len(rotated), heads, rotated.shape[1] // chunk, dtype=torch.bool, device=device)
        bits.scatter_(2, chosen, True)
        return bits.unflatten(2, (-1, PAGE // chunk)).transpose(1, 2)

    def _exact_rows(self, pages: list[int], start: int, stop: int) -> ExactRows:
        """Where the tokens of positions ``start`` to ``stop`` are in a ring of exact pages."""
        position = torch.arange(start, stop)
        names = torch.tensor(pages, dtype=torch.int64)[position // PAGE % max(1, len(pages))]
        return ExactRows(*torch.stack((names, position % PAGE)).to(self.store.compute))

    def _tail_rows(self, sequence: Sequence) -> ExactRows:
        """Where the exact tail is, oldest first."""
        return self._exact_rows(sequence.ring if sequence.path else sequence.dense, sequence.sealed, sequence.length)

    def _write_exact(self, layers: slice, rows: ExactRows, rotated: Tensor, values: Tensor) -> None:
        """Writes tokens [L, n, H, d] to exact pages."""
        for exact, tokens in ((self.store.k, rotated), (self.store.v, values)):
            exact[layers][:, rows.pages, :, rows.offsets] = tokens.transpose(0, 1)

    def _commit(self, sequence: Sequence, places: Places) -> None:
        self.tables.length[sequence.slot] = places.length
        if places.sealed:
            self.pool.seal(sequence, places.before + places.sealed)

    # -- attending -------------------------------------------------------------------------------------------------

    def _attend_segment(
        self, layer: int, q: Tensor, batch: PrefillBatch, segment: NewTokens, start: int, stop: int
    ) -> Tensor:
        keys, values = (x[batch.place(layer), segment.start : stop] for x in (batch.rotated, batch.values))
        sparse = self.sparse
        if sparse is not None and not sparse.pays(len(q), segment.cached + stop - segment.start):
            sparse = None
        if not segment.cached:
            if sparse is not None:
                return sparse.attend(layer, q, keys, values, segment.stop - stop)
            return self.ops.causal_attention(q, keys, values)
        places = batch.places_of(segment, self._places)
        k = self._behind_tail(self.store.k[layer], places.tail, keys)
        v = self._behind_tail(self.store.v[layer], places.tail, values)
        if sparse is not None:
            k, v = self._behind_cached(layer, places.cached, k, v)
            return sparse.attend(layer, q, k, v, segment.stop - stop)
        if not places.cached:
            return self.ops.causal_attention(q, k, v)
        merged = self.ops.block_attention(q, k.transpose(0, 1), v.transpose(0, 1), causal=True)
        for one in places.cached:
            for k, v in self.cached.blocks(layer, one):
                part = self.ops.block_attention(q, k, v)
                merged = self.ops.merge_attention([merged, part]), torch.logaddexp(merged[1], part[1])
        return merged[0]

    def _behind_cached(
        self, layer: int, cached: tuple[CachedSegment, ...], k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Everything that segments have sealed, and keys and values [n, H, d] behind it."""
        if not cached:
            return k, v
        parts = [
            tuple(x.transpose(0, 1).clone() for x in block)  # the next block takes its place
            for segment in cached
            for block in self.cached.blocks(layer, segment)
        ]
        keys, values = zip(*parts, (k, v), strict=True)
        return torch.cat(keys), torch.cat(values)

    def _behind_tail(self, pages: Tensor, tail: ExactRows, new: Tensor) -> Tensor:
        """The exact tail [t, H, d] in ``pages`` and behind it new tokens [n, H, d]."""
        names = tail.pages[None, ::PAGE]  # the tail begins with a page
        whole, count = names.shape[1] * PAGE, len(tail.pages)
        joined = new.new_empty(whole + len(new), *new.shape[1:])
        self.ops.rebuild_rows(DenseRows(pages.unsqueeze(2), names), 0, joined[:whole].transpose(0, 1), False)
        joined[count : count + len(new)] = new
        return joined[: count + len(new)]

    def _cached(self, segment: Segment) -> CachedSegment:
        """A segment that later tokens attend to all of."""
        device, count = self.store.compute, len(segment.pages)
        row, num_pages = (torch.tensor([number], device=device) for number in (segment.row, count))
        chunks = num_pages * PAGE // self.spec.chunk
        sealed = SealedBatch(
            rows=row,
            states=torch.tensor([segment.state or 0], device=device),
            first=torch.tensor([segment.first], device=device),
            pages=self.tables.pages[row, :count].long(),
            value_pages=self.tables.value_pages[row, :count].long(),
            num_pages=num_pages,
            num_chunks=chunks,
            budget=chunks,
            max_budget=count * PAGE // self.spec.chunk,
        )
        return CachedSegment(sealed, self._exact_rows(segment.static, 0, segment.static_tokens))


def _stacked(tokens: Items[Tensor]) -> Tensor:
    """[L, n, S, H, d] of n times [L, S, H, d], which are not copied where there is one."""
    return torch.stack(tuple(tokens), dim=1) if len(tokens) > 1 else tokens[0].unsqueeze(1)
