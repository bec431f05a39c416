"""``LayerGroup``: a group of layers of a cache, with its pages, policy, prefill and decode. ``KVCache`` makes the
groups.

Shapes: T tokens, H kv heads, H_q query heads, d dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shadowkv.kvcache.batch import Part, PartHandler
from shadowkv.kvcache.compression.pages import Compression
from shadowkv.kvcache.compression.storing import Storing
from shadowkv.kvcache.decode.decode_attention import Decode
from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.decode.planning import DecodePlanner
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.parts.base import OBSERVED, PrefillStrategy
from shadowkv.kvcache.policy.growth import Compressed
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.prefill.exact import ExactPrefill, ExactPrompts, exact_prompts
from shadowkv.kvcache.prefill.prefill_attention import Prefill
from shadowkv.kvcache.prefill.prefill_batch import PrefillBlock
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import GroupStore
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.registry import Ops


class LayerGroup:
    """Layers that share a policy, memory and page tables. Layers are numbered within the group.

    Args:
        number: number of the group in the cache, from 0.
        slots: number of sequences that the cache can hold.
        memory: blocks of each tier of the group.
        strategy: the cache's prefill strategy.
        weights: for each layer of the group, the weights that the policy's parts need, by name
            (``StoredPart.weights``).

    Raises ValueError if a layer lacks weights that a part needs.
    """

    def __init__(
        self,
        number: int,
        layout: GroupLayout,
        ops: Ops,
        rotary: RotaryTables,
        slots: int,
        memory: Blocks,
        device: torch.device,
        strategy: PrefillStrategy,
        weights: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.number, self.layout = number, layout
        for layer, of_layer in zip(layout.layers, weights, strict=True):
            if lacking := sorted({name for part in layout.parts for name in part.weights} - of_layer.keys()):
                raise ValueError(
                    f"layer {layer} of the model has no {', '.join(lacking)}, which the policy's parts need"
                )
        self.store = GroupStore(layout, ops, rotary, slots, memory, device, weights)
        self.pool = SequencePool(self.store, slots, layout.max_model_len)
        self.compression = Compression(self.store, self.pool.tables)
        self.storing = Storing(self.store, self.pool, self.compression)
        self.prefill = Prefill(self.store, self.storing, strategy)
        self.decode = Decode(self.store, self.compression)
        self.exact = ExactPrefill(self.store, self.compression)
        self.handlers: dict[type, PartHandler] = {
            DecodeBatch: self.decode,
            PrefillBlock: self.prefill,
            ExactPrompts: self.exact,
        }
        self.planner = DecodePlanner(self.storing, self.decode.fetching)

    def sequences(self, whole: Sequence[CachedSequence]) -> Sequence[CachedSequence]:
        """Returns the sequences' parts in this group (``CachedSequence.of_group``)."""
        return [sequence.of_group(self.number) for sequence in whole] if self.number else whole

    def compressed_after(self, sequence: CachedSequence, tokens: int) -> Compressed:
        """How far a sequence is compressed after ``tokens`` new tokens of a prompt."""
        length = sequence.length + tokens
        return self.layout.growth.compressed(sequence.segment_state, length, length == sequence.capacity)

    @property
    def captures_compressing(self) -> bool:
        """Whether a CUDA graph can capture prompts of compressed sequences. It cannot if values are on the host, if
        heads have outliers of their own, if the model's indexer selects what is attended to, or if a part learns from
        queries in a way that a graph cannot capture."""
        spec = self.layout.spec
        device_only = spec.place == "device" and not spec.outliers and not spec.native
        return spec.compresses and device_only and self.layout.parts.captures_observe(self.store.ops)

    def learns(self, sequence: CachedSequence) -> bool:
        """Whether ``sequence`` is dense and can be compressed later, and a part learns from its prompt's last queries
        for that."""
        return not sequence.path and bool(sequence.state_reserve) and self.layout.parts.observing

    def can_capture(self, sequence: CachedSequence, tokens: int) -> bool:
        """Whether ``tokens`` new tokens of a prompt can be part of ``ExactPrompts`` (``KVCache.can_capture``)."""
        after = self.compressed_after(sequence, tokens)
        if after.fits:
            return False
        if not sequence.path:
            return not self.learns(sequence) or (tokens >= OBSERVED and self.captures_compressing)
        # ``ExactPrompts`` has room to compress one page of the exact tail, and the pages that the new tokens fill.
        few = after.tokens - sequence.compressed <= PAGE * (1 + tokens // PAGE)
        return few and self.captures_compressing

    def exact_prompts(self, lengths: Tensor, numbers: Tensor, rows: int, compressing: bool) -> ExactPrompts:
        """Makes the group's part for ``KVCache.exact_prompts``. If ``captures_compressing`` is False, all of the
        prompts' sequences are dense in this group."""
        compressing = compressing and self.captures_compressing
        return exact_prompts(lengths, numbers, rows, compressing, self.layout, self.pool.tables)

    def end_exact_prompt(self, sequence: CachedSequence, tokens: int) -> None:
        """Makes the new tokens of a prompt in ``ExactPrompts`` part of its sequence."""
        sequence.observed = self.learns(sequence)
        after = self.compressed_after(sequence, tokens).tokens
        self.pool.tables.length[sequence.slot] += tokens
        if after > sequence.compressed:
            self.pool.compress(sequence, after)

    def append(
        self, layer: int, k: Tensor, v: Tensor, parts: tuple[Part, ...], index_keys: Tensor | None = None
    ) -> None:
        """Stores keys (before RoPE) and values [T, H, d] of packed tokens, and, in layers with an indexer, index keys
        [T, 1, d]. Each part goes to its handler."""
        if len(parts) == 1:
            return self.handlers[type(parts[0])].append(layer, k, v, parts[0], index_keys)
        for part, *own in zip(parts, *(_split(x, parts) for x in (k, v, index_keys)), strict=True):
            self.handlers[type(part)].append(layer, own[0], own[1], part, own[2])

    def start(
        self,
        layer: int,
        q: Tensor,
        parts: tuple[Part, ...],
        sinks: Tensor | None = None,
        index_queries: IndexQueries | None = None,
    ) -> Callable[[], Tensor]:
        """Starts attention of packed queries [T, H_q, d] before RoPE, with index queries [T, H, d] if there is an
        indexer. Each part goes to its handler. The returned function finishes the attention and returns [T, H_q, d]."""
        if len(parts) == 1:
            return self.handlers[type(parts[0])].start(layer, q, parts[0], sinks, index_queries)
        # A step's fetches from the host cross the bus while the prompts attend.
        started = [
            self.handlers[type(part)].start(layer, own, part, sinks, own_index)
            for part, own, own_index in zip(parts, _split(q, parts), _split(index_queries, parts), strict=True)
        ]
        return lambda: torch.cat([finish() for finish in started])


def _split(x: Tensor | IndexQueries | None, parts: tuple[Part, ...]) -> Sequence[Any]:
    """Splits ``x`` [T, ...] by parts; None for each part if ``x`` is None."""
    if isinstance(x, IndexQueries):
        return [x._replace(queries=queries) for queries in _split(x.queries, parts)]
    return [None] * len(parts) if x is None else x.split([part.num_tokens for part in parts])
