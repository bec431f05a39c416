"""What the tokens of an answer attended to: read back for requests that ask, from the cache's selection hook.

Positions are reported in cells of a few tokens, layers in a few groups: in a context of 60K tokens a step selects
hundreds of thousands of tokens over all layers and kv heads. Selections are weighted by the attention they get,
without which they say little: every head selects as much as its budget allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.outputs import LayerGroup, TokenSelections
from shadowkv.kvcache.cache import KVCache
from shadowkv.kvcache.inspection import selected_scores
from shadowkv.kvcache.memory.sealed import SealedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.sequences.sequence import CachedSequence

CELL = 16
"""Tokens per cell, or the size of a chunk if that is larger."""

GROUPS = 4
"""Groups of layers, of one layer each in models with fewer. A step reports one layer of each, the next step the next
one: weighting what is selected in every layer would take a fifth of a step of a small model on a CPU."""

MOST_CELLS = 64
"""Cells reported per group: those with the largest weights."""


class SelectionRecord:
    """Selections of some sequences in a decode step, which runs within it as a context, and not as a CUDA graph.

    Only the rows of a batch are waited for there, before its first layer: results stay on the device until ``read``.
    ``read``.

    Args:
        sequences: planned for the step.
    """

    def __init__(self, cache: KVCache, sequences: Sequence[CachedSequence]) -> None:
        layers = cache.layout.selecting  # in the others everything is attended to
        self._cache, self._sequences = cache, sequences
        self._cell = max(CELL, cache.spec.chunk)
        bounds = np.linspace(0, len(layers), min(GROUPS, len(layers)) + 1).astype(int).tolist()
        self._groups = [layers[start:stop] for start, stop in pairwise(bounds)]
        self._found: Tensor | None = None
        self._ended: torch.cuda.Event | None = None

    def __enter__(self) -> SelectionRecord:
        cache = self._cache
        self._lengths = [(one.length, one.sealed) for one in self._sequences]
        self._layers = [[layers[length % len(layers)] for layers in self._groups] for length, _ in self._lengths]
        self._numbers = {segment.slot: number for number, one in enumerate(self._sequences) for segment in one.path}
        cells = 1 + max((length for length, _ in self._lengths), default=0) // self._cell
        # One extra cell, for entries that are not tokens.
        self._size = len(self._sequences), len(self._groups), cells + 1
        self._scores: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._portions: list[list[tuple[int, int]]] = []
        self._calls: Counter[int] = Counter()
        self._before, cache.selection_hook = cache.selection_hook, self._see
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache.selection_hook = self._before
        if error is not None:
            return
        self._found = self._weights()
        if self._found.is_cuda:
            landing = torch.empty(self._found.shape, pin_memory=True)
            self._found = landing.copy_(self._found, non_blocking=True)
            self._ended = torch.cuda.Event()
            self._ended.record()

    def _see(self, layer: int, q: Tensor, batch: SealedBatch, selected: Selection) -> Selection:
        """Handles a portion of the batch; every layer has the same ones, in the same order."""
        if self._before is not None:
            selected = self._before(layer, q, batch, selected)
        if layer == self._groups[0][0]:
            slots = enumerate(batch.slots.tolist())
            self._portions.append([(row, self._numbers[slot]) for row, slot in slots if slot in self._numbers])
        portion = self._portions[self._calls[layer]]
        self._calls[layer] += 1
        for row, number in portion:
            if layer in self._layers[number]:
                group = self._layers[number].index(layer)
                scores = selected_scores(self._cache, layer, q, batch, selected, row)
                self._scores.setdefault((number, group), []).append(scores)
        return selected

    def _weights(self) -> Tensor:
        """Weights of all cells, float32 [sequences, groups, cells + 1], over all of a sequence's segments."""
        weights = torch.zeros(self._size, device=self._cache.device)
        for key, segments in self._scores.items():
            positions, scores = (torch.cat(parts, -1) for parts in zip(*segments, strict=True))
            cells = (positions // self._cell).masked_fill_(positions < 0, self._size[-1] - 1)
            of_heads = scores.softmax(-1).nan_to_num_(0.0).mean(1) / len(scores)
            weights[key].scatter_add_(0, cells.flatten(), of_heads.flatten())
        return weights

    def read(self) -> list[TokenSelections | None]:
        """The selections of each sequence; None where the step ended without them. Waits for the step."""
        if self._found is None:
            return [None] * len(self._sequences)
        if self._ended is not None:
            self._ended.synchronize()
        return [self._of(number, weights[:, :-1]) for number, weights in enumerate(self._found.numpy())]

    def _of(self, number: int, weights: np.ndarray) -> TokenSelections:
        (length, sealed), spec = self._lengths[number], self._cache.spec
        if not (sealed and self._groups) or not spec.selects:
            return TokenSelections(length + 1, self._cell, True, [(0, length + 1)], [])
        groups = []
        for layers, layer, of_cells in zip(self._groups, self._layers[number], weights, strict=True):
            cells = np.sort(np.argsort(-of_cells, kind="stable")[:MOST_CELLS])
            cells = cells[of_cells[cells] > 0]
            groups.append(
                LayerGroup((layers[0], layers[-1] + 1), layer, cells.tolist(), of_cells[cells].round(5).tolist())
            )
        exact = [(0, spec.sink_chunks * spec.chunk), (sealed, length + 1)]
        return TokenSelections(length + 1, self._cell, False, exact, groups)
