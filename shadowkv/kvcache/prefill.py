"""Prefill of new tokens into empty or cached sequences: exact attention, and storing, layer by layer.

A new sequence's tokens are stored while the last of them attend in the same layer, where a device can do both at once.
New tokens of a cached sequence attend to everything before them: exact tokens, rebuilt keys and fetched values, block
by block with merged softmax, so that nothing is lost to selection outside decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.batch import (
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
from shadowkv.kvcache.parts.base import SealedTokens
from shadowkv.kvcache.pool import SequencePool
from shadowkv.kvcache.sealing import Sealing
from shadowkv.kvcache.sequence import Segment, Sequence
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
        batch.keys[rows], batch.values[rows] = k, v
        batch.rotated[rows] = self.ops.rotate(k, batch.positions[rows], self.store.rotary)

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
                batch.keep_queries(segment, q[rows], start)
                here.append((segment, start, stop, rows))
        if self.side is not None and block.stop == batch.num_tokens:
            self._start_storing(layer, batch, self.side)
        for segment, start, stop, rows in here:
            out[rows] = self._attend_segment(layer, q[rows], batch, segment, start, stop)
        return out

    def finish_layer(self, layer: int, batch: PrefillBatch) -> None:
        """Stores what is not stored yet of one layer's new tokens; their memory can be used again."""
        for segment in batch.new:
            if segment.cached or batch.storing != layer:
                self._store(layer, batch, segment)
        self.join()

    def join(self) -> None:
        """Makes what is launched from now on wait for what is being stored."""
        if self.side is not None:
            torch.cuda.current_stream(self.store.compute).wait_stream(self.side)

    def end(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        for segment in batch.new:
            self._commit(segment.sequence, batch.places_of(segment, self._places))

    def seal_tail(self, sequence: Sequence) -> None:
        """Makes the tail of a sequence that has outgrown its last state, if it has one, a segment with its own."""
        heads = (0, self.shape.num_kv_heads, self.shape.head_dim)
        places, none = self._places(sequence, 0), self.store.k[0].new_empty(heads)
        queries = none.new_empty(0, self.shape.num_query_heads, self.shape.head_dim)
        for layer in range(self.shape.num_layers):
            self._write(layer, places, none, none, none, queries)
        self._commit(sequence, places)

    # -- storing ---------------------------------------------------------------------------------------------------

    def _start_storing(self, layer: int, batch: PrefillBatch, side: torch.cuda.Stream) -> None:
        """Stores the tokens of new sequences on another stream: attention reads them from the batch.

        What is cached of others would be overwritten under the eyes of their new tokens.
        """
        new = [segment for segment in batch.new if not segment.cached]
        for segment in new:
            batch.places_of(segment, self._places)  # on this stream: the host waits for it
        side.wait_stream(torch.cuda.current_stream(self.store.compute))
        with torch.cuda.stream(side):
            for segment in new:
                self._store(layer, batch, segment)
        batch.storing = layer

    def _store(self, layer: int, batch: PrefillBatch, segment: NewTokens) -> None:
        rows, places = slice(segment.start, segment.stop), batch.places_of(segment, self._places)
        tokens = batch.keys[rows], batch.rotated[rows], batch.values[rows], batch.queries[segment.start]
        self._write(layer, places, *tokens)

    def _places(self, sequence: Sequence, count: int) -> Places:
        """Where ``count`` new tokens of a sequence go; it has a new segment if their state is to be fitted."""
        start, before, device = sequence.length, sequence.sealed, self.store.compute
        length = start + count
        after = self.layout.growth.sealed(sequence.standing, length, length == sequence.capacity)
        tail, cached = self._tail_rows(sequence), tuple(map(self._cached, sequence.path))
        if after.fits and not self.pool.begin_segment(sequence, length):
            self.pool.go_on(sequence, length)
            after = self.layout.growth.sealed(sequence.standing, length, False)
        sealed, reserve = after.tokens - before, sequence.sealed_reserve
        values = sequence.host_reserve if self.layout.host_fields else reserve
        pages, value_pages = (
            torch.tensor(names[: sealed // PAGE], dtype=torch.int64, device=device) for names in (reserve, values)
        )
        segment = sequence.path[-1] if sequence.path else None
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
            pages=pages,
            value_pages=value_pages,
            static=self._exact_rows(segment.static if segment is not None else [], 0, static),
            tail=tail,
            exact=self._exact_rows(ring, after.tokens if sealed else start, length),
            cached=cached,
        )

    def _write(
        self, layer: int, places: Places, keys: Tensor, rotated: Tensor, values: Tensor, queries: Tensor
    ) -> None:
        if not places.sealed:
            self._write_exact(layer, places.exact, rotated, values)
            return
        if len(places.tail.pages):
            tail, tail_values = self.store.read_exact(layer, places.tail)
            positions = torch.arange(places.before, places.before + len(tail), device=tail.device)
            keys = torch.cat((self.ops.rotate(tail, positions, self.store.rotary, inverse=True), keys))
            rotated, values = torch.cat((tail, rotated)), torch.cat((tail_values, values))
        count, excluded = places.sealed, None
        if places.fits:
            assert places.segment is not None
            state, all_keys = places.segment.state or 0, self._with_earlier(layer, places, keys)
            for part, seen in zip(self.parts, (all_keys, keys, keys), strict=True):
                part.fit(self.store, layer, state, seen, rotated, values, queries)
            excluded = self._write_static(layer, places, rotated[:count], values[:count])
        tokens = (x[:count].unflatten(0, (-1, PAGE)).unsqueeze(0) for x in (keys, rotated, values))
        layers = slice(layer, layer + 1)
        self.sealing.write(SealedTokens(layers, places.state, places.pages, places.value_pages, *tokens), excluded)
        self._write_exact(layer, places.exact, rotated[count:], values[count:])

    def _with_earlier(self, layer: int, places: Places, keys: Tensor) -> Tensor:
        """Keys before the rotation that a subspace is found by: where they are few, those before them too, rebuilt."""
        if not fitted_with_earlier(places.before, places.before + len(keys)) or not self.parts.keys.state_fields():
            return keys
        earlier = []
        for one in places.cached:
            start = int(one.row.first)
            for block, _ in self.cached.blocks(layer, one):
                positions = torch.arange(start, start + block.shape[1], device=block.device)
                rows = block.transpose(0, 1).contiguous()
                earlier.append(self.ops.rotate(rows, positions, self.store.rotary, inverse=True))
                start += block.shape[1]
        return torch.cat((*earlier, keys))

    def _write_static(self, layer: int, places: Places, rotated: Tensor, values: Tensor) -> Tensor:
        """Makes the sink, if it is here, and the outliers exact; returns their bits, bool [1, pages, H, C]."""
        chunk, heads = self.spec.chunk, self.shape.num_kv_heads
        sink = torch.arange(0 if places.before else self.spec.sink_chunks, device=rotated.device).expand(heads, -1)
        outliers = self.ops.find_outliers(rotated, chunk, self.spec.outliers, sink.shape[1])
        chosen = torch.cat((sink, outliers), dim=1)
        tokens = (chosen.unsqueeze(-1) * chunk + torch.arange(chunk, device=chosen.device)).flatten(1)  # [H, n]
        head = torch.arange(heads, device=chosen.device)
        exact = [x[tokens, head[:, None]].transpose(0, 1) for x in (rotated, values)]
        self._write_exact(layer, places.static, *exact)
        bits = torch.zeros(heads, len(rotated) // chunk, dtype=torch.bool, device=chosen.device)
        bits.scatter_(1, chosen, True)
        return bits.unflatten(1, (-1, PAGE // chunk)).transpose(0, 1).unsqueeze(0)

    def _exact_rows(self, pages: list[int], start: int, stop: int) -> ExactRows:
        """Where the tokens of positions ``start`` to ``stop`` are in a ring of exact pages."""
        position = torch.arange(start, stop)
        names = torch.tensor(pages, dtype=torch.int64)[position // PAGE % max(1, len(pages))]
        return ExactRows(*torch.stack((names, position % PAGE)).to(self.store.compute))

    def _tail_rows(self, sequence: Sequence) -> ExactRows:
        """Where the exact tail is, oldest first."""
        return self._exact_rows(sequence.ring if sequence.path else sequence.dense, sequence.sealed, sequence.length)

    def _write_exact(self, layer: int, rows: ExactRows, rotated: Tensor, values: Tensor) -> None:
        """Writes tokens [n, H, d] to exact pages."""
        self.store.k[layer][rows.pages, :, rows.offsets] = rotated
        self.store.v[layer][rows.pages, :, rows.offsets] = values

    def _commit(self, sequence: Sequence, places: Places) -> None:
        self.tables.length[sequence.slot] = places.length
        if places.sealed:
            self.pool.seal(sequence, places.before + places.sealed)

    # -- attending -------------------------------------------------------------------------------------------------

    def _attend_segment(
        self, layer: int, q: Tensor, batch: PrefillBatch, segment: NewTokens, start: int, stop: int
    ) -> Tensor:
        rows = slice(segment.start, stop)
        if not segment.cached:
            return self.ops.causal_attention(q, batch.rotated[rows], batch.values[rows])
        places = batch.places_of(segment, self._places)
        k = self._behind_tail(self.store.k[layer], places.tail, batch.rotated[rows])
        v = self._behind_tail(self.store.v[layer], places.tail, batch.values[rows])
        if not places.cached:
            return self.ops.causal_attention(q, k, v)
        merged = self.ops.block_attention(q, k.transpose(0, 1), v.transpose(0, 1), causal=True)
        for one in places.cached:
            for k, v in self.cached.blocks(layer, one):
                part = self.ops.block_attention(q, k, v)
                merged = self.ops.merge_attention([merged, part]), torch.logaddexp(merged[1], part[1])
        return merged[0]

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
