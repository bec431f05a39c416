"""Selections: the tokens that each token of an answer attended to, for requests with ``return_selections``. Decode
steps record them through the cache's hooks.

At 60K tokens a step selects hundreds of thousands of tokens over all layers and kv heads. So positions are reported in
cells of a few tokens, and layers in a few groups. Selections are weighted by their attention: every head selects as
many tokens as its budget allows, so a selection alone says little. If the policy does not select, all tokens are
weighted except the first and the newest, which always get much attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shadowkv.engine.outputs import LayerSelections, TokenSelections
from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.inspection import coded_scores, exact_scores, selected_scores
from shadowkv.kvcache.kv_cache import KVCache
from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.kvcache.parts.base import Selection
from shadowkv.kvcache.policy.spec import PAGE
from shadowkv.kvcache.sequences.group_layout import GroupLayout
from shadowkv.kvcache.sequences.sequence import CachedSequence

CELL = 16
"""Tokens per cell. If the policy's chunk is larger, a cell is a chunk."""

GROUPS = 4
"""Number of groups of layers; a model with fewer layers has one group per layer. A step reports one layer of each
group, and the next step the group's next layer. Weighting every layer would take a fifth of a small model's step on a
CPU."""

MAX_CELLS = 64
"""Maximum number of cells reported per group of layers: those with the largest weights."""


NEWEST = PAGE
"""Minimum number of newest tokens that are not weighted when a step attends to all tokens."""


class SelectionRecord:
    """Records the selections of some sequences in a decode step. It is a context, in which the step runs without a CUDA
    graph.

    The step waits for the device only once, in the first layer, to read the batch's slots. Results stay on the device
    until ``read``.

    Args:
        sequences: the sequences to record, which the step decodes.
        rows: their rows in the step's batch.
    """

    def __init__(self, cache: KVCache, sequences: Sequence[CachedSequence], rows: Sequence[int]) -> None:
        number, group = max(enumerate(cache.layout.groups), key=lambda numbered: _preference(numbered[1]))
        layers = [] if group.window is not None else list(group.layers)
        self._cache, self._rows, self._spec = cache, rows, group.spec
        self._sequences = [sequence.of_group(number) for sequence in sequences]
        self._cell = max(CELL, self._spec.chunk)
        bounds = np.linspace(0, len(layers), min(GROUPS, len(layers)) + 1).astype(int).tolist()
        self._groups = [layers[start:stop] for start, stop in pairwise(bounds)]
        self._found: Tensor | None = None
        self._ended: torch.cuda.Event | None = None

    def __enter__(self) -> SelectionRecord:
        cache = self._cache
        self._lengths = [(one.length, one.compressed) for one in self._sequences]
        self._everything = [not (compressed and self._spec.selects) for _, compressed in self._lengths]
        self._layers = [[layers[length % len(layers)] for layers in self._groups] for length, _ in self._lengths]
        self._numbers = {segment.slot: number for number, one in enumerate(self._sequences) for segment in one.path}
        cells = 1 + max((length for length, _ in self._lengths), default=0) // self._cell
        # One extra cell takes the weights of entries without a token, whose position is -1.
        self._size = len(self._sequences), len(self._groups), cells + 1
        self._scores: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._portions: list[list[tuple[int, int]]] = []
        self._calls: Counter[int] = Counter()
        self._queried: Counter[int] = Counter()
        self._before = cache.selection_hook, cache.query_hook
        cache.selection_hook = self._see
        if any(self._everything):
            cache.query_hook = self._see_queries
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._cache.selection_hook, self._cache.query_hook = self._before
        if kind is not None:
            return
        self._found = self._weights()
        if self._found.is_cuda:
            landing = torch.empty(self._found.shape, pin_memory=True)
            self._found = landing.copy_(self._found, non_blocking=True)
            self._ended = torch.cuda.Event()
            self._ended.record()

    def _see(self, layer: int, q: Tensor, batch: CompressedBatch, selected: Selection) -> Selection:
        """Records the selections of a portion of the batch (a micro-batch). The cache calls it as ``selection_hook``.
        Every layer gets the same portions in the same order. If later layers share a layer's keys, the cache calls this
        method again with that layer's number, after the layer's own portions. These calls are not recorded."""
        if self._before[0] is not None:
            selected = self._before[0](layer, q, batch, selected)
        if layer == self._groups[0][0]:
            portion = self._portion(batch)
            if not portion or portion not in self._portions:
                self._portions.append(portion)
        if self._calls[layer] == len(self._portions):
            return selected
        portion = self._portions[self._calls[layer]]
        self._calls[layer] += 1
        for row, slot in portion:
            number = self._numbers[slot]
            if layer in self._layers[number]:
                group = self._layers[number].index(layer)
                scores = selected_scores(self._cache, layer, q, batch, selected, row)
                self._scores.setdefault((number, group), []).append(scores)
        return selected

    def _portion(self, batch: CompressedBatch) -> list[tuple[int, int]]:
        """Returns rows and slots of the recorded sequences' segments in a portion of the batch."""
        return [(row, slot) for row, slot in enumerate(batch.slots.tolist()) if slot in self._numbers]

    def _see_queries(self, layer: int, q: Tensor, batch: DecodeBatch) -> None:
        """Records the rows that attend to all tokens. The cache calls it as ``query_hook``. The rows of ``q`` follow
        those of the previous call for the same layer."""
        if self._before[1] is not None:
            self._before[1](layer, q, batch)
        start = self._queried[layer]
        self._queried[layer] += len(q)
        for number, row in enumerate(self._rows):
            if self._everything[number] and start <= row < start + len(q) and layer in self._layers[number]:
                scores = self._of_everything(layer, q[row - start], batch, row - start, number)
                if scores:
                    self._scores[number, self._layers[number].index(layer)] = scores

    def _of_everything(
        self, layer: int, q: Tensor, batch: DecodeBatch, row: int, number: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns, for each segment, the positions and scores of a row's tokens between the first and the newest."""
        (_, first), (end, _) = self._exact(number)
        if end <= first:
            return []
        if not self._lengths[number][1]:
            return [exact_scores(self._cache, layer, q, batch.pages[row], first, end)]
        assert batch.compressed is not None
        if not self._portions:
            self._portions = [self._portion(batch.compressed)]
        rows = [at for at, slot in self._portions[0] if self._numbers[slot] == number]
        return [coded_scores(self._cache, layer, q, batch.compressed, at, first) for at in rows]

    def _exact(self, number: int) -> list[tuple[int, int]]:
        """Ranges of positions that are not weighted: the sink and the newest tokens."""
        (length, compressed), sink = self._lengths[number], self._spec.sink_chunks * self._spec.chunk
        if not self._everything[number]:
            return [(0, sink), (compressed, length + 1)]
        newest = compressed or (length + 1 - NEWEST) // self._cell * self._cell
        first = min(max(sink, self._cell), length + 1)
        return [(0, first), (max(newest, first), length + 1)]

    def _weights(self) -> Tensor:
        """Returns the weights of all cells, float32 [sequences, groups, cells + 1]. The softmax is over all segments of
        a sequence."""
        weights = torch.zeros(self._size, device=self._cache.device)
        for key, segments in self._scores.items():
            positions, scores = (torch.cat(parts, -1) for parts in zip(*segments, strict=True))
            cells = (positions // self._cell).masked_fill_(positions < 0, self._size[-1] - 1)
            of_heads = scores.softmax(-1).nan_to_num_(0.0).mean(1) / len(scores)
            weights[key].scatter_add_(0, cells.flatten(), of_heads.flatten())
        return weights

    def read(self) -> list[TokenSelections | None]:
        """Returns the selections of each sequence. If the step failed, all are None. Waits for the step."""
        if self._found is None:
            return [None] * len(self._sequences)
        if self._ended is not None:
            self._ended.synchronize()
        return [self._of(number, weights[:, :-1]) for number, weights in enumerate(self._found.numpy())]

    def _of(self, number: int, weights: np.ndarray) -> TokenSelections:
        groups = []
        for layers, layer, of_cells in zip(self._groups, self._layers[number], weights, strict=True):
            cells = np.sort(np.argsort(-of_cells, kind="stable")[:MAX_CELLS])
            cells = cells[of_cells[cells] > 0]
            groups.append(
                LayerSelections((layers[0], layers[-1] + 1), layer, cells.tolist(), of_cells[cells].round(5).tolist())
            )
        length, _ = self._lengths[number]
        return TokenSelections(length + 1, self._cell, self._everything[number], self._exact(number), groups)


def _preference(group: GroupLayout) -> tuple[bool, bool, int]:
    """Returns the sort key of a group of layers. The group with the largest key is reported. It prefers groups without
    a window, then groups that select, then groups with more layers."""
    return group.window is None, group.spec.selects, len(group.layers)
