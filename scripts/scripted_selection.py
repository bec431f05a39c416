"""Selection at a set rate: computed as usual, then replaced by chunks of which a set share repeats from step to step.

Random weights and random keys select hardly anything twice, so their hit rate means nothing; what fetching costs at a
given one can still be measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shadowkv.kvcache.batch import SealedBatch
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.spec import PAGE

STEPS = 64
"""Steps of the script; after the last comes the first again, of which the buffer has forgotten most."""


def repeating(
    shape: tuple[int, int, int], k: int, share: float, steps: int, device: torch.device | str = "cuda"
) -> Iterator[Tensor]:
    """Chunks int64 [rows, heads, k] of each step, for ``shape`` [rows, heads, chunks]."""
    last = torch.rand(shape, device=device).topk(k).indices
    for _ in range(steps):
        weights = torch.rand(shape, device=device)
        kept = torch.rand(last.shape, device=device).argsort(-1) < round(share * k)
        last = weights.scatter_add_(-1, last, torch.where(kept, 1.0, -1.0)).topk(k).indices
        yield last


class ScriptedSelection:
    """A ``selection_hook``; may be captured in a graph, whose replays go on in the script.

    Rows that fill a captured batch up belong to nobody's segment, the last, for which nothing is selected. A model has
    two layers or more.

    Args:
        tokens: of context, of the shortest sequence; none that decodes may be shorter.
        share: of the chunks of a step that the step before selected too.
    """

    def __init__(self, cache: KVCache, tokens: int, share: float) -> None:
        self._layer = cache.shape.num_layers
        spec, heads = cache.spec, cache.shape.num_kv_heads
        self._rows, chunks = cache.total["segment_slots"] + 1, spec.sealed_pages(tokens) * PAGE // spec.chunk
        k = int(spec.budget_chunks(torch.tensor([tokens]).numpy())[0])
        # Row of the script where the step at work begins.
        self._first = torch.zeros(1, dtype=torch.int64, device=cache.device)
        self._script = torch.full((STEPS, self._rows, heads, 2 * k), -1, device=cache.device)
        for step, chosen in enumerate(repeating((self._rows, heads, chunks), k, share, STEPS, cache.device)):
            self._script[step, :-1, :, :k] = chosen[:-1].sort().values
        self._script = self._script.flatten(0, 1)

    def __call__(self, layer: int, q: Tensor, batch: SealedBatch, selected: Selection) -> Selection:
        """That of the step at work, which begins where a layer comes after a later one."""
        width = selected.chunks.shape[-1]
        if layer < self._layer:
            self._first.add_(self._rows).remainder_(len(self._script))
        self._layer = layer
        return Selection(self._script[..., :width].index_select(0, self._first + batch.slots))
