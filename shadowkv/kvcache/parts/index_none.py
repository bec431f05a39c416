"""No index: every token is attended."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.batch import SealedBatch
from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import IndexPart, SealedTokens, Selection
from shadowkv.kvcache.sealed_store import SealedStore


class AttendAll(IndexPart):
    reads_excluded = False

    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def seal(self, store: SealedStore, tokens: SealedTokens) -> None:
        return

    def select(self, store: SealedStore, layer: int, q: Tensor, batch: SealedBatch) -> Selection:
        """All chunks but those of the sink."""
        sink = (batch.first == 0) * self.spec.sink_chunks
        chunks = torch.arange(batch.pages.shape[1] * self.chunks, device=q.device) + sink[:, None]
        chunks = chunks.masked_fill(chunks >= batch.num_chunks[:, None], -1)
        return Selection(chunks.unsqueeze(1).expand(-1, self.shape.num_kv_heads, -1).contiguous())
