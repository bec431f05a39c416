"""No index: every chunk is attended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import IndexPart, SealedTokens

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


class AttendAll(IndexPart):
    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def seal(self, store: Store, layer: int, tokens: SealedTokens) -> None:
        return

    def scores(self, store: Store, layer: int, q: Tensor, batch: SealedBatch) -> Tensor:
        excluded = store.excluded(layer, batch)
        return q.new_zeros(excluded.shape).float().masked_fill(excluded, float("-inf"))
