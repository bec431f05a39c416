"""Prefill of new tokens into empty or cached sequences: exact attention, and storing, layer by layer.

A new sequence's tokens are stored while the last of them attend in the same layer, where a device can do both at once.
New tokens of a cached sequence attend to everything before them: exact tokens, rebuilt keys and fetched values, block
by block with merged softmax, so that nothing is lost to selection outside decode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.batch import ExactRows, Places, PrefillBatch, PrefillBlock, SealedBatch, Segment
from shadowkv.kvcache.cached import CachedTokens
from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.parts.base import SealedTokens
from shadowkv.kvcache.pool import SequencePool
from shadowkv.kvcache.sealing import Sealing
from shadowkv.kvcache.sequence import Sequence
from shadowkv.kvcache.spec import PAGE
from shadowkv.kvcache.store import Store
from shadowkv.ops.attend_selected.sources import DenseRows


class Prefill:
    """The prefill half of the cache."""

    def __init__(self, store: Store, parts: Parts, pool: SequencePool, sealing: Sealing) -> None:
        self.store, self.parts, self.pool, self.sealing = store, parts, pool, sealing
        self.table, self.layout, self.ops = pool.table, store.layout, store.ops
        self.spec, self.shape = store.layout.spec, store.layout.shape
        # Of high priority: what takes little finds its way between the blocks of the kernels that take all.
        self.side = torch.cuda.Stream(store.compute, priority=-1) if store.compute.type == "cuda" else None
        self.cached = CachedTokens(store, parts)

    def batch(self, sequences: list[tuple[Sequence, int]]) -> PrefillBatch:
        """Packs the new tokens of pairs of an admitted sequence and how many tokens it gains."""
        segments, start = [], 0
        for sequence, count in sequences:
            segments.append(Segment(sequence, start, start + count, int(self.table.length[sequence.slot])))
            start += count
        return PrefillBatch(segments, self.store.compute, self.shape, self.store.k[0].dtype)

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
        for segment in batch.segments:
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
        for segment in batch.segments:
            if segment.cached or batch.storing != layer:
                self._store(layer, batch, segment)
        self.join()

    def join(self) -> None:
        """Makes what is launched from now on wait for what is being stored."""
        if self.side is not None:
            torch.cuda.current_stream(self.store.compute).wait_stream(self.side)

    def end(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        for segment in batch.segments:
            self._commit(segment.sequence, segment.cached + segment.stop - segment.start)

    def compress_dense(self, sequence: Sequence) -> None:
        """Compresses a dense sequence that has outgrown ``dense_limit`` while decoding."""
        heads = (0, self.shape.num_kv_heads, self.shape.head_dim)
        places, none = self._places(sequence, 0), self.store.k[0].new_empty(heads)
        queries = none.new_empty(0, self.shape.num_query_heads, self.shape.head_dim)
        for layer in range(self.shape.num_layers):
            self._write(layer, sequence, places, none, none, none, queries)
        self._commit(sequence, int(self.table.length[sequence.slot]))

    # -- storing ---------------------------------------------------------------------------------------------------

    def _sealed_after(self, sequence: Sequence, length: int) -> int:
        """Tokens that are sealed once the sequence has ``length`` of them."""
        sealed, limit = int(self.table.sealed[sequence.slot]), self.spec.dense_limit
        # At the limit itself a sequence stays dense only if it will not grow.
        short = length < limit or length == limit == sequence.capacity
        if not self.spec.seals or (short and not sealed):
            return 0
        return max(sealed, self.spec.sealed_pages(length) * PAGE)

    def _start_storing(self, layer: int, batch: PrefillBatch, side: torch.cuda.Stream) -> None:
        """Stores the tokens of new sequences on another stream: attention reads them from the batch.

        What is cached of others would be overwritten under the eyes of their new tokens.
        """
        new = [segment for segment in batch.segments if not segment.cached]
        for segment in new:
            batch.places_of(segment, self._places)  # on this stream: the host waits for it
        side.wait_stream(torch.cuda.current_stream(self.store.compute))
        with torch.cuda.stream(side):
            for segment in new:
                self._store(layer, batch, segment)
        batch.storing = layer

    def _store(self, layer: int, batch: PrefillBatch, segment: Segment) -> None:
        rows, places = slice(segment.start, segment.stop), batch.places_of(segment, self._places)
        tokens = batch.keys[rows], batch.rotated[rows], batch.values[rows], batch.queries[segment.start]
        self._write(layer, segment.sequence, places, *tokens)

    def _places(self, sequence: Sequence, count: int) -> Places:
        """Where ``count`` new tokens of a sequence go."""
        length, before = int(self.table.length[sequence.slot]), int(self.table.sealed[sequence.slot])
        sealed, device = self._sealed_after(sequence, length + count), self.store.compute
        pages, value_pages = (
            torch.tensor(names[before // PAGE : sealed // PAGE], dtype=torch.int64, device=device)
            for names in self.pool.sealed_pages(sequence)
        )
        return Places(
            compressed=sealed > 0,
            before=before,
            sealed=max(0, sealed - before),
            slot=torch.tensor([sequence.slot], device=device),
            pages=pages,
            value_pages=value_pages,
            static=self._exact_rows(sequence.static, 0, self.spec.static_tokens if sealed else 0),
            tail=self._tail_rows(sequence),
            exact=self._exact_rows(sequence.ring if sealed else sequence.dense, sealed or length, length + count),
            cached=self.sealed_row(sequence) if before else None,
        )

    def _write(
        self,
        layer: int,
        sequence: Sequence,
        places: Places,
        keys: Tensor,
        rotated: Tensor,
        values: Tensor,
        queries: Tensor,
    ) -> None:
        if not places.compressed:
            self._write_exact(layer, places.exact, rotated, values)
            return
        if len(places.tail.pages):
            tail, tail_values = self.store.read_exact(layer, places.tail)
            positions = torch.arange(places.before, places.before + len(tail), device=tail.device)
            keys = torch.cat((self.ops.rotate(tail, positions, self.store.rotary, inverse=True), keys))
            rotated, values = torch.cat((tail, rotated)), torch.cat((tail_values, values))
        count, excluded = places.sealed, None
        if not places.before:
            for part in (self.parts.keys, self.parts.index):
                part.fit(self.store, layer, sequence.slot, keys, rotated, queries)
            excluded = self._write_static(layer, places.static, rotated[:count], values[:count])
        if count:
            tokens = (x[:count].unflatten(0, (-1, PAGE)).unsqueeze(0) for x in (keys, rotated, values))
            layers = slice(layer, layer + 1)
            self.sealing.write(SealedTokens(layers, places.slot, places.pages, places.value_pages, *tokens), excluded)
        self._write_exact(layer, places.exact, rotated[count:], values[count:])

    def _write_static(self, layer: int, rows: ExactRows, rotated: Tensor, values: Tensor) -> Tensor:
        """Makes the sink and the outliers exact; returns their bits, bool [1, pages, H, C]."""
        chunk, heads = self.spec.chunk, self.shape.num_kv_heads
        sink = torch.arange(self.spec.sink_chunks, device=rotated.device).expand(heads, -1)
        outliers = self.ops.find_outliers(rotated, chunk, self.spec.outliers, self.spec.sink_chunks)
        chosen = torch.cat((sink, outliers), dim=1)
        tokens = (chosen.unsqueeze(-1) * chunk + torch.arange(chunk, device=chosen.device)).flatten(1)  # [H, n]
        head = torch.arange(heads, device=chosen.device)
        exact = [x[tokens, head[:, None]].transpose(0, 1) for x in (rotated, values)]
        self._write_exact(layer, rows, *exact)
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
        start, stop = int(self.table.sealed[sequence.slot]), int(self.table.length[sequence.slot])
        return self._exact_rows(sequence.ring if start else sequence.dense, start, stop)

    def _write_exact(self, layer: int, rows: ExactRows, rotated: Tensor, values: Tensor) -> None:
        """Writes tokens [n, H, d] to exact pages."""
        self.store.k[layer][rows.pages, :, rows.offsets] = rotated
        self.store.v[layer][rows.pages, :, rows.offsets] = values

    def _commit(self, sequence: Sequence, length: int) -> None:
        sealed = self._sealed_after(sequence, length)
        if sealed and not self.table.sealed[sequence.slot]:
            self.pool.become_compressed(sequence, sealed)
        self.table.sealed[sequence.slot] = sealed
        self.table.length[sequence.slot] = length

    # -- attending -------------------------------------------------------------------------------------------------

    def _attend_segment(
        self, layer: int, q: Tensor, batch: PrefillBatch, segment: Segment, start: int, stop: int
    ) -> Tensor:
        rows = slice(segment.start, stop)
        if not segment.cached:
            return self.ops.causal_attention(q, batch.rotated[rows], batch.values[rows])
        places = batch.places_of(segment, self._places)
        k = self._behind_tail(self.store.k[layer], places.tail, batch.rotated[rows])
        v = self._behind_tail(self.store.v[layer], places.tail, batch.values[rows])
        if places.cached is None:
            return self.ops.causal_attention(q, k, v)
        merged = self.ops.block_attention(q, k.transpose(0, 1), v.transpose(0, 1), causal=True)
        for k, v in self.cached.blocks(layer, places.cached, places.static):
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

    def sealed_row(self, sequence: Sequence) -> SealedBatch:
        """A batch of one compressed sequence that selects nothing by itself."""
        slot = torch.tensor([sequence.slot], device=self.store.compute)
        count = int(self.table.sealed[sequence.slot]) // PAGE
        num_pages = torch.tensor([count], device=self.store.compute)
        chunks = num_pages * PAGE // self.spec.chunk
        pages = self.table.sealed_pages[slot, :count].long()
        return SealedBatch(
            slot,
            pages,
            self.table.value_pages[slot, :count].long(),
            num_pages,
            chunks,
            chunks,
            count * PAGE // self.spec.chunk,
        )
