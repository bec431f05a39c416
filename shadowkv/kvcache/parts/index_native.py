"""The index of layers that were trained with an indexer: MiniMax Sparse Attention (arXiv:2606.13392).

The model computes index queries and index keys beside queries and keys. The cache keeps the index key of every token:
in exact pages beside keys and values, and in compressed pages here. A step scores all of them, and attends to the
blocks with the best scores. ``decode/native.py`` and ``prefill/native.py`` do that.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import CompressedTokens, IndexPart, Selection
from shadowkv.kvcache.policy.shape import Indexer
from shadowkv.kvcache.policy.spec import PAGE

INDEX_KEYS = "index_keys"
"""Field of exact and of compressed pages: the tokens' index keys after RoPE."""


class NativeIndex(IndexPart):
    """Stores index keys after RoPE, in the cache's dtype."""

    reads_excluded = False
    ops: ClassVar[tuple[str, ...]] = ("chunk_mean_scores",)

    def page_fields(self) -> tuple[Field, ...]:
        return (Field(INDEX_KEYS, (1, PAGE, self.shape.head_dim), self.dtype),)

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        assert tokens.index_keys is not None, "layers with an indexer have index keys"
        store.write(INDEX_KEYS, tokens.layers, tokens.pages, tokens.index_keys.transpose(2, 3))

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        raise NotImplementedError("index='native' selects exact tokens, too: see shadowkv/kvcache/decode/native.py")


def selected_blocks(scores: Tensor, positions: Tensor, indexer: Indexer) -> Tensor:
    """Chooses the blocks that queries attend to.

    Args:
        scores: float32 [..., H, N], the largest product with an index key in each of N blocks; -inf for blocks that
            begin after the query.
        positions: int64 [...], positions of the queries.

    Returns:
        bool [..., H, N].
    """
    own = positions.unsqueeze(-1) // indexer.block_size
    local = (own - torch.arange(indexer.local_blocks, device=own.device)).clamp(min=0)
    local = local.unsqueeze(-2).expand(*scores.shape[:-1], -1)
    best = scores.scatter(-1, local, float("inf")).topk(min(indexer.topk_blocks, scores.shape[-1]), dim=-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > float("-inf"))


def largest_of_blocks(scores: Tensor, size: int) -> Tensor:
    """The largest of every ``size`` neighbours of ``scores`` [..., n]: [..., ceil(n / size)]."""
    return pad(scores, (0, -scores.shape[-1] % size), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)
