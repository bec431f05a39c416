"""The KV cache: what models, engine and evaluations see of it.

ShadowKV, arXiv:2410.21465. Policies differ only in their parts. Models call ``append``, ``begin`` or ``attend``, and
``finish_prefill``; an engine holds sequences (``allocate``, ``extend``, ``fork``, ``trim``, ``release``) and runs steps
(``plan_decode``, ``decode_batch``, ``end_decode``), turns sequences into bytes (``snapshots.open_reading``) and bytes
into sequences (``snapshots.restore``). ``inspection.py`` shows what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.decode.attention import Decode, SelectionHook
from shadowkv.kvcache.decode.batch import DecodeBatch, DecodePlan
from shadowkv.kvcache.decode.fetching import FetchCounts
from shadowkv.kvcache.decode.planning import DecodePlanner, padded, rounded
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.prefill.attention import Prefill
from shadowkv.kvcache.prefill.batch import PrefillBatch, PrefillBlock
from shadowkv.kvcache.prefill.sparse import BlockHook
from shadowkv.kvcache.sealing.pages import Sealing
from shadowkv.kvcache.sealing.storing import Storing
from shadowkv.kvcache.sequences.layout import Layout
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import Store
from shadowkv.kvcache.snapshots.snapshots import Snapshots
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class TierUse:
    """Bytes of one tier over all layers."""

    used_bytes: int
    total_bytes: int


class KVCache:
    """Keys and values of every sequence that an engine holds.

    Args:
        layout: the policy's layout on the model, for sequences of up to its ``max_model_len``.
        rope: the model's RoPE; queries and keys are passed in before it.
        slots: sequences that can be held at once, running or finished.
        memory: blocks of the tiers of pages.
        ops: the engine's, chosen for this layout, RoPE and device (``case.choose_ops``).
        device: where attention is computed.

    Attributes:
        snapshots: turns sequences into bytes and bytes into sequences.
    """

    def __init__(
        self,
        layout: Layout,
        rope: RopeConfig,
        *,
        slots: int,
        memory: Blocks,
        ops: Ops,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.slots, self.device = layout, slots, torch.device(device)
        self.spec, self.shape, self.dtype, self.parts = layout.spec, layout.shape, layout.dtype, layout.parts
        self.max_model_len = layout.max_model_len
        self.ops = ops
        rotary = RotaryTables(rope, self.max_model_len, self.device)
        self.store = Store(layout, ops, rotary, slots, memory, self.device)
        self.pool = SequencePool(self.store, slots, self.max_model_len)
        self.sealing = Sealing(self.store, self.pool.tables)
        self.storing = Storing(self.store, self.pool, self.sealing)
        self.prefill = Prefill(self.store, self.storing)
        self.decode = Decode(self.store, self.sealing)
        self.planner = DecodePlanner(self.storing, self.decode.fetching)
        self.snapshots = Snapshots(self.store, self.pool)

    # -- sequences -------------------------------------------------------------------------------------------------

    @property
    def total(self) -> Blocks:
        """All that there is: blocks of each tier, slots of segments, and sequences."""
        return self.pool.total

    @property
    def free(self) -> Blocks:
        """Blocks that no sequence holds."""
        return self.pool.free

    @property
    def changes(self) -> int:
        """Grows whenever a sequence takes something, shares it or gives it back."""
        return sum(pool.changes for pool in self.pool.pools.values())

    def demand(self, start: int, capacity: int) -> Blocks:
        """Blocks that a new sequence takes with a prompt of ``start`` tokens that may grow to ``capacity``."""
        return self.layout.demand(start, capacity)

    def growth(self, sequence: CachedSequence, start: int, capacity: int) -> Blocks:
        """Blocks that ``sequence`` lacks to be extended to ``start`` tokens by a prompt, then to ``capacity``."""
        return self.pool.growth(sequence, start, capacity)

    def held(self, sequences: Iterable[CachedSequence]) -> Blocks:
        """Blocks that would be free if ``sequences`` were released."""
        return self.pool.held(sequences)

    def allocate(self, start: int, capacity: int) -> CachedSequence:
        """A new, empty sequence that holds what ``demand`` says; raises OutOfBlocks, with nothing taken."""
        return self.pool.allocate(start, capacity)

    def extend(self, sequence: CachedSequence, start: int, capacity: int) -> None:
        """Gives ``sequence`` what ``growth`` says; raises OutOfBlocks, with nothing taken."""
        self.pool.extend(sequence, start, capacity)

    def fork_point(self, sequence: CachedSequence, length: int) -> int:
        """The largest number of tokens up to ``length`` after which ``sequence`` can be forked."""
        return self.pool.fork_point(sequence, length)

    def fork(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> CachedSequence:
        """A new sequence that shares the first ``length`` tokens, a fork point, with ``sequence``: no bytes are copied.

        Raises OutOfBlocks, with nothing taken, and ValueError where it cannot be forked there.
        """
        return self.pool.fork(sequence, length, start, capacity)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forgets the newest tokens; sealed and shared ones cannot be forgotten (ValueError)."""
        self.pool.truncate(sequence, length)

    def trim(self, sequence: CachedSequence) -> None:
        """Gives back what a finished sequence holds for future tokens; it can be extended again."""
        self.pool.trim(sequence)

    def release(self, sequence: CachedSequence) -> None:
        """Gives back everything; the sequence must not be used again."""
        self.pool.release(sequence)

    def fork_demand(self, sequence: CachedSequence, length: int, start: int, capacity: int) -> Blocks:
        """Blocks that ``fork`` takes; raises the same ValueErrors."""
        return self.pool.demand(self.pool.forked(sequence, length), start, capacity)

    def use(self) -> dict[str, TierUse]:
        """Bytes of each tier; may be called from any thread."""
        return {name: TierUse(tier.used_bytes, tier.total_bytes) for name, tier in self.store.tiers.items()}

    @property
    def fetches(self) -> FetchCounts | None:
        """Chunks fetched from the host so far; None where there is no buffer. May be read from any thread."""
        return None if self.decode.fetching is None else self.decode.fetching.counts

    def forget_fetches(self) -> None:
        """Resets the counts of fetched chunks."""
        if self.decode.fetching is not None:
            self.decode.fetching.forget()

    # -- prefill ---------------------------------------------------------------------------------------------------

    def prefill_batch(self, sequences: list[tuple[CachedSequence, int]]) -> PrefillBatch:
        """Packs new tokens of admitted sequences: pairs of a sequence and how many tokens it gains (at least 1)."""
        return self.prefill.batch(sequences)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores one layer's new tokens, in the policy's own form where the sequence is compressed."""
        self.prefill.finish_layer(layer, batch)

    def leave_prefill(self) -> None:
        """To be called when a prefill ends or is given up: what it still stores is waited for before anything else."""
        self.prefill.join()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.prefill.end(batch)

    # -- decode ----------------------------------------------------------------------------------------------------

    def plan_decode(self, sequences: Sequence[CachedSequence]) -> DecodePlan:
        """Plans one more token for each of ``sequences`` (at least one), and the sealing that is due before.

        Raises ValueError if one of them is at its capacity.
        """
        return self.planner.plan(sequences)

    def forecast_decode(
        self, sequences: Sequence[CachedSequence], joining: Sequence[tuple[CachedSequence, int]]
    ) -> DecodePlan | None:
        """Plans a step of padding rows, with the shapes of one that ``sequences`` will take together with those of
        ``joining``, whose prompts of that many tokens are being computed; None where these are not known."""
        return self.planner.forecast(sequences, joining)

    def decode_batch(self, plan: DecodePlan, numbers: Tensor | None = None) -> DecodeBatch:
        """``plan`` as the device sees it; ``numbers`` are the plan's, packed, where they are on the device already and
        what is due has been sealed (``seal_pages``): then only the plan's shapes are used, as a captured graph
        requires."""
        return self.decode.batch(plan, numbers)

    def rounded(self, plan: DecodePlan, max_batch: int) -> DecodePlan:
        """``plan`` with its shapes rounded up, so that few captured graphs serve many steps."""
        return rounded(plan, max_batch, self.spec, self.pool.tables)

    def padded_sealing(self, numbers: np.ndarray) -> np.ndarray:
        """``DecodePlan.sealing`` for a number of pages that is rounded up."""
        return padded(numbers, self.sealing.padding)

    def join_capture(self) -> None:
        """To be called where a capture fails halfway: it could not end before what runs on other streams is joined."""
        self.decode.side_stream.join_capture()

    def seal_pages(self, numbers: Tensor) -> None:
        """Seals pages in all layers: ``DecodePlan.sealing``, on the device."""
        self.sealing.seal_pages(numbers)

    def end_decode(self, plan: DecodePlan) -> None:
        """Makes the new tokens part of their sequences, after the last layer."""
        self.planner.end(plan)

    @property
    def selection_hook(self) -> SelectionHook | None:
        """Called with layer, RoPE-rotated queries [R, H_q, d], the batch and what the index selects in a decode step;
        what it returns is attended to. Not called where nothing is selected (``KVSpec.selects``). To be set before the
        first step: captured graphs keep the hook that they were captured with."""
        return self.decode.hook

    @selection_hook.setter
    def selection_hook(self, hook: SelectionHook | None) -> None:
        self.decode.hook = hook

    @property
    def block_hook(self) -> BlockHook | None:
        """Called with layer, RoPE-rotated queries [n, H_q, d] and the blocks that a sparse prefill's tiles are to
        attend to (``select_blocks``); what it returns is attended to. There is none where prefill is dense."""
        return None if self.prefill.sparse is None else self.prefill.sparse.hook

    @block_hook.setter
    def block_hook(self, hook: BlockHook | None) -> None:
        if self.prefill.sparse is None:
            raise ValueError(f"prefill={self.spec.prefill!r} selects no blocks; use prefill='sparse'")
        self.prefill.sparse.hook = hook

    def take_attention_density(self) -> float | None:
        """Share of the blocks of keys that sparse prefills attended to since the last call; None where there were
        none. Waits for the device."""
        return None if self.prefill.sparse is None else self.prefill.sparse.take_density()

    # -- what a model's attention calls ----------------------------------------------------------------------------

    def append(self, layer: int, k: Tensor, v: Tensor, batch: DecodeBatch | PrefillBlock) -> None:
        """Takes keys (before RoPE) and values [T, H, d] of the batch's new tokens."""
        if isinstance(batch, PrefillBlock):
            self.prefill.append(layer, k, v, batch)
        else:
            self.decode.append(layer, k, v, batch)

    def attend(self, layer: int, q: Tensor, batch: DecodeBatch | PrefillBlock) -> Tensor:
        """Attention [T, H_q, d] of the batch's new tokens, softmax scale 1 / sqrt(d); q is before RoPE.

        In prefill over everything, or over chosen blocks where the policy's prefill is sparse; in decode over [sink |
        outliers | selected | tail], or over everything where dense.
        """
        return self.begin(layer, q, batch)()

    def begin(self, layer: int, q: Tensor, batch: DecodeBatch | PrefillBlock) -> Callable[[], Tensor]:
        """Begins ``attend``, as far as it need not wait for values from the host; the returned function finishes it."""
        if isinstance(batch, PrefillBlock):
            out = self.prefill.attend(layer, q, batch)
            return lambda: out
        return self.decode.begin(layer, q, batch)


class FanOut:
    """Several caches of one model that are prefilled together, with one sequence in each for every prompt.

    The first computes; the others, whose sequences are new, store the same keys and values in their own form.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches, self.device = list(caches), caches[0].device
        self._batches: list[PrefillBatch] = []

    def prefill_batch(self, sequences: list[tuple[tuple[CachedSequence, ...], int]]) -> PrefillBatch:
        """Packs new tokens: for each prompt its sequences, one of each cache, and how many tokens they gain."""
        of_caches = list(zip(*(of_prompt for of_prompt, _ in sequences), strict=True))
        first = self.caches[0].prefill_batch([(of_prompt[0], count) for of_prompt, count in sequences])
        bounds = {bound for cache in self.caches for run in cache.layout.runs for bound in (run.start, run.stop)}
        first.runs = [range(*pair) for pair in pairwise(sorted(bounds))]  # alike in every cache
        others = zip(self.caches[1:], of_caches[1:], strict=True)
        self._batches = [first, *(first.of(list(own), cache.storing.planner) for cache, own in others)]
        return first

    def append(self, layer: int, k: Tensor, v: Tensor, batch: PrefillBlock) -> None:
        """Takes a block's keys and values."""
        self.caches[0].append(layer, k, v, batch)

    def begin(self, layer: int, q: Tensor, batch: PrefillBlock) -> Callable[[], Tensor]:
        """Begins a block's attention."""
        return self.caches[0].begin(layer, q, batch)

    def finish_prefill(self, layer: int, batch: PrefillBatch) -> None:
        """Stores a layer in every cache."""
        for cache, own in zip(self.caches, self._batches, strict=True):
            cache.finish_prefill(layer, own)

    def leave_prefill(self) -> None:
        """To be called when a prefill ends or is given up."""
        for cache in self.caches:
            cache.leave_prefill()

    def end_prefill(self, batch: PrefillBatch) -> None:
        """Makes the new tokens part of their sequences."""
        for cache, own in zip(self.caches, self._batches, strict=True):
            cache.end_prefill(own)
