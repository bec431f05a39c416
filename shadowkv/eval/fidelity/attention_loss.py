"""Measures how much of the exact attention a policy misses in each layer, and how often a step selects chunks that
earlier steps selected.

Two losses are measured: the exact attention mass that the policy misses, and the error of its output. Both compare with
attention of the policy's own queries to all keys and values in full attention's cache. The policy's earlier errors
change these queries, and so are a part of both losses.

Shapes: B sequences, H kv heads, H_q query heads, G query heads per kv head, S positions, d dimensions of a head, and k
chunks that a step can select.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from shadowkv.eval.fidelity.observed import Attended, ObservedCache, spread
from shadowkv.kvcache.decode.decode_batch import DecodeBatch
from shadowkv.kvcache.inspection import exact_elsewhere, exact_keys, rotated_queries
from shadowkv.kvcache.policy.spec import PAGE

SIZES = (1, 2, 4)
"""Sizes of the buffers that ``Reuse`` simulates, in multiples of the number of chunks that a step can select."""


def exact_weights(cache: ObservedCache, layer: int, q: Tensor, batch: DecodeBatch) -> Tensor:
    """Returns the exact attention weights over all positions of dense sequences, float32 [B, H, G, S]. The weights are
    0 past a sequence's end.

    Args:
        q: queries [B, H_q, d], before RoPE.
    """
    q = rotated_queries(cache, q, batch).float() * q.shape[-1] ** -0.5
    within, rows = torch.arange(PAGE, device=q.device), []
    for query, pages, counts in zip(q, batch.pages, batch.counts, strict=True):  # singly, to save memory
        keys = exact_keys(cache, layer, pages).float()  # [H, S, d]
        scores = query.unflatten(0, (len(keys), -1)) @ keys.transpose(1, 2)
        rows.append(scores.masked_fill((within >= counts[:, None]).flatten(), float("-inf")).softmax(-1))
    return torch.stack(rows)


def attended_positions(cache: ObservedCache, seen: Attended, length: int) -> Tensor:
    """Returns which of the first ``length`` positions a step attended to, bool [B, H, length]. Positions past a
    sequence's end count as attended."""
    shape, compressed = cache.shape, seen.batch.compressed
    attended = torch.ones(len(seen.q), shape.num_kv_heads, length, dtype=torch.bool, device=seen.q.device)
    if compressed is None or seen.selected is None:
        return attended
    selected = seen.batch.of_compressed(seen.selected)
    elsewhere = exact_elsewhere(cache, seen.layer, compressed)  # exact chunks are always read
    chunks = elsewhere.shape[-1]
    chosen = torch.zeros(*elsewhere.shape[:2], chunks + 1, dtype=torch.bool, device=elsewhere.device)
    chosen.scatter_(2, selected.where(selected >= 0, chunks), True)
    tail = torch.arange(chunks, device=chosen.device) >= compressed.num_chunks[:, None, None]
    read = (elsewhere | chosen[..., :-1] | tail).repeat_interleave(cache.spec.chunk, dim=2)[..., :length]
    of_compressed = seen.batch.of_compressed(attended)
    of_compressed[..., : read.shape[-1]] = read
    return spread(seen.batch, attended, of_compressed)


class AttentionLoss:
    """Means of both attention losses over steps, for each layer and sequence (row).

    Args:
        exact: the cache of full attention, which decodes each step first.
        cache: the policy's cache, with the same sequences.
        rows: number of sequences.
    """

    def __init__(self, exact: ObservedCache, cache: ObservedCache, rows: int) -> None:
        self.exact, self.cache = exact, cache
        shape = (cache.shape.num_layers, rows)
        self._recall, self._error = (torch.zeros(shape, dtype=torch.float64, device=cache.device) for _ in range(2))
        self._steps = [0] * cache.shape.num_layers

    def take(self, seen: Attended) -> None:
        """Adds the losses of one layer in a step."""
        assert self.exact.batch is not None, "full attention comes first"
        step = cast(DecodeBatch, self.exact.batch.groups[self.exact.place(seen.layer)[0].number][0])
        weights = exact_weights(self.exact, seen.layer, seen.q, step)
        read = attended_positions(self.cache, seen, weights.shape[-1])
        self._recall[seen.layer] += (weights * read.unsqueeze(2)).sum(-1).mean((1, 2))
        exact_out = self.exact.start(seen.layer, seen.q, self.exact.batch)().flatten(1).double()
        self._error[seen.layer] += (seen.out.flatten(1).double() - exact_out).norm(dim=1) / exact_out.norm(dim=1)
        self._steps[seen.layer] += 1

    def mass_recall(self) -> Tensor:
        """Returns the share of the exact attention mass that is on tokens that the policy read, [layers, rows], as a
        mean over query heads. Layers without attention are left out."""
        return self._mean(self._recall)

    def output_error(self) -> Tensor:
        """Returns the relative error of attention's output, [layers, rows]: the norm of the difference to the exact
        output, divided by the norm of the exact output. The heads' outputs are concatenated for the norm. Layers
        without attention are left out."""
        return self._mean(self._error)

    def _mean(self, sums: Tensor) -> Tensor:
        layers = [layer for layer, steps in enumerate(self._steps) if steps]
        return (sums[layers] / self._steps[layers[0]]).cpu()


class Reuse:
    """Measures how often a step selects chunks that earlier steps selected. ``Reuse`` counts hits in simulated buffers,
    which evict the least recently used chunk when they are full. There is one buffer per size, layer, row and kv head.

    Only the selections are needed, so this also works for policies that have no fetch buffer.

    Args:
        chunks: number of chunks of the longest sequence.
    """

    def __init__(self, layers: int, rows: int, heads: int, chunks: int, device: torch.device) -> None:
        # Number of the step that last used each chunk, counted from 1; 0 if no step has used it. The extra last entry
        # is for chunk -1.
        self._used = torch.zeros(layers, rows, heads, chunks + 1, dtype=torch.int32, device=device)
        self._steps = [0] * layers
        self._hits = torch.zeros(len(SIZES), layers, rows, dtype=torch.int64, device=device)
        self._selected = torch.zeros(layers, rows, dtype=torch.int64, device=device)

    def take(self, layer: int, selected: Tensor) -> None:
        """Adds the chunks that a step selects, int64 [B, H, k]; -1 is no chunk. A layer's first step only fills the
        layer's buffers."""
        used, nobody = self._used[layer], self._used.shape[-1] - 1
        places = selected.where(selected >= 0, nobody)
        if self._steps[layer]:
            order = used.argsort(dim=-1, descending=True, stable=True)
            rank = torch.empty_like(order)
            rank.scatter_(-1, order, torch.arange(nobody + 1, device=order.device).expand_as(order))
            known, rank = used.gather(-1, places) > 0, rank.gather(-1, places)
            for number, size in enumerate(SIZES):
                self._hits[number, layer] += (known & (rank < size * selected.shape[-1])).sum((1, 2))
            self._selected[layer] += (selected >= 0).sum((1, 2))
        self._steps[layer] += 1
        used.scatter_(-1, places, self._steps[layer])
        used[..., nobody] = 0

    def hit_rates(self) -> Tensor | None:
        """Returns hit rates over all steps but the first, [sizes, layers, rows], for the layers that select. None if no
        layer selects, or if some layer selected nothing for some row after the first step."""
        layers = [layer for layer, steps in enumerate(self._steps) if steps]
        selected = self._selected[layers]
        return (self._hits[:, layers] / selected).cpu() if layers and selected.all() else None
