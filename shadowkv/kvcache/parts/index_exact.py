"""The oracle: exact scores of every key, to separate what selection costs from what an index misses."""

from __future__ import annotations

from torch import Tensor

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.sealed import SealedStore
from shadowkv.kvcache.parts.base import EXCLUDED, ScoredIndex, SealedTokens
from shadowkv.kvcache.parts.token_scores import chunk_scores
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec


class Exact(ScoredIndex):
    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        if spec.keys != "dense":
            return [f"index='exact' scores the keys themselves: it needs keys='dense', not {spec.keys!r}"]
        return super().unsupported(spec, shape)

    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def scored_bytes(self, tokens: int, chunks: int) -> float:
        return tokens * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize

    def seal(self, store: SealedStore, tokens: SealedTokens) -> None:
        return

    def logits(self, store: SealedStore, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        return chunk_scores(q, store.page["keys"][layer], store.page[EXCLUDED][layer], batch, q.shape[-1] ** -0.5)
