"""Indexes that store no data of their own. With ``AttendAll``, steps attend to all tokens. ``Exact`` selects the tokens
with the largest exact scores.

``Exact`` is an oracle for comparisons: what it loses is due to the limited budget, and what another index loses in
addition is due to that index's scores.
"""

from __future__ import annotations

from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import EXCLUDED, CompressedTokens, IndexPart, ScoredIndex, Selection
from shadowkv.kvcache.parts.scores import chunk_scores
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec


class AttendAll(IndexPart):
    reads_excluded = False

    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        return

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        raise NotImplementedError("index='none' selects nothing: a step attends to all tokens")


class Exact(ScoredIndex):
    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        if spec.keys != "dense":
            return [f"index='exact' scores exact keys: it needs keys='dense', not {spec.keys!r}"]
        return super().unsupported(spec, shape)

    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def scored_bytes(self, tokens: int, chunks: int) -> float:
        return tokens * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        return

    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        return chunk_scores(q, store.page["keys"][layer], store.page[EXCLUDED][layer], batch, q.shape[-1] ** -0.5)
