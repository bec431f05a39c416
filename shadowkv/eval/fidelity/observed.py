"""A cache that exposes the queries, selections and outputs of its attention, for fidelity measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.decode.decode_batch import DecodeBatch, DecodePlan
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.shape import IndexQueries
from shadowkv.kvcache.sequences.sequence import CachedSequence


@dataclass(frozen=True)
class Attended:
    """The attention of one layer in a decode step.

    Attributes:
        layer: the layer's number.
        q: queries [B, H_q, d], before RoPE: B sequences, H_q query heads, d dimensions.
        batch: the batch of the queries.
        selected: the k chunks that each of H kv heads selects, int64 [B, H, k]. -1 is no chunk; rows of dense sequences
            have only -1. None if all sequences are dense.
        out: outputs [B, H_q, d].
    """

    layer: int
    q: Tensor
    batch: DecodeBatch
    selected: Tensor | None
    out: Tensor


def spread(batch: DecodeBatch, x: Tensor, compressed: Tensor) -> Tensor:
    """Returns ``x`` [B, ...] with the rows of the R compressed sequences replaced by ``compressed`` [R, ...]. Each
    sequence must have one segment."""
    return compressed if batch.sequence is None else x.index_copy(0, batch.sequence, compressed)


class ObservedCache(KVCache):
    """A KVCache that calls an observer. Its decode steps must not be captured in a graph: replays would not call the
    observer.

    Attributes:
        batch: the batch of the last decode step.
        observe: called after each layer's attention in decode.
    """

    batch: Batch | None = None
    observe: Callable[[Attended], None] | None = None
    _selected: list[Tensor]

    def plan_decode(
        self,
        sequences: Sequence[CachedSequence],
        counts: Sequence[int] | None = None,
        drafting: bool = False,
        compress: Callable[[int, np.ndarray, Callable[[Tensor], None]], None] | None = None,
    ) -> DecodePlan:
        """Returns ``KVCache``'s plan, but with one micro-batch, so that an observer sees all rows at once."""
        plan = super().plan_decode(sequences, counts, drafting, compress)
        return replace(plan, groups=tuple(replace(group, micro_batches=1) for group in plan.groups))

    def exact_layers(self) -> None:
        """Returns None, so that no op runs whole layers: such an op could not call the observer between layers."""
        return None

    def _keep(self, layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        """The cache's selection hook. Stores the chunks that some of the rows select."""
        self._selected.append(selected.chunks)
        return selected

    def start(
        self, layer: int, q: Tensor, batch: Batch, sinks: Tensor | None = None, index: IndexQueries | None = None
    ) -> Callable[[], Tensor]:
        """Does the same as ``KVCache.start``. After attention in a decode step, the observer is called."""
        step = batch.groups[self.place(layer)[0].number][0]
        if not isinstance(step, DecodeBatch):
            return super().start(layer, q, batch, sinks, index)
        if step.of_sequence is not None:
            raise ValueError("selections of a sequence with several segments cannot be observed; use longer prompts")
        self.batch, self._selected, self.selection_hook = batch, [], self._keep
        finish = super().start(layer, q, batch, sinks, index)
        selected = None
        if self._selected:
            of_compressed = torch.cat(self._selected)
            selected = spread(step, of_compressed.new_full((len(q), *of_compressed.shape[1:]), -1), of_compressed)

        def observed() -> Tensor:
            out = finish()
            if self.observe is not None:
                self.observe(Attended(layer, q, step, selected, out))
            return out

        return observed
