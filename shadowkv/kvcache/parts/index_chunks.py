"""Indexes that score chunks by their landmarks (ShadowKV, arXiv:2410.21465, section 4.2). A chunk's landmark is the
mean of its RoPE-rotated keys."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import EXCLUDED, CompressedTokens, ScoredIndex

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class ChunkMean(ScoredIndex):
    ops = (*ScoredIndex.ops, "chunk_mean_scores")

    def page_fields(self) -> tuple[Field, ...]:
        return (Field("landmarks", (self.shape.num_kv_heads, self.chunks, self.shape.head_dim), self.dtype),)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        store.write("landmarks", tokens.layers, tokens.pages, self.means(tokens).to(self.dtype))

    def means(self, tokens: CompressedTokens) -> Tensor:
        """Mean keys of chunks, float32 [L, n, H, C, d]."""
        chunks = tokens.rope_keys.unflatten(2, (self.chunks, self.spec.chunk))
        return chunks.mean(3, dtype=torch.float32).transpose(2, 3)

    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        landmarks, excluded = store.page["landmarks"][layer], store.page[EXCLUDED][layer]
        return store.ops.chunk_mean_scores(q, landmarks, excluded, batch.pages, batch.num_chunks)


class ChunkMeanFP8(ChunkMean):
    """Landmarks in float8_e4m3fn, with one scale per page and kv head."""

    def page_fields(self) -> tuple[Field, ...]:
        heads = self.shape.num_kv_heads
        return (
            Field("landmarks", (heads, self.chunks, self.shape.head_dim), torch.float8_e4m3fn),
            Field("landmark_scale", (heads,), torch.float32),
        )

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        means = self.means(tokens)
        scale = means.abs().amax((-2, -1)).clamp(min=1e-30) / LARGEST
        landmarks = (means / scale[..., None, None]).clamp(-LARGEST, LARGEST)  # larger numbers would become NaN
        store.write("landmarks", tokens.layers, tokens.pages, landmarks.to(torch.float8_e4m3fn))
        store.write("landmark_scale", tokens.layers, tokens.pages, scale)

    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        landmarks, excluded = store.page["landmarks"][layer], store.page[EXCLUDED][layer]
        scale = store.page["landmark_scale"][layer]
        return store.ops.chunk_mean_scores(q, landmarks, excluded, batch.pages, batch.num_chunks, scale)
