"""``Storing``: stores tokens according to their storage plans. It fits the states of new segments and compresses full
pages.

Prefill uses it to store a prompt's tokens, and decode to store tails that have outgrown their last segment's state.

Shapes: L layers, n sequences or tokens, S tokens of a sequence, w queries, H kv heads, H_q query heads, d dimensions of
a head, C chunks per page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shadowkv.kvcache.compression.pages import Compression
from shadowkv.kvcache.compression.plans import StoragePlan, StoragePlanner
from shadowkv.kvcache.compression.rebuilt import RebuiltTokens
from shadowkv.kvcache.parts.base import STATES_AT_ONCE, TOKENS_AT_ONCE, CompressedTokens, FittedTokens
from shadowkv.kvcache.policy.growth import fitted_with_earlier
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import GroupStore


class Storing:
    """Stores tokens of a pool's sequences.

    Attributes:
        planner: makes the storage plans.
        rebuilt: rebuilds compressed tokens as plain keys and values.
    """

    def __init__(self, store: GroupStore, pool: SequencePool, compression: Compression) -> None:
        self.store, self.pool, self.compression = store, pool, compression
        self.layout, self.parts, self.ops = store.layout, store.layout.parts, store.ops
        self.spec, self.shape = store.layout.spec, store.layout.shape
        self.planner, self.rebuilt = StoragePlanner(pool), RebuiltTokens(store)

    def observe(self, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        """Passes the last queries [L, n, w, H_q, d] of new tokens to the parts (``StoredPart.observe``)."""
        for part in self.parts:
            part.observe(self.store, layers, states, queries, first)

    def store_tokens(self, layers: slice, plans: list[StoragePlan], new_tokens: list[tuple[Tensor, ...]]) -> None:
        """Stores tokens of several sequences in some layers. The sequences must compress equally many tokens.

        Args:
            new_tokens: for each sequence, the new tokens' keys, RoPE-rotated keys and values, each [L, n, H, d], and,
                in layers with an indexer, index keys [L, n, 1, d]. The sequence's exact tail is put before them.
        """
        count = plans[0].compressed
        joined = [self._behind_exact(layers, plan, *new) for plan, new in zip(plans, new_tokens, strict=True)]
        keys, *exact = (_stacked(x) for x in zip(*joined, strict=True))  # [L, n, S, H, d]
        self._compress(layers, plans, keys, *exact)
        for i, plan in enumerate(plans):
            self.store.write_tokens(layers, plan.exact, *(x[:, i, count:] for x in exact))

    def commit(self, sequence: CachedSequence, plan: StoragePlan) -> None:
        """Makes the new tokens part of their sequence, after all layers have stored them."""
        self.pool.await_layers(sequence)
        self.pool.tables.length[sequence.slot] = plan.length
        if plan.compressed:
            self.pool.compress(sequence, plan.before + plan.compressed)

    def compress_tails(self, sequences: list[CachedSequence]) -> None:
        """Turns exact tails into new segments with their own states. Tails of equal sizes are compressed together. If
        an error is raised, the tails that are not compressed yet stay as they were."""
        segments = [len(sequence.path) for sequence in sequences]
        try:
            self._compress_alike(sequences)
        except BaseException:
            for sequence, count in zip(sequences, segments, strict=True):
                if len(sequence.path) > count and not sequence.path[-1].pages:
                    self.pool.drop_segment(sequence)
            raise

    def _compress_alike(self, sequences: list[CachedSequence]) -> None:
        alike: dict[tuple[int, ...], list[tuple[CachedSequence, StoragePlan]]] = {}
        plans = self.planner.plan([(sequence, 0) for sequence in sequences])
        for sequence, plan in zip(sequences, plans, strict=True):
            key = len(plan.tail.pages), plan.compressed, plan.fits, plan.before
            alike.setdefault(key, []).append((sequence, plan))
        for (tail, *_), same in alike.items():
            together = max(1, min(STATES_AT_ONCE, TOKENS_AT_ONCE // tail))
            for start in range(0, len(same), together):
                self._compress_tails(same[start : start + together], tail)

    def _compress_tails(self, tails: list[tuple[CachedSequence, StoragePlan]], length: int) -> None:
        shape = self.shape
        step = max(1, min(STATES_AT_ONCE, TOKENS_AT_ONCE // length) // len(tails))
        for layers in self.layout.portions(step):
            count = layers.stop - layers.start
            none, *others = (x.new_empty(count, 0, x.shape[2], x.shape[4]) for x in self.store.exact)
            learning = [
                plan.observed for sequence, plan in tails if plan.observed is not None and not sequence.observed
            ]
            if learning:  # the queries of generated tokens are not kept
                gone = none.new_empty(count, len(learning), 0, shape.num_query_heads, shape.head_dim)
                states = torch.cat(learning)
                self.observe(layers, states, gone, torch.zeros_like(states))
            self.store_tokens(layers, [plan for _, plan in tails], [(none, none, *others)] * len(tails))
        for sequence, plan in tails:
            sequence.observed = False
            self.commit(sequence, plan)

    def _compress(
        self,
        layers: slice,
        plans: list[StoragePlan],
        keys: Tensor,
        rope_keys: Tensor,
        values: Tensor,
        index_keys: Tensor | None = None,
    ) -> None:
        """Compresses the first ``plan.compressed`` of the S tokens in ``keys`` and the other arrays, [L, n, S, H, d].
        First fits the states of new segments."""
        first = plans[0]  # the other plans have the same numbers
        states, count, excluded = torch.cat([plan.state for plan in plans]), first.compressed, None
        if first.fits:
            seen = keys
            few = fitted_with_earlier(first.before, first.before + keys.shape[2])
            if few and self.parts.keys.fits_on_earlier:
                earlier = [self._earlier(layers, plan) for plan in plans]
                seen = torch.cat((_stacked(earlier), keys), dim=2)
            starts = torch.cat([plan.page_starts[:1] for plan in plans])
            for part in self.parts:
                part.fit(self.store, layers, states, FittedTokens(seen, rope_keys, values, starts))
            excluded = torch.cat(
                [
                    self._write_static(layers, plan, rope_keys[:, i, :count], values[:, i, :count])
                    for i, plan in enumerate(plans)
                ],
                dim=1,
            )
        if len(plans) > 1:
            states = states.repeat_interleave(count // PAGE)
        tokens = (None if x is None else _in_pages(x, count) for x in (keys, rope_keys, values, index_keys))
        names = ("page_starts", "pages", "value_pages")
        where = (torch.cat([getattr(plan, name) for plan in plans]) for name in names)
        self.compression.write(CompressedTokens(layers, states, *where, *tokens), excluded)

    def _behind_exact(self, layers: slice, plan: StoragePlan, keys: Tensor, *new: Tensor) -> tuple[Tensor, ...]:
        """Joins the exact tail of a sequence and its new tokens. ``keys`` and ``new`` are as in ``store_tokens``."""
        count = len(plan.tail.pages)
        if not count:
            return keys, *new
        tail, *others = self.store.read_exact(layers, plan.tail)
        positions = torch.arange(plan.before, plan.before + count, device=tail.device).expand(len(tail), -1)
        before = self.ops.apply_rope(tail, positions, self.store.rotary, inverse=True)
        return tuple(torch.cat(pair, dim=1) for pair in zip((before, tail, *others), (keys, *new), strict=True))

    def _earlier(self, layers: slice, plan: StoragePlan) -> Tensor:
        """Rebuilds the keys before RoPE [L, n, H, d] of all compressed tokens of a sequence. These keys are needed if
        new tokens are too few for a subspace of their own: they then share one with the earlier tokens."""
        rebuilt = []
        for layer in range(layers.start, layers.stop):
            for segment in plan.cached:
                start = int(segment.row.first)
                for block, _ in self.rebuilt.spans(layer, segment):
                    positions = torch.arange(start, start + block.shape[1], device=block.device)
                    rows = block.transpose(0, 1).contiguous()
                    rebuilt.append(self.ops.apply_rope(rows, positions, self.store.rotary, inverse=True))
                    start += block.shape[1]
        return torch.cat(rebuilt).unflatten(0, (layers.stop - layers.start, -1))

    def _write_static(self, layers: slice, plan: StoragePlan, rope_keys: Tensor, values: Tensor) -> Tensor:
        """Writes the outliers of tokens [L, n, H, d], and the sink in a sequence's first segment, to exact pages.
        Returns bool [L, pages, H, C], True for these chunks."""
        chunk, heads, spec = self.spec.chunk, self.shape.num_kv_heads, self.spec
        count, device = 0 if plan.before else spec.sink_chunks, rope_keys.device
        sink = torch.arange(count, device=device).expand(len(rope_keys), heads, -1)
        outliers = torch.stack(
            [self.ops.find_outliers(of_layer, chunk, spec.outliers, count) for of_layer in rope_keys]
        )
        chosen = torch.cat((sink, outliers), dim=2)  # [L, H, chunks]
        tokens = (chosen.unsqueeze(-1) * chunk + torch.arange(chunk, device=device)).flatten(2)
        rows = tokens.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, rope_keys.shape[-1])
        if chosen.shape[2]:
            self.store.write_tokens(layers, plan.static, rope_keys.gather(1, rows), values.gather(1, rows))
        bits = torch.zeros(len(rope_keys), heads, rope_keys.shape[1] // chunk, dtype=torch.bool, device=device)
        bits.scatter_(2, chosen, True)
        return bits.unflatten(2, (-1, PAGE // chunk)).transpose(1, 2)


def _stacked(tokens: Sequence[Tensor]) -> Tensor:
    """Stacks n tensors [L, S, H, d] to [L, n, S, H, d]. A single tensor is not copied."""
    return torch.stack(tuple(tokens), dim=1) if len(tokens) > 1 else tokens[0].unsqueeze(1)


def _in_pages(tokens: Tensor, count: int) -> Tensor:
    """Returns the first ``count`` of S tokens, [L, n, S, H, d], as pages [L, n * count / 64, 64, H, d]."""
    return tokens[:, :, :count].unflatten(2, (-1, PAGE)).flatten(1, 2)
