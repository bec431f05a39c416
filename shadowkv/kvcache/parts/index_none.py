"""No index: every token is attended."""

from __future__ import annotations

from torch import Tensor

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.sealed import SealedStore
from shadowkv.kvcache.parts.base import IndexPart, SealedTokens, Selection


class AttendAll(IndexPart):
    reads_excluded = False

    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def seal(self, store: SealedStore, tokens: SealedTokens) -> None:
        return

    def select(self, store: SealedStore, layer: int, q: Tensor, batch: SealedBatch) -> Selection:
        raise NotImplementedError("without an index nothing is selected: all tokens are attended to")
