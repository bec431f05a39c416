"""StreamingLLM (arXiv:2309.17453): a step attends to the sink and to the newest tokens.

The sink is exact under every policy. The paper renumbers the positions of the tokens that remain. Here every token
keeps its position, as under every other index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import CompressedTokens, RankedIndex
from shadowkv.kvcache.policy.spec import KVSpec


class Recent(RankedIndex):
    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        return

    def ranks(self, store: CompressedStore, layer: int, batch: CompressedBatch) -> Tensor:
        rows, pages = batch.pages.shape
        oldest = -float(pages * self.chunks)
        ranks = torch.arange(oldest, 0, dtype=torch.float32, device=batch.pages.device)
        return ranks.expand(rows, self.shape.num_kv_heads, -1)


def register() -> None:
    """Registers the index and the preset. The paper's cache of 1,024 tokens has 4 tokens of the sink and the newest
    1,020, which is ``budget=1020``."""
    parts.register("index", "recent", Recent)
    presets.register("streaming-llm", KVSpec(index="recent"))
