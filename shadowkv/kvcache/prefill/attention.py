"""Prefill of new tokens into empty or cached sequences: attention, exact or sparse, and storing, layer by layer.

A new sequence's tokens are stored while the last of them attend in the same layer, where a device can do both at once;
those of short prompts several layers at a time.
New tokens of a cached sequence attend to exact tokens, rebuilt keys and fetched values before them: to all of them,
block by block with merged softmax, or sparsely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import STATES_AT_ONCE, TOKENS_AT_ONCE
from shadowkv.kvcache.parts import Parts
from shadowkv.kvcache.parts.base import FittedTokens, SealedTokens
from shadowkv.kvcache.policy.growth import fitted_with_earlier
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.batch import (
    CachedSegment,
    ExactRows,
    NewTokens,
    Places,
    PrefillBatch,
    PrefillBlock,
    Run,
    ToStore,
)
from shadowkv.kvcache.prefill.sparse import SparsePrefill
from shadowkv.kvcache.sealing.pages import Sealing
from shadowkv.kvcache.sealing.plans import Placing, to_store
from shadowkv.kvcache.sealing.rebuilt import CachedTokens
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import Store
from shadowkv.ops.attend_selected.sources import DenseRows


class Prefill:
    """The prefill half of the cache."""

    def __init__(self, store: Store, parts: Parts, pool: SequencePool, sealing: Sealing) -> None:
        self.store, self.parts, self.pool, self.sealing = store, parts, pool, sealing
        self.tables, self.layout, self.ops = pool.tables, store.layout, store.ops
        self.spec, self.shape = store.layout.spec, store.layout.shape
        # High priority: kernels of few thread blocks find room between the blocks of kernels that take all.
        self.side = torch.cuda.Stream(store.compute, priority=-1) if store.compute.type == "cuda" else None
        sparse = self.spec.prefill == "sparse"
        self.sparse = SparsePrefill(self.ops, store.compute, self.spec.prefill_error) if sparse else None
        self.cached, self._places = CachedTokens(store, parts), Placing(pool).find

    def batch(self, sequences: list[tuple[CachedSequence, int]]) -> PrefillBatch:
        """Packs the new tokens of pairs of an admitted sequence and how many tokens it gains."""
        new, start = [], 0
        for sequence, count in sequences:
            new.append(NewTokens(sequence, start, start + count, sequence.length))
            start += count
        return PrefillBatch(new, self.store.compute, self.shape, self.store.k.dtype, self.layout.runs)

    def append(self, layer: int, k: Tensor, v: Tensor, block: PrefillBlock) -> None:
        """Takes keys (before RoPE) and values [n, H, d] of a block of tokens."""
        batch, rows = block.batch, slice(block.start, block.stop)
        place = batch.place(layer)
        kept = (x[place, rows] for x in (batch.keys, batch.rope_keys, batch.values))
        self.ops.append_block(k, v, batch.positions[rows], self.store.rotary, *kept)

    def attend(self, layer: int, q: Tensor, block: PrefillBlock) -> Tensor:
        """Attention [n, H_q, d] of a block of tokens, once every block of the layer has been appended; the
        last block comes last.

        Its attention runs while the layer is stored: by then all queries that an index learns from are
        known.
        """
        batch = block.batch
        q = self.ops.apply_rope(q, batch.positions[block.start : block.stop], self.store.rotary)
        batch.keep_queries(layer, block, q)
        if self.side is not None and block.stop == batch.num_tokens:
            self._start_storing(layer, batch, self.side)
        out = [
            self._attend_runs(layer, q[runs[0].start - block.start : runs[-1].stop - block.start], batch, runs)
            for runs in batch.alike(block, self._shared)
        ]
        return out[0] if len(out) == 1 else torch.cat(out)

    def finish_layer(self, layer: int, batch: PrefillBatch) -> None:
        """Stores what is not stored yet of the new tokens of a layer, or of several together once the last of them has
        been computed; their memory can be reused afterwards."""
        layers = batch.stored_after(layer)
        if layers is None:
            return
        if batch.storing != layer:
            self._store(layers, batch, cached=False)
        self._store(layers, batch, cached=True)
        self.join()

    def join(self) -> None:
        """Makes subsequent launches wait for what is being stored."""
        if self.side is not None:
            torch.cuda.current_stream(self.store.compute).wait_stream(self.side)

    def end(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        for segment in batch.new:
            places = batch.places_of(segment, self._places)
            if places.observed is not None:
                segment.sequence.observed = not places.sealed
            self._commit(segment.sequence, places)

    def seal_tails(self, sequences: list[CachedSequence]) -> None:
        """Turns the tails of sequences that have outgrown their last states, if they have one, into segments with
        states of their own: those that are alike together."""
        alike: dict[tuple[int, ...], list[tuple[CachedSequence, Places]]] = {}
        found = self._places([(sequence, 0) for sequence in sequences])
        for sequence, places in zip(sequences, found, strict=True):
            key = len(places.tail.pages), places.sealed, places.fits, places.before
            alike.setdefault(key, []).append((sequence, places))
        for (tail, *_), same in alike.items():
            most = max(1, min(STATES_AT_ONCE, TOKENS_AT_ONCE // tail))
            for start in range(0, len(same), most):
                self._seal_tails(same[start : start + most], tail)

    def _seal_tails(self, tails: list[tuple[CachedSequence, Places]], length: int) -> None:
        shape = self.shape
        step = max(1, min(STATES_AT_ONCE, TOKENS_AT_ONCE // length) // len(tails))
        for layers in self.layout.alike(step):
            count = layers.stop - layers.start
            none = self.store.k[layers].new_empty(count, 0, shape.num_kv_heads, shape.head_dim)
            learning = [one.observed for sequence, one in tails if one.observed is not None and not sequence.observed]
            if learning:  # their queries are gone
                gone = none.new_empty(count, len(learning), 0, shape.num_query_heads, shape.head_dim)
                states = torch.cat(learning)
                self._observe(layers, states, gone, torch.zeros_like(states))
            self._write(layers, [places for _, places in tails], [(none, none, none)] * len(tails))
        for sequence, places in tails:
            sequence.observed = False
            self._commit(sequence, places)

    # -- storing ---------------------------------------------------------------------------------------------------

    def _start_storing(self, layer: int, batch: PrefillBatch, side: torch.cuda.Stream) -> None:
        """Stores the tokens of new sequences on another stream, if it is time: attention reads them from the batch.

        Not those of others: what these have cached would be overwritten while their new tokens still read it.
        """
        layers = batch.stored_after(layer)
        if layers is None:
            return
        self._to_store(batch, cached=False)  # on this stream, as others read it
        side.wait_stream(torch.cuda.current_stream(self.store.compute))
        with torch.cuda.stream(side):
            self._store(layers, batch, cached=False)
        batch.storing = layer

    def _store(self, layers: slice, batch: PrefillBatch, cached: bool) -> None:
        """Stores layers of the sequences that have something cached, or of the new ones."""
        count, what = layers.stop - layers.start, self._to_store(batch, cached)
        for some in what.observed:
            self._observe(layers, some.states, batch.queries[:count][:, some.rows], some.first)
        for rows, exact in what.exact:
            self._write_exact(layers, exact, batch.rope_keys[:count, rows], batch.values[:count, rows])
        for rows, places in what.sealed:
            keys, rope_keys, values = (x[:count, rows] for x in (batch.keys, batch.rope_keys, batch.values))
            self._write(layers, [places], [(keys, rope_keys, values)])

    def _to_store(self, batch: PrefillBatch, cached: bool) -> ToStore:
        return batch.to_store(
            cached, lambda some: to_store(batch, [(x, batch.places_of(x, self._places)) for x in some])
        )

    def _observe(self, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        """Lets the parts learn from the last queries [L, n, w, H_q, d] of new tokens."""
        if self.layout.skips(layers.start):
            return
        for part in self.parts:
            part.observe(self.store, layers, states, queries, first)

    def _write(self, layers: slice, all_places: list[Places], new: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Stores, in some layers, tokens of sequences that are sealed alike, equally many of each: those that were
        exact and the new ones, as keys, RoPE-rotated keys and values [L, n, H, d]."""
        places = all_places[0]
        joined = [self._behind_exact(layers, one, *tokens) for one, tokens in zip(all_places, new, strict=True)]
        keys, rope_keys, values = (_stacked(x) for x in zip(*joined, strict=True))  # [L, n, S, H, d]
        count = places.sealed
        if self.layout.skips(layers.start):
            pages = torch.cat([one.pages for one in all_places])
            self.store.write_exact(layers, pages, _in_pages(rope_keys, count), _in_pages(values, count))
        else:
            self._seal(layers, all_places, keys, rope_keys, values)
        for i, one in enumerate(all_places):
            self._write_exact(layers, one.exact, rope_keys[:, i, count:], values[:, i, count:])

    def _seal(self, layers: slice, all_places: list[Places], keys: Tensor, rope_keys: Tensor, values: Tensor) -> None:
        """Seals the first of tokens [L, n, S, H, d], with states that are fitted first where they are new."""
        places = all_places[0]
        states, count, excluded = torch.cat([one.state for one in all_places]), places.sealed, None
        if places.fits:
            seen = keys
            few = fitted_with_earlier(places.before, places.before + keys.shape[2])
            if few and self.parts.keys.fits_on_earlier:
                earlier = [self._earlier(layers, one) for one in all_places]
                seen = torch.cat((_stacked(earlier), keys), dim=2)
            starts = torch.cat([one.page_starts[:1] for one in all_places])
            for part in self.parts:
                part.fit(self.store, layers, states, FittedTokens(seen, rope_keys, values, starts))
            excluded = torch.cat(
                [
                    self._write_static(layers, one, rope_keys[:, i, :count], values[:, i, :count])
                    for i, one in enumerate(all_places)
                ],
                dim=1,
            )
        if len(all_places) > 1:
            states = states.repeat_interleave(count // PAGE)
        tokens = (_in_pages(x, count) for x in (keys, rope_keys, values))
        names = ("page_starts", "pages", "value_pages")
        where = (torch.cat([getattr(one, name) for one in all_places]) for name in names)
        self.sealing.write(SealedTokens(layers, states, *where, *tokens), excluded)

    def _behind_exact(
        self, layers: slice, places: Places, keys: Tensor, rope_keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The exact tail of a sequence followed by its new tokens [L, n, H, d]."""
        count = len(places.tail.pages)
        if not count:
            return keys, rope_keys, values
        tail, tail_values = self.store.read_exact(layers, places.tail)
        positions = torch.arange(places.before, places.before + count, device=tail.device).expand(len(tail), -1)
        before = self.ops.apply_rope(tail, positions, self.store.rotary, inverse=True)
        pairs = ((before, keys), (tail, rope_keys), (tail_values, values))
        first, second, third = (torch.cat(pair, dim=1) for pair in pairs)
        return first, second, third

    def _earlier(self, layers: slice, places: Places) -> Tensor:
        """Keys before RoPE [L, n, H, d] of all that a sequence has sealed, rebuilt: new tokens that are too few
        for a subspace of their own share one with those."""
        rebuilt = []
        for layer in range(layers.start, layers.stop):
            for one in places.cached:
                start = int(one.row.first)
                for block, _ in self.cached.spans(layer, one):
                    positions = torch.arange(start, start + block.shape[1], device=block.device)
                    rows = block.transpose(0, 1).contiguous()
                    rebuilt.append(self.ops.apply_rope(rows, positions, self.store.rotary, inverse=True))
                    start += block.shape[1]
        return torch.cat(rebuilt).unflatten(0, (layers.stop - layers.start, -1))

    def _write_static(self, layers: slice, places: Places, rope_keys: Tensor, values: Tensor) -> Tensor:
        """Makes the sink, if it is here, and the outliers of tokens [L, n, H, d] exact; returns their bits, bool
        [L, pages, H, C]."""
        chunk, heads, spec = self.spec.chunk, self.shape.num_kv_heads, self.spec
        count, device = 0 if places.before else spec.sink_chunks, rope_keys.device
        sink = torch.arange(count, device=device).expand(len(rope_keys), heads, -1)
        outliers = torch.stack([self.ops.find_outliers(one, chunk, spec.outliers, count) for one in rope_keys])
        chosen = torch.cat((sink, outliers), dim=2)  # [L, H, chunks]
        tokens = (chosen.unsqueeze(-1) * chunk + torch.arange(chunk, device=device)).flatten(2)
        rows = tokens.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, rope_keys.shape[-1])
        self._write_exact(layers, places.static, rope_keys.gather(1, rows), values.gather(1, rows))
        bits = torch.zeros(len(rope_keys), heads, rope_keys.shape[1] // chunk, dtype=torch.bool, device=device)
        bits.scatter_(2, chosen, True)
        return bits.unflatten(2, (-1, PAGE // chunk)).transpose(1, 2)

    def _write_exact(self, layers: slice, rows: ExactRows, rope_keys: Tensor, values: Tensor) -> None:
        """Writes tokens [L, n, H, d] to exact pages."""
        for exact, tokens in ((self.store.k[layers], rope_keys), (self.store.v[layers], values)):
            # A GPU scatters elements one by one: with 8 bytes each, there are fewer.
            wide = exact.dtype if exact.shape[-1] * exact.itemsize % 8 else torch.int64
            exact.view(wide)[:, rows.pages, :, rows.offsets] = tokens.to(exact.dtype).transpose(0, 1).view(wide)

    def _commit(self, sequence: CachedSequence, places: Places) -> None:
        self.pool.arrived(sequence)
        self.tables.length[sequence.slot] = places.length
        if places.sealed:
            self.pool.seal(sequence, places.before + places.sealed)

    # -- attending -------------------------------------------------------------------------------------------------

    def _shared(self, batch: PrefillBatch, run: Run) -> tuple[object, ...] | None:
        """What neighbouring runs must have in common to attend together to what they have cached: the same pages, all
        of them attended to densely. None for a run that attends by itself."""
        segment = run.alone
        if segment is None or not segment.cached or self._sparse(segment, run.stop) is not None:
            return None
        cached = batch.places_of(segment, self._places).cached
        return tuple(one.names for one in cached) or None

    def _attend_runs(self, layer: int, q: Tensor, batch: PrefillBatch, runs: tuple[Run, ...]) -> Tensor:
        if len(runs) > 1:
            return self._attend_cached(layer, q, batch, runs)
        (run,) = runs
        segment, rows = run.alone, slice(run.start, run.stop)
        if segment is None:
            keys, values = (x[batch.place(layer), rows] for x in (batch.rope_keys, batch.values))
            return self.ops.ragged_attention(q, keys, values, run.cu_seqlens, run.longest)
        sparse = self._sparse(segment, run.stop)
        if segment.cached and sparse is None:
            return self._attend_cached(layer, q, batch, runs)
        cached = batch.places_of(segment, self._places).cached if segment.cached else ()
        sealed = sum(PAGE * one.row.pages.shape[1] for one in cached)
        k, v = self._behind_exact_tail(layer, batch, segment, run.stop, sealed)
        if sparse is None:
            return self.ops.causal_attention(q, k, v)
        self._rebuild(layer, cached, k[:sealed], v[:sealed])
        return sparse.attend(layer, q, k, v, segment.stop - run.stop)

    def _attend_cached(self, layer: int, q: Tensor, batch: PrefillBatch, runs: tuple[Run, ...]) -> Tensor:
        """Attention of runs whose sequences have the same segments cached: each to its own exact tokens, and all
        together to what is rebuilt for them once."""
        cached = batch.places_of(cast(NewTokens, runs[0].alone), self._places).cached
        own = []
        for run in runs:
            k, v = self._behind_exact_tail(layer, batch, cast(NewTokens, run.alone), run.stop)
            some = q[run.start - runs[0].start : run.stop - runs[0].start]
            if not cached:
                return self.ops.causal_attention(some, k, v)
            own.append(self.ops.block_attention(some, k.transpose(0, 1), v.transpose(0, 1), causal=True))
        merged = own[0] if len(own) == 1 else tuple(torch.cat(part) for part in zip(*own, strict=True))
        for one in cached:
            for k, v in self.cached.spans(layer, one):
                part = self.ops.block_attention(q, k, v)
                merged = self.ops.merge_attention([merged, part]), torch.logaddexp(merged[1], part[1])
        return merged[0]

    def _behind_exact_tail(
        self, layer: int, batch: PrefillBatch, segment: NewTokens, stop: int, room: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [room + n, H, d] of the exact tail of a segment's sequence, followed by those of its new
        tokens, up to the batch's row ``stop``; ``room`` rows before them, if it has cached any, are not written."""
        keys, values = (x[batch.place(layer), segment.start : stop] for x in (batch.rope_keys, batch.values))
        if not segment.cached:
            return keys, values
        if segment.sequence.arrival is not None:
            segment.sequence.arrival.wait(layer)
        tail = batch.places_of(segment, self._places).tail
        k, v = (
            self._behind_tail(pages[layer], tail, new, room)
            for pages, new in ((self.store.k, keys), (self.store.v, values))
        )
        return k, v

    def _sparse(self, segment: NewTokens, stop: int) -> SparsePrefill | None:
        """What a block of a segment's queries, up to the batch's row ``stop``, attends with; None for everything."""
        new, seen = segment.stop - segment.start, segment.cached + stop - segment.start
        return self.sparse if self.sparse is not None and self.sparse.pays(new, seen) else None

    def _rebuild(self, layer: int, cached: tuple[CachedSegment, ...], k: Tensor, v: Tensor) -> None:
        """Writes everything that segments have sealed to keys and values [n, H, d]."""
        start = 0
        for segment in cached:
            for keys, values in self.cached.spans(layer, segment):
                stop = start + keys.shape[1]
                k[start:stop], v[start:stop] = keys.transpose(0, 1), values.transpose(0, 1)
                start = stop

    def _behind_tail(self, pages: Tensor, tail: ExactRows, new: Tensor, room: int) -> Tensor:
        """The exact tail [t, H, d] in ``pages``, followed by new tokens [n, H, d], behind ``room`` rows for others."""
        names = tail.pages[None, ::PAGE]  # the tail begins at a page boundary
        whole, count = names.shape[1] * PAGE, len(tail.pages)
        joined = new.new_empty(room + whole + len(new), *new.shape[1:])
        exact = joined[room:]
        self.ops.rebuild_rows(DenseRows(pages.unsqueeze(2), names), 0, exact[:whole].transpose(0, 1), False)
        exact[count : count + len(new)] = new
        return joined[: room + count + len(new)]


def _stacked(tokens: Sequence[Tensor]) -> Tensor:
    """[L, n, S, H, d] from n tensors [L, S, H, d], not copied where there is only one."""
    return torch.stack(tuple(tokens), dim=1) if len(tokens) > 1 else tokens[0].unsqueeze(1)


def _in_pages(tokens: Tensor, count: int) -> Tensor:
    """The first ``count`` of tokens [L, n, S, H, d] as pages [L, n * count / 64, 64, H, d]."""
    return tokens[:, :, :count].unflatten(2, (-1, PAGE)).flatten(1, 2)
