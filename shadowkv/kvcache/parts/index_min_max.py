"""Bounds: the smallest and largest RoPE-rotated key of each chunk, per dimension (Quest, arXiv:2406.10774, section
3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.sealed import SealedStore
from shadowkv.kvcache.parts.base import EXCLUDED, ScoredIndex, SealedTokens


class MinMax(ScoredIndex):
    ops = (*ScoredIndex.ops, "min_max_scores")

    def page_fields(self) -> tuple[Field, ...]:
        return (Field("bounds", (self.shape.num_kv_heads, 2, self.chunks, self.shape.head_dim), self.dtype),)

    def seal(self, store: SealedStore, tokens: SealedTokens) -> None:
        chunks = tokens.rope_keys.unflatten(2, (self.chunks, self.spec.chunk))
        bounds = torch.stack((chunks.amin(3), chunks.amax(3)), dim=2)  # [L, n, 2, C, H, d]
        store.write("bounds", tokens.layers, tokens.pages, bounds.permute(0, 1, 4, 2, 3, 5))

    def logits(self, store: SealedStore, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        bounds, excluded = store.page["bounds"][layer], store.page[EXCLUDED][layer]
        return store.ops.min_max_scores(q, bounds, excluded, batch.pages, batch.num_chunks)
