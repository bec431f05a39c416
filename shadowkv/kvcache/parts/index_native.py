"""The index of layers that were trained with an indexer: MiniMax Sparse Attention (arXiv:2606.13392).

The model computes index queries and index keys beside queries and keys. The cache keeps the index key of every token:
in exact pages beside keys and values, and in compressed pages as this part stores it. A step scores all index keys, and
attends to the blocks with the best scores (``decode/native.py`` and ``prefill/native.py``).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import INDEX_KEYS, CompressedTokens, IndexPart, Selection
from shadowkv.kvcache.policy.spec import PAGE


class NativeIndex(IndexPart):
    """Stores index keys in the cache's dtype, after RoPE unless the indexer is pooled."""

    reads_excluded = False
    ops: ClassVar[tuple[str, ...]] = ("chunk_mean_scores",)

    def page_fields(self) -> tuple[Field, ...]:
        return (Field(INDEX_KEYS, (1, PAGE, self.shape.head_dim), self.dtype),)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        assert tokens.index_keys is not None, "layers with an indexer have index keys"
        store.write(INDEX_KEYS, tokens.layers, tokens.pages, tokens.index_keys.transpose(2, 3))

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        raise NotImplementedError("index='native' selects exact tokens, too: see shadowkv/kvcache/decode/native.py")
