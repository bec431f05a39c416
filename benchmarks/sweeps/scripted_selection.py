"""Selection at a set rate: computed as usual, then replaced by chunks of which a set share repeats from step to step.

Random weights and random keys hardly ever select a chunk twice, so their hit rate means nothing; the cost of fetching
at a given one can still be measured.
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
"""Steps of the script; after the last it restarts with the first, most of which the buffer has evicted by then."""


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
    """A ``selection_hook``; may be captured in a graph, whose replays continue the script.

    Padding rows of a captured batch belong to the last segment, which is unused and for which nothing is selected. A
    model must have at least two layers.

    Args:
        tokens: of context, of the shortest sequence; no decoding sequence may be shorter.
        share: of a step's chunks that the previous step selected too.
    """

    def __init__(self, cache: KVCache, tokens: int, share: float) -> None:
        self._layer = cache.shape.num_layers
        spec, heads = cache.spec, cache.shape.num_kv_heads
        self._rows, chunks = cache.total["segment_slots"] + 1, spec.sealed_pages(tokens) * PAGE // spec.chunk
        k = int(spec.budget_chunks(torch.tensor([tokens]).numpy())[0])
        # Row of the script where the current step begins.
        self._first = torch.zeros(1, dtype=torch.int64, device=cache.device)
        self._script = torch.full((STEPS, self._rows, heads, 2 * k), -1, device=cache.device)
        for step, chosen in enumerate(repeating((self._rows, heads, chunks), k, share, STEPS, cache.device)):
            self._script[step, :-1, :, :k] = chosen[:-1].sort().values
        self._script = self._script.flatten(0, 1)

    def __call__(self, layer: int, q: Tensor, batch: SealedBatch, selected: Selection) -> Selection:
        """The current step's selection; a step begins where a layer follows a later one."""
        width = selected.chunks.shape[-1]
        if layer < self._layer:
            self._first.add_(self._rows).remainder_(len(self._script))
        self._layer = layer
        return Selection(self._script[..., :width].index_select(0, self._first + batch.slots))
