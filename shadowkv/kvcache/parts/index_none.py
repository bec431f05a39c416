"""No index: every chunk is attended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import ScoredIndex, SealedTokens
from shadowkv.ops.chunk_mean_scores.reference import mask_logits

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


class AttendAll(ScoredIndex):
    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        return

    def logits(self, store: Store, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        shape = (len(q), self.shape.num_kv_heads, 1, batch.pages.shape[1] * self.chunks)
        zeros = torch.zeros(shape, device=q.device)
        return mask_logits(zeros, store.page["excluded"][layer], batch.pages, batch.num_chunks)
