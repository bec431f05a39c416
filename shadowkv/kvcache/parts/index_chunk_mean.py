"""Landmarks: the mean rotated key of each chunk (ShadowKV, arXiv:2410.21465, section 4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import ScoredIndex, SealedTokens

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


class ChunkMean(ScoredIndex):
    def page_fields(self) -> tuple[Field, ...]:
        return (Field("landmarks", (self.shape.num_kv_heads, self.chunks, self.shape.head_dim), self.dtype),)

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        means = tokens.rotated.unflatten(2, (self.chunks, self.spec.chunk)).mean(3, dtype=torch.float32)
        store.write("landmarks", tokens.layers, tokens.pages, means.transpose(2, 3).to(self.dtype))

    def logits(self, store: Store, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        landmarks, excluded = store.page["landmarks"][layer], store.page["excluded"][layer]
        return store.ops.chunk_mean_scores(q, landmarks, excluded, batch.pages, batch.num_chunks)
