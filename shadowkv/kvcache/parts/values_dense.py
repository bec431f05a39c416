"""Values kept as they are, on the device or the host."""

from __future__ import annotations

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.sealed import SealedStore
from shadowkv.kvcache.parts.base import SealedTokens, ValuePart
from shadowkv.ops.attend_selected.sources import DenseRows


class DenseValues(ValuePart):
    def page_fields(self) -> tuple[Field, ...]:
        # Chunk rows (c * d elements of one head) are the unit of transfer, so they are contiguous.
        shape = (self.shape.num_kv_heads, self.chunks, self.spec.chunk, self.shape.head_dim)
        return (Field("values", shape, self.dtype),)

    def seal(self, store: SealedStore, tokens: SealedTokens) -> None:
        store.write_heads("values", tokens.layers, tokens.value_pages, tokens.values)

    def source(self, store: SealedStore, layer: int, batch: SealedBatch) -> DenseRows:
        return DenseRows(store.page["values"][layer], batch.value_pages)
