"""Quest (arXiv:2406.10774, section 3.2): an index that scores chunks by bounds of their RoPE-rotated keys. The bounds
are the smallest and the largest value of each dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import EXCLUDED, CompressedTokens, ScoredIndex
from shadowkv.kvcache.policy.spec import KVSpec


class MinMax(ScoredIndex):
    ops = (*ScoredIndex.ops, "min_max_scores")

    def page_fields(self) -> tuple[Field, ...]:
        return (Field("bounds", (self.shape.num_kv_heads, 2, self.chunks, self.shape.head_dim), self.dtype),)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        chunks = tokens.rope_keys.unflatten(2, (self.chunks, self.spec.chunk))
        bounds = torch.stack((chunks.amin(3), chunks.amax(3)), dim=2)  # [layers, pages, 2, chunks, H, d]
        store.write("bounds", tokens.layers, tokens.pages, bounds.permute(0, 1, 4, 2, 3, 5))

    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        bounds, excluded = store.page["bounds"][layer], store.page[EXCLUDED][layer]
        return store.ops.min_max_scores(q, bounds, excluded, batch.pages, batch.num_chunks)


def register() -> None:
    """Registers the index and the preset, whose chunks are the paper's pages of 16 tokens."""
    parts.register("index", "min-max", MinMax)
    presets.register("quest", KVSpec(index="min-max", chunk=16))
