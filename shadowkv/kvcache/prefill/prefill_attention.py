"""Attention of a prompt's new tokens, layer by layer, and storage of their keys and values.

New tokens of a cached sequence attend to its exact tokens, and to keys and values rebuilt from compressed pages.
Attention is either exact (computed span by span, with the partial results merged by log-sum-exp) or done by the
policy's prefill strategy. On a GPU, a layer of a new sequence is stored while the last tokens attend in this layer.
Several layers of short prompts are stored together.

Shapes: n queries, m keys, L layers, H kv heads (or heads of index queries), H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor

from shadowkv.kvcache.compression.storing import Storing
from shadowkv.kvcache.parts.base import INDEX_KEYS, PrefillStrategy
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.native import attend_selected_blocks
from shadowkv.kvcache.prefill.prefill_batch import GroupPrefill, NewTokens, PrefillBlock, RowRange
from shadowkv.kvcache.sequences.group_layout import neighbours
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import CachedSegment, ExactRows, GroupStore
from shadowkv.ops.attend_selected.sources import DenseRows
from shadowkv.ops.dense_attention.forms import Packed


class Prefill:
    """Prefill of a group of layers. Layers are numbered within the group.

    Attributes:
        strategy: the prefill strategy. It replaces exact attention where its method ``pays`` returns True.
    """

    def __init__(self, store: GroupStore, storing: Storing, strategy: PrefillStrategy) -> None:
        self.store, self.storing, self.ops, self.strategy = store, storing, store.ops, strategy
        self.layout = store.layout
        # High priority, so that kernels with few thread blocks can run beside kernels that fill the GPU.
        self.side = torch.cuda.Stream(store.compute, priority=-1) if store.compute.type == "cuda" else None

    def batch(
        self,
        sequences: list[tuple[CachedSequence, int]],
        bounds: Collection[int] = (),
        packed: GroupPrefill | None = None,
    ) -> GroupPrefill:
        """Packs new tokens.

        Args:
            sequences: pairs of an admitted sequence and its number of new tokens.
            bounds: layers of the model that must not be stored together with the layer before them.
            packed: a batch of the same tokens for another group or cache. The new batch uses its scratch memory too.
        """
        planner, layout, store = self.storing.planner, self.layout, self.store
        layer_ranges = neighbours(layout.layers, bounds)
        if packed is not None:
            return packed.of([sequence for sequence, _ in sequences], planner, layer_ranges)
        new, start = [], 0
        for sequence, count in sequences:
            new.append(NewTokens(sequence, start, start + count, sequence.length))
            start += count
        shape, dtype, scratch = layout.shape, store.k.dtype, layout.scratch
        return GroupPrefill(new, planner, store.compute, shape, dtype, layer_ranges, scratch, layout.model_indexed)

    def append(self, layer: int, k: Tensor, v: Tensor, block: PrefillBlock, index_keys: Tensor | None = None) -> None:
        """Keeps a block's keys (before RoPE) and values, [n, H, d], for attention and storage. If there is an indexer,
        also keeps index keys [n, 1, d]."""
        batch, rows = block.batch, slice(block.start, block.stop)
        index = batch.scratch_index(layer)
        kept = (x[index, rows] for x in (batch.keys, batch.rope_keys, batch.values))
        self.ops.append_block(k, v, batch.positions[rows], self.store.rotary, *kept)
        if index_keys is not None and batch.index_keys is not None:
            assert self.layout.indexer is not None
            if self.layout.indexer.pooled is None:
                index_keys = self.ops.apply_rope(index_keys, batch.positions[rows], self.store.rotary)
            batch.index_keys[index, rows] = index_keys

    def start(
        self,
        layer: int,
        q: Tensor,
        block: PrefillBlock,
        sinks: Tensor | None = None,
        index_queries: IndexQueries | None = None,
    ) -> Callable[[], Tensor]:
        """Attends with queries [n, H_q, d] of a block before RoPE. The keys and values of this block and of the blocks
        before it must have been appended.

        The returned function returns the result, with undefined rows for tokens that do not need attention. ``sinks``,
        float32 [H_q], are as in ``KVCache.start``. If there is an indexer, ``index_queries`` [n, H, d], before RoPE,
        select the blocks to attend to. On a GPU the layer is stored while the last block attends: all queries that an
        index learns from are known by then.
        """
        batch = block.batch
        q = self.ops.apply_rope(q, block.positions, self.store.rotary)
        if index_queries is not None:
            rotated = self.ops.apply_rope(index_queries.queries, block.positions, self.store.rotary)
            index_queries = index_queries._replace(queries=rotated)
        if batch.attended != layer:  # false for later layers that reuse this layer's keys: its queries are kept already
            batch.keep_queries(layer, block, q)
            if block.stop == batch.num_tokens:
                batch.attended = layer
                if self.side is not None:
                    self._start_storing(layer, batch, self.side)
        together = batch.attending_together(block, self._shared)
        parts = [
            (rows, self._attend_row_ranges(layer, q[rows], batch, row_ranges, sinks))
            if index_queries is None
            else (rows, self._attend_indexed(layer, q[rows], _rows(index_queries, rows), batch, row_ranges[0]))
            for row_ranges, rows in zip(together, block.rows_of(together), strict=True)
        ]
        if len(parts) == 1 and len(parts[0][1]) == len(q):
            return lambda: parts[0][1]
        out = torch.empty_like(q)
        for rows, attended in parts:
            out[rows] = attended
        return lambda: out

    def finish_layer(self, layer: int, batch: GroupPrefill) -> None:
        """Stores the new tokens of a layer that are not stored yet. Layers that are stored together are stored when the
        last of them is finished. Their scratch memory can be reused afterwards."""
        layers = batch.stored_after(layer)
        if layers is None:
            return
        if batch.storing != layer:
            self._store(layers, batch, cached=False)
        self._store(layers, batch, cached=True)
        self.join()

    def join(self) -> None:
        """Makes later work on the current stream wait until no tokens are being stored on the other stream any more."""
        if self.side is not None:
            torch.cuda.current_stream(self.store.compute).wait_stream(self.side)

    def end(self, batch: GroupPrefill) -> None:
        """Makes the new tokens part of their sequences."""
        for new in batch.new:
            plan = batch.plan_of(new)
            if plan.observed is not None:
                new.sequence.observed = not plan.compressed
            self.storing.commit(new.sequence, plan)

    # -- storing ---------------------------------------------------------------------------------------------------

    def _start_storing(self, layer: int, batch: GroupPrefill, side: torch.cuda.Stream) -> None:
        """Stores the tokens of new sequences on another stream, if ``layer`` is the last of the layers that are stored
        together. Attention reads these tokens from the batch.

        New tokens of cached sequences are stored later, because they would overwrite exact tokens to which the block
        still attends.
        """
        layers = batch.stored_after(layer)
        if layers is None:
            return
        batch.to_store(cached=False)  # computed on the current stream, because both streams read the result
        side.wait_stream(torch.cuda.current_stream(self.store.compute))
        with torch.cuda.stream(side):
            self._store(layers, batch, cached=False)
        batch.storing = layer

    def _store(self, layers: slice, batch: GroupPrefill, cached: bool) -> None:
        """Stores layers of the sequences with cached tokens (``cached``), or of the new sequences."""
        count, to_store = layers.stop - layers.start, batch.to_store(cached)
        exact_tokens = batch.exact[: len(self.store.exact)]
        for group in to_store.observed:
            self.storing.observe(layers, group.states, batch.queries[:count][:, group.rows], group.first)
        for rows, exact in to_store.exact:
            self.store.write_tokens(layers, exact, *(x[:count, rows] for x in exact_tokens))
        for rows, plan in to_store.compressed:
            self.storing.store_tokens(layers, [plan], [tuple(x[:count, rows] for x in (batch.keys, *exact_tokens))])

    # -- attending -------------------------------------------------------------------------------------------------

    def _shared(self, batch: GroupPrefill, row_range: RowRange) -> tuple[object, ...] | None:
        """Returns an identifier of the cached segments of a row range that attends exactly. Neighbouring row ranges
        with equal identifiers attend to the segments in one call. None if the row range attends alone."""
        new = row_range.alone
        indexed = self.layout.indexer is not None
        if new is None or not new.cached or indexed or not self._is_exact(new, row_range.stop):
            return None
        return tuple(segment.ids for segment in batch.plan_of(new).cached) or None

    def _attend_causally(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attends causally to k, v [m, H, d], with queries [n, H_q, d] of the last n of the m positions."""
        if sinks is None:
            return self.ops.dense_attention(q, k, v)
        return self.ops.add_sinks(*self.ops.dense_attention(q, k, v, return_lse=True), sinks)[0]

    def _attend_packed(
        self, layer: int, q: Tensor, batch: GroupPrefill, row_range: RowRange, sinks: Tensor | None
    ) -> Tensor:
        """Attention of whole new sequences, or only of the last token of each."""
        rows = slice(row_range.start, row_range.stop)
        keys, values = (x[batch.scratch_index(layer), rows] for x in (batch.rope_keys, batch.values))
        assert row_range.cu_seqlens is not None, "these are rows of one sequence"
        pack, window = Packed(row_range.cu_seqlens, row_range.lengths), self.layout.window
        if len(q) != len(keys):
            each = torch.arange(row_range.num_sequences + 1, dtype=torch.int32, device=q.device)
            pack = Packed(each, (1,) * row_range.num_sequences, row_range.cu_seqlens)
        if window is not None and max(row_range.lengths) <= window:
            window = None
        return self.ops.dense_attention(q, keys, values, pack, window=window, sinks=sinks)

    def _attend_row_ranges(
        self, layer: int, q: Tensor, batch: GroupPrefill, row_ranges: tuple[RowRange, ...], sinks: Tensor | None
    ) -> Tensor:
        if row_ranges[0].alone is None:
            return self._attend_packed(layer, q, batch, row_ranges[0], sinks)
        if self.layout.window is not None:
            (row_range,) = row_ranges
            return self._attend_window(layer, q, batch, row_range, self.layout.window, sinks)
        if len(row_ranges) > 1:
            return self._attend_cached(layer, q, batch, row_ranges, sinks)
        (row_range,) = row_ranges
        new = cast(NewTokens, row_range.alone)
        exact = self._is_exact(new, row_range.stop)
        if new.cached and exact:
            return self._attend_cached(layer, q, batch, row_ranges, sinks)
        cached = batch.plan_of(new).cached if new.cached else ()
        compressed = sum(PAGE * segment.row.pages.shape[1] for segment in cached)
        k, v = self._behind_exact_tail(layer, batch, new, row_range.stop, compressed)
        if exact:
            return self._attend_causally(q, k, v, sinks)
        self._rebuild(layer, cached, k[:compressed], v[:compressed])
        return self.strategy.attend(self.ops, self.layout.layers[layer], q, k, v, new.stop - row_range.stop, sinks)

    def _attend_indexed(
        self, layer: int, q: Tensor, index_queries: IndexQueries, batch: GroupPrefill, row_range: RowRange
    ) -> Tensor:
        """Attention of a row range to the blocks that index queries [n, H, d] after RoPE select."""
        assert self.layout.indexer is not None and batch.index_keys is not None and self.store.index_keys is not None
        new, index, indexer = row_range.alone, batch.scratch_index(layer), self.layout.indexer
        if new is None:
            if max(row_range.lengths) <= indexer.budget:
                return self._attend_packed(layer, q, batch, row_range, None)
            of_range = (x[index, row_range.start : row_range.stop] for x in batch.exact)
            each = zip(*(x.split(row_range.lengths) for x in (q, index_queries.queries, *of_range)), strict=True)
            return torch.cat(
                [
                    attend_selected_blocks(self.store, own, index_queries._replace(queries=queries), *tokens)
                    for own, queries, *tokens in each
                ]
            )
        cached = batch.plan_of(new).cached if new.cached else ()
        compressed = sum(PAGE * segment.row.pages.shape[1] for segment in cached)
        k, v = self._behind_exact_tail(layer, batch, new, row_range.stop, compressed)
        if len(k) <= indexer.budget and not cached:
            return self._attend_causally(q, k, v, None)
        self._rebuild(layer, cached, k[:compressed], v[:compressed])
        index_keys = [self.store.page[INDEX_KEYS][layer][segment.row.pages].flatten(0, -2) for segment in cached]
        if new.cached:
            tail = batch.plan_of(new).tail
            index_keys.append(self.store.index_keys[layer][tail.pages, 0, tail.offsets])
        index_keys.append(batch.index_keys[index, new.start : row_range.stop, 0])
        return attend_selected_blocks(self.store, q, index_queries, k, v, torch.cat(index_keys).unsqueeze(1))

    def _attend_window(
        self, layer: int, q: Tensor, batch: GroupPrefill, row_range: RowRange, window: int, sinks: Tensor | None
    ) -> Tensor:
        """Attention of a row range of one sequence, within the window."""
        new = cast(NewTokens, row_range.alone)
        before = row_range.start - new.start  # number of the sequence's new tokens before the row range
        if before >= window or not new.cached:
            rows = slice(max(new.start, row_range.start - window), row_range.stop)
            k, v = (x[batch.scratch_index(layer), rows] for x in (batch.rope_keys, batch.values))
        else:
            k, v = self._behind_exact_tail(layer, batch, new, row_range.stop)
        seen = len(q) + window
        if len(k) <= window:
            return self._attend_causally(q, k, v, sinks)
        return self.ops.dense_attention(q, k[-seen:], v[-seen:], window=window, sinks=sinks)

    def _attend_cached(
        self, layer: int, q: Tensor, batch: GroupPrefill, row_ranges: tuple[RowRange, ...], sinks: Tensor | None
    ) -> Tensor:
        """Attention of row ranges whose sequences share their cached segments. Each row range attends to its own exact
        tokens and to the softmax position of ``sinks``. All of them together attend to the segments, which are rebuilt
        once."""
        cached = batch.plan_of(cast(NewTokens, row_ranges[0].alone)).cached
        own = []
        for row_range, queries in zip(row_ranges, q.split([one.stop - one.start for one in row_ranges]), strict=True):
            k, v = self._behind_exact_tail(layer, batch, cast(NewTokens, row_range.alone), row_range.stop)
            if not cached:
                return self._attend_causally(queries, k, v, sinks)
            own.append(self.ops.dense_attention(queries, k, v, return_lse=True))
        if sinks is not None:
            own = [self.ops.add_sinks(*part, sinks) for part in own]
        outs, sums = zip(*own, strict=True)
        merged = own[0] if len(own) == 1 else (torch.cat(outs), torch.cat(sums))
        for segment in cached:
            for k, v in self.storing.rebuilt.spans(layer, segment):
                part = self.ops.dense_attention(q, k.transpose(0, 1), v.transpose(0, 1), causal=False, return_lse=True)
                merged = self.ops.merge_attention([merged, part]), torch.logaddexp(merged[1], part[1])
        return merged[0]

    def _behind_exact_tail(
        self, layer: int, batch: GroupPrefill, new: NewTokens, stop: int, room: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [room + n, H, d] of a sequence: ``room`` unwritten rows, its exact tail, and its new tokens
        up to the batch's row ``stop``. A sequence without cached tokens has no compressed tokens either, so its
        ``room`` is 0."""
        keys, values = (x[batch.scratch_index(layer), new.start : stop] for x in (batch.rope_keys, batch.values))
        if not new.cached:
            return keys, values
        if new.sequence.pending_layers is not None:
            new.sequence.pending_layers.wait(self.layout.layers[layer])
        tail = batch.plan_of(new).tail
        k, v = (
            self._behind_tail(pages[layer], tail, rows, room)
            for pages, rows in ((self.store.k, keys), (self.store.v, values))
        )
        return k, v

    def _is_exact(self, new: NewTokens, stop: int) -> bool:
        """Whether a block of a sequence's queries, up to the batch's row ``stop``, attends exactly."""
        return not self.strategy.pays(new.stop - new.start, new.cached + stop - new.start)

    def _rebuild(self, layer: int, cached: tuple[CachedSegment, ...], k: Tensor, v: Tensor) -> None:
        """Rebuilds all compressed tokens of segments into keys and values [n, H, d]."""
        start = 0
        for segment in cached:
            for keys, values in self.storing.rebuilt.spans(layer, segment):
                stop = start + keys.shape[1]
                k[start:stop], v[start:stop] = keys.transpose(0, 1), values.transpose(0, 1)
                start = stop

    def _behind_tail(self, pages: Tensor, tail: ExactRows, new: Tensor, room: int) -> Tensor:
        """Joins ``room`` unwritten rows, the exact tail [t, H, d] in ``pages``, and new tokens [n, H, d]."""
        page_ids = tail.pages[None, ::PAGE]  # the tail begins at a page boundary
        whole_pages, count = page_ids.shape[1] * PAGE, len(tail.pages)
        joined = new.new_empty(room + whole_pages + len(new), *new.shape[1:])
        exact = joined[room:]
        self.ops.rebuild_rows(DenseRows(pages.unsqueeze(2), page_ids), 0, exact[:whole_pages].transpose(0, 1), False)
        exact[count : count + len(new)] = new
        return joined[: room + count + len(new)]


def _rows(index_queries: IndexQueries, rows: slice | Tensor) -> IndexQueries:
    return index_queries._replace(queries=index_queries.queries[rows])
