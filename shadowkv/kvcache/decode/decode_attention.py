"""``Decode``: attention of a decode step, over [sink | outliers | selected | tail]. ``LayerGroup`` calls it.

Each segment of a sequence is searched and attended to separately, with its own state and its share of the budget. The
results and the attention to exact tokens are merged by log-sum-exp.

Shapes: B rows of a step, R segments, E exact pages of a row, H kv heads, H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.kvcache.compression.pages import Compression
from shadowkv.kvcache.decode.decode_batch import DecodeBatch, GroupPlan, batch_of
from shadowkv.kvcache.decode.fetching import Fetching
from shadowkv.kvcache.decode.native import NativeSelected, NativeSelection
from shadowkv.kvcache.decode.pooled import PooledSelection, attend_tokens
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.memory.streams import SideStream, upload
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.sequences.store import GroupStore
from shadowkv.ops.apply_rope.tables import RotaryTables

SelectionHook = Callable[[int, Tensor, CompressedBatch, Selection], Selection]
"""A function that is called with the layer's number in the model, RoPE-rotated queries [R, H_q, d], the batch and the
index's selection. Returns the selection to attend to."""


QueryHook = Callable[[int, Tensor, DecodeBatch], None]
"""A function that is called with the layer's number in the model, RoPE-rotated queries [B, H_q, d] and the batch."""


@dataclass(frozen=True)
class ExactLayers:
    """Exact pages of all layers with attention, and states of the others, for fused decode steps.

    Attributes:
        k, v: [L, pages, H, 64, d].
        attend_beside: ``Decode.attend_beside``, the attention to compressed tokens.
        states: arrays of recurrent states by name, [layers, rows, *shape]; empty if there are none.
    """

    k: Tensor
    v: Tensor
    rotary: RotaryTables
    attend_beside: Callable[[int, Tensor, Tensor, Tensor, DecodeBatch], Tensor]
    states: Mapping[str, Tensor]


class Decode:
    """Attention of decode steps in a group of layers. Layers are numbered within the group.

    Attributes:
        hook: hook for selections. Set it before steps are captured in graphs.
        query_hook: hook for queries. Set it before steps are captured in graphs.
    """

    def __init__(self, store: GroupStore, compression: Compression) -> None:
        self.store, self.compression = store, compression
        self.parts, self.ops, self.spec = store.layout.parts, store.ops, store.layout.spec
        self.side_stream = SideStream(store.compute, captured=True)
        self.fetching = Fetching(store, self.side_stream) if store.buffer is not None else None
        self.native = _native(store)
        self._appended: tuple[Tensor, Tensor] | None = None
        self.hook: SelectionHook | None = None
        self.query_hook: QueryHook | None = None

    def batch(self, plan: GroupPlan, numbers: Tensor | None = None) -> DecodeBatch:
        """Makes the batch of a planned step.

        Args:
            numbers: the plan's packed numbers on the device, for a captured graph. Only the plan's shapes are then
                used, so the graph serves other plans of the same shapes. None uploads the numbers.
        """
        if numbers is None:
            numbers = upload(torch.from_numpy(plan.packed()), self.store.compute)
        return batch_of(plan, numbers, self.parts.index, self.compression.tables, self.store.layout.window)

    def append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch, index_keys: Tensor | None = None) -> None:
        """Stores keys (before RoPE) and values [B, H, d] of the new tokens, and, in layers with an indexer, index keys
        [B, 1, d]."""
        if index_keys is not None:
            where = batch.positions, batch.write_page, batch.write_offset
            self.store.append_index_keys(layer, index_keys, *where)
        if batch.compressed is None or self.fetching is not None:
            self._append(layer, k, v, batch)
        else:  # on the stream of exact attention, which reads the new tokens
            # The tensors are kept until the current stream has waited for that stream. Otherwise the allocator could
            # reuse their memory for queries.
            self._appended = k, v
            self.side_stream.start(lambda: self._append(layer, k, v, batch))

    def apply_rope(self, q: Tensor, batch: DecodeBatch) -> Tensor:
        """Applies RoPE to queries [B, H_q, d]."""
        return self.ops.apply_rope(q, batch.positions, self.store.rotary)

    def start(
        self,
        layer: int,
        q: Tensor,
        batch: DecodeBatch,
        sinks: Tensor | None = None,
        index_queries: IndexQueries | None = None,
    ) -> Callable[[], Tensor]:
        """Starts attention of queries [B, H_q, d] before RoPE. The returned function finishes the attention and returns
        [B, H_q, d]. ``sinks``, float32 [H_q], are as in ``KVCache.start``. They are added only to the attention to
        exact tokens, so that the merge counts them once. If there is an indexer, ``index_queries`` [B, H, d] select
        what is attended to. If all sequences of the batch are dense, all tokens are attended to."""
        q = self.apply_rope(q, batch)
        if self.query_hook is not None:
            self.query_hook(self.store.layout.layers[layer], q, batch)
        native = None
        if self.native is not None and batch.compressed is not None:
            assert index_queries is not None, "layers with an indexer have index queries"
            index_queries = index_queries._replace(queries=self.apply_rope(index_queries.queries, batch))
            native = self.native.select(layer, index_queries, batch, batch.compressed)
        if batch.compressed is not None and self.fetching is not None:
            return self._start_fetched(layer, q, batch, batch.compressed, self.fetching, sinks, native)
        out = self._attend(layer, q, batch, sinks, native)
        return lambda: out

    def _select(self, layer: int, q: Tensor, batch: CompressedBatch, native: Selection | None = None) -> Selection:
        """Selects chunks. ``native`` is what the model's indexer has selected, if there is one."""
        selected = self.parts.index.select(self.store, layer, q, batch) if native is None else native
        return selected if self.hook is None else self.hook(self.store.layout.layers[layer], q, batch, selected)

    def _attend(
        self, layer: int, q: Tensor, batch: DecodeBatch, sinks: Tensor | None, native: NativeSelected | None
    ) -> Tensor:
        selected, counts = (None, None) if native is None else native
        if batch.compressed is None:
            return self._attend_exact(layer, q, batch, sinks, counts)[0]
        # Exact attention is little work; it runs while chunks are searched.
        exact = self.side_stream.start(lambda: self._attend_exact(layer, q, batch, sinks, counts))
        compressed = self._attend_compressed(layer, batch.of_compressed(q), batch.compressed, selected)
        merged = self._merge(exact(), compressed, batch)
        self._appended = None
        return merged

    def attend_beside(self, layer: int, q: Tensor, out: Tensor, lse: Tensor, batch: DecodeBatch) -> Tensor:
        """Attends to compressed tokens with queries [B, H_q, d] after RoPE, and merges the result with the attention to
        exact tokens. Returns [B, H_q, d].

        Args:
            out: [B, H_q, d], attention to exact tokens.
            lse: [B, H_q], log-sum-exps of ``out``.
            batch: has compressed pages, and no values to fetch.
        """
        assert batch.compressed is not None, "nothing is compressed"
        return self._merge((out, lse), self._attend_compressed(layer, batch.of_compressed(q), batch.compressed), batch)

    def _append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch) -> None:
        pages = self.store.k[layer], self.store.v[layer]
        self.ops.append_tokens(k, v, batch.positions, self.store.rotary, *pages, batch.write_page, batch.write_offset)

    def _attend_exact(
        self, layer: int, q: Tensor, batch: DecodeBatch, sinks: Tensor | None, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attends to exact pages. ``counts`` is what an indexer selects: int64 [B, H, E], the number of tokens of each
        page for each kv head; with a pooled indexer bool [B, E * 64], True for selected tokens. None attends to all
        tokens."""
        pages = self.store.k[layer], self.store.v[layer], batch.pages
        if counts is not None and self.store.layout.indexer is not None and self.store.layout.indexer.pooled:
            out, lse = attend_tokens(q, *pages, counts)
        elif counts is not None:
            out, lse = self._attend_heads(q, *pages, counts)
        elif batch.starts is None:
            out, lse = self.ops.paged_attention(q, *pages, batch.counts, batch.rows)
        else:
            out, lse = self.ops.paged_window_attention(q, *pages, batch.starts, batch.counts)
        if sinks is not None:
            out, lse = self.ops.add_sinks(out, lse, sinks)
        return out, lse

    def _attend_heads(self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Attends to exact pages, kv head by kv head, because ``counts`` [B, H, E] differ between kv heads."""
        parts = [
            self.ops.paged_attention(of_head, k[:, head : head + 1], v[:, head : head + 1], pages, counts[:, head])
            for head, of_head in enumerate(q.chunk(k.shape[1], dim=1))
        ]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)

    def _attend_compressed(
        self, layer: int, q: Tensor, batch: CompressedBatch, native: Selection | None = None
    ) -> tuple[Tensor, Tensor]:
        keys = self.parts.keys.source(self.store, layer, batch)
        values = self.parts.values.source(self.store, layer, batch)
        if batch.span is not None:
            out, lse = self.ops.attend_coded(q, keys, values, *batch.span, batch.of_segments)
            return out, lse
        selected = self._select(layer, q, batch, native)
        most = batch.most if self.hook is None else None  # a hook may return more chunks
        out, lse = self.ops.attend_selected(q, keys, values, selected.chunks, selected.log_weight, most)
        return out, lse

    def _merge(self, exact: tuple[Tensor, Tensor], compressed: tuple[Tensor, Tensor], batch: DecodeBatch) -> Tensor:
        """Merges attention to exact tokens [B, H_q, d] with attention to each segment's compressed tokens
        [R, H_q, d]."""
        merge = self.ops.merge_attention
        if batch.of_sequence is None:
            merged: Tensor = merge([(batch.of_compressed(exact[0]), batch.of_compressed(exact[1])), compressed])
            return merged if batch.sequence is None else exact[0].index_copy(0, batch.sequence, merged)
        out, lse = exact
        # Sequences with fewer segments than others refer to one more row, which has no tokens.
        outs = torch.cat((compressed[0], torch.zeros_like(compressed[0][:1])))
        sums = torch.cat((compressed[1], torch.full_like(compressed[1][:1], float("-inf"))))
        for rows in batch.of_sequence.unbind(1):
            out, lse = merge([(out, lse), (outs[rows], sums[rows])]), torch.logaddexp(lse, sums[rows])
        return out

    def _start_fetched(
        self,
        layer: int,
        q: Tensor,
        batch: DecodeBatch,
        compressed: CompressedBatch,
        fetching: Fetching,
        sinks: Tensor | None,
        native: NativeSelected | None,
    ) -> Callable[[], Tensor]:
        """Starts attention with values on the host, in portions of rows. The values of one portion cross the bus while
        another is scored or attended to."""
        queries, started = batch.of_compressed(q), []
        selection, counts = (None, None) if native is None else native
        for rows in fetching.portions(compressed):
            portion = compressed.part(rows)
            of_rows = None if selection is None else Selection(selection.chunks[rows])
            selected = self._select(layer, queries[rows], portion, of_rows).chunks
            fetch = fetching.start(layer, selected, portion, self.parts.values.source(self.store, layer, portion))
            started.append((rows, portion, selected, fetch))
        exact = self._attend_exact(layer, q, batch, sinks, counts)  # runs while values cross the bus

        def finish() -> Tensor:
            parts = []
            for rows, portion, selected, fetch in started:
                keys = self.parts.keys.source(self.store, layer, portion)
                parts.append(self.ops.attend_selected(queries[rows], keys, fetch.wait(), selected))
            outs, sums = zip(*parts, strict=True)
            return self._merge(exact, (torch.cat(outs), torch.cat(sums)) if len(outs) > 1 else parts[0], batch)

        return finish


def _native(store: GroupStore) -> NativeSelection | PooledSelection | None:
    """Returns the object that selects blocks in decode steps of layers with an indexer; None for other layers."""
    if store.index_keys is None or store.layout.indexer is None:
        return None
    return NativeSelection(store) if store.layout.indexer.pooled is None else PooledSelection(store)
