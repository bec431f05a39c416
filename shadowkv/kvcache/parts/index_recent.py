"""The newest chunks, whatever they are; with the sink, which is always exact, this is StreamingLLM (arXiv:2309.17453).

The paper renumbers the positions that are left; here every token keeps its own, as under every other index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.sealed import SealedStore
from shadowkv.kvcache.parts.base import RankedIndex, SealedTokens


class Recent(RankedIndex):
    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def seal(self, store: SealedStore, tokens: SealedTokens) -> None:
        return

    def ranks(self, store: SealedStore, layer: int, batch: SealedBatch) -> Tensor:
        rows, pages = batch.pages.shape
        oldest = -float(pages * self.chunks)
        ranks = torch.arange(oldest, 0, dtype=torch.float32, device=batch.pages.device)
        return ranks.expand(rows, self.shape.num_kv_heads, -1)
