"""A cache that exposes the queries, selections and outputs of its attention, for fidelity measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shadowkv.kvcache.batch import Batch
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.decode.batch import DecodeBatch, DecodePlan
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.sequences.sequence import CachedSequence


@dataclass(frozen=True)
class Attended:
    """The attention of one layer in a decode step.

    Attributes:
        layer: the layer's number.
        q: queries [B, H_q, d], before RoPE.
        batch: the batch of the queries.
        selected: chunks int64 [B, H, k], -1 for none and in dense rows; None if all rows are dense.
        out: outputs [B, H_q, d].
    """

    layer: int
    q: Tensor
    batch: DecodeBatch
    selected: Tensor | None
    out: Tensor


def spread(batch: DecodeBatch, x: Tensor, compressed: Tensor) -> Tensor:
    """``x`` [B, ...] with the rows of compressed sequences replaced by ``compressed`` [R, ...]; each sequence has one
    segment."""
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

    def plan_decode(self, sequences: Sequence[CachedSequence]) -> DecodePlan:
        """As usual, but in one micro-batch, so that an observer sees all rows when it is called."""
        plan = super().plan_decode(sequences)
        return replace(plan, groups=tuple(replace(group, micro_batches=1) for group in plan.groups))

    def exact_layers(self) -> None:
        """None: an op that runs whole layers cannot call an observer between them."""
        return None

    def _keep(self, layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        """The selection hook, called for some of the rows at a time."""
        self._selected.append(selected.chunks)
        return selected

    def start(self, layer: int, q: Tensor, batch: Batch, sinks: Tensor | None = None) -> Callable[[], Tensor]:
        """As usual, with a call of the observer at the end."""
        step = batch.groups[self.place(layer)[0].number][0]
        if not isinstance(step, DecodeBatch):
            return super().start(layer, q, batch, sinks)
        if step.of_sequence is not None:
            raise ValueError("selections of a sequence with several segments cannot be observed; use longer prompts")
        self.batch, self._selected, self.selection_hook = batch, [], self._keep
        finish = super().start(layer, q, batch, sinks)
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
