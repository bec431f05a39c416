"""Keys kept as they are, after RoPE."""

from __future__ import annotations

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.sealed import SealedStore
from shadowkv.kvcache.parts.base import KeyPart, SealedTokens
from shadowkv.ops.attend_selected.sources import DenseRows


class DenseKeys(KeyPart):
    def page_fields(self) -> tuple[Field, ...]:
        shape = (self.shape.num_kv_heads, self.chunks, self.spec.chunk, self.shape.head_dim)
        return (Field("keys", shape, self.dtype),)

    def seal(self, store: SealedStore, tokens: SealedTokens) -> None:
        store.write_heads("keys", tokens.layers, tokens.pages, tokens.rope_keys)

    def source(self, store: SealedStore, layer: int, batch: SealedBatch) -> DenseRows:
        return DenseRows(store.page["keys"][layer], batch.pages)
