"""Reference cache of the model tests: every key and value kept, exact causal attention, the simplest code there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowkv.kvcache.policy.shape import LayerKind
from shadowkv.kvcache.recurrent.recurrent_part import RecurrentPart, Round
from shadowkv.models import Decoder
from shadowkv.ops.apply_rope.tables import RopeConfig, RotaryTables
from shadowkv.ops.recurrence import Spans
from shadowkv.ops.registry import Ops


@dataclass(frozen=True)
class DenseBatch:
    """Whose the packed tokens are: sequence number and position of each, int64 [T]; and which are needed, int64 [n]."""

    sequences: Tensor
    positions: Tensor
    needed: Tensor | None = None

    def of_needed(self, x: Tensor) -> Tensor:
        return x if self.needed is None else x[self.needed]

    @staticmethod
    def of(lengths: list[int], start: int = 0) -> DenseBatch:
        """Sequences of these lengths, packed in order, from position ``start`` on."""
        sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return DenseBatch(sequences, torch.cat([torch.arange(start, start + length) for length in lengths]))

    def block(self, start: int, stop: int) -> DenseBatch:
        """A range of the packed tokens."""
        return DenseBatch(self.sequences[start:stop], self.positions[start:stop])


class DenseCache:
    """Keys after rotation and values per layer, with the sequence and the position of each."""

    def __init__(self, rope: RopeConfig, max_positions: int = 512, kinds: Sequence[LayerKind] = ()) -> None:
        self.tables = {
            layer: RotaryTables(kind.rope, max_positions) for layer, kind in enumerate(kinds) if kind.rope is not None
        }
        self.rotary = RotaryTables(rope, max_positions)
        self.windows = {layer: kind.window for layer, kind in enumerate(kinds)}
        self.kinds = kinds
        self.recurrent: dict[int, dict[str, Tensor]] = {}
        self.kept: dict[int, list[tuple[Tensor, Tensor, DenseBatch]]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor, batch: DenseBatch, index_keys: Tensor | None = None) -> None:
        self.kept.setdefault(layer, []).append((self.rotate(layer, k, batch.positions), v, batch))

    def start(
        self,
        layer: int,
        q: Tensor,
        batch: DenseBatch,
        sinks: Tensor | None = None,
        index_queries: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Attends to all tokens: prompts of these tests are shorter than what an indexer selects."""
        return lambda: self.attend(layer, q, batch, sinks)

    def attend(self, layer: int, q: Tensor, batch: DenseBatch, sinks: Tensor | None = None) -> Tensor:
        keys = torch.cat([k for k, _, _ in self.kept[layer]])
        values = torch.cat([v for _, v, _ in self.kept[layer]])
        sequences = torch.cat([b.sequences for _, _, b in self.kept[layer]])
        positions = torch.cat([b.positions for _, _, b in self.kept[layer]])
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.rotate(layer, q, batch.positions), keys) / q.shape[-1] ** 0.5
        seen = (batch.sequences[:, None] == sequences) & (positions <= batch.positions[:, None])
        if (window := self.windows.get(layer)) is not None:
            seen &= positions > batch.positions[:, None] - window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values.to(weights.dtype)).to(q.dtype)

    def states(self, layer: int, batch: DenseBatch) -> tuple[dict[str, Tensor], tuple[RecurrentPart, ...]]:
        """The states of all sequences by their numbers, and one part of the whole batch."""
        rows, lengths = batch.sequences.unique_consecutive(return_counts=True)
        if layer not in self.recurrent:
            count = int(rows.max()) + 1
            state = self.kinds[layer].state
            self.recurrent[layer] = {array.name: torch.zeros(count, *array.shape) for array in state}
        spans = Spans(None if len(rows) == len(batch.sequences) else tuple(lengths.tolist()), rows, rows)
        return self.recurrent[layer], (RecurrentPart(len(batch.sequences), (Round(None, spans),)),)

    def rotate(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        rotary = self.tables.get(layer, self.rotary)
        config = rotary.config
        cos, sin = rotary.cos[positions, None], rotary.sin[positions, None]
        rotating, rest = x[..., : config.dim], x[..., config.dim :]
        if config.interleaved:
            a, b = rotating[..., 0::2], rotating[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = rotating.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned, rest), dim=-1)


@torch.no_grad()
def packed_logits(
    model: Decoder, sequences: list[list[int]], max_positions: int = 512, ops: Ops | None = None
) -> list[Tensor]:
    """Logits [length, V] of each sequence, all run as one packed batch."""
    batch = DenseBatch.of([len(sequence) for sequence in sequences])
    cache = DenseCache(model.config.rope, max_positions, model.config.layer_kinds)
    model.use(ops or Ops())
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    x = model.embed(ids)
    own = model.layer_inputs(ids, x)
    for layer in model.layers:
        x = torch.add(*layer.start(x, None, cache, batch, own)())
    return list(model.logits(x).split([len(sequence) for sequence in sequences]))
