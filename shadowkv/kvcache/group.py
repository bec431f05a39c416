"""A group of layers of a cache: what all of it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from shadowkv.kvcache.decode.attention import Decode
from shadowkv.kvcache.decode.batch import DecodeBatch, DecodePlan
from shadowkv.kvcache.decode.planning import DecodePlanner
from shadowkv.kvcache.memory.arenas import Blocks
from shadowkv.kvcache.prefill.attention import Prefill
from shadowkv.kvcache.prefill.batch import PrefillBatch, PrefillBlock
from shadowkv.kvcache.prefill.sparse import SparsePrefill
from shadowkv.kvcache.sealing.pages import Sealing
from shadowkv.kvcache.sealing.storing import Storing
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.pool import SequencePool
from shadowkv.kvcache.sequences.sequence import CachedSequence
from shadowkv.kvcache.sequences.store import Store
from shadowkv.ops.apply_rope.tables import RotaryTables
from shadowkv.ops.registry import Ops

Whole = TypeVar("Whole", bound=DecodePlan | DecodeBatch | PrefillBatch | PrefillBlock)


class LayerGroup:
    """Layers that are alike: one policy, and memory and page tables of their own. They are counted within the group.

    Args:
        number: which group of the cache it is, from 0.
        slots: sequences that can be held at once.
        memory: blocks of the group's tiers of pages.
        sparse: attention over blocks of keys, where the policy's prefill is sparse.
        weights: for each of its layers, what the model has for the policy's parts, by name; raises ValueError where a
            part lacks something (``Part.weights``).
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
        sparse: SparsePrefill | None,
        weights: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.number, self.layout = number, layout
        for layer, of_layer in zip(layout.layers, weights, strict=True):
            if lacking := sorted({name for part in layout.parts for name in part.weights} - of_layer.keys()):
                raise ValueError(
                    f"layer {layer} of the model has no {', '.join(lacking)}, which the policy's parts need"
                )
        self.store = Store(layout, ops, rotary, slots, memory, device, weights)
        self.pool = SequencePool(self.store, slots, layout.max_model_len)
        self.sealing = Sealing(self.store, self.pool.tables)
        self.storing = Storing(self.store, self.pool, self.sealing)
        self.prefill = Prefill(self.store, self.storing, sparse)
        self.decode = Decode(self.store, self.sealing)
        self.planner = DecodePlanner(self.storing, self.decode.fetching)

    def part(self, whole: Whole) -> Whole:
        """What belongs to this group of a plan or of a batch."""
        return cast(Whole, whole.further[self.number - 1]) if self.number else whole

    def sequences(self, whole: Sequence[CachedSequence]) -> Sequence[CachedSequence]:
        """The same sequences in this group."""
        return [sequence.of_group(self.number) for sequence in whole] if self.number else whole
