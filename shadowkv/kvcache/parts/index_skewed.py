"""Scores of all tokens by the few columns that skewed queries and keys are large in (InfiniGen, arXiv:2406.19707).

Queries and keys are multiplied by the right singular vectors of the queries, which changes no score and leaves most of
them in few columns; those with the largest sum of both's absolute values score tokens. The paper finds the vectors
offline and the columns by the whole prompt; here both are of each sequence's own prompt, per layer and kv head, after
the rotation: of the last 64 queries of all its query heads and of all keys, each counting by its mean. Where the prompt
was kept dense its queries are gone: columns are then those of the keys as they are.

The paper scores one layer ahead, by the input of the layer before, so that keys and values cross the bus meanwhile.
That is for the bus alone: here a layer's own queries score, without that speculation's error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shadowkv.kvcache.memory import Field
from shadowkv.kvcache.parts.base import ScoredIndex, SealedTokens
from shadowkv.kvcache.parts.token_scores import projected_scores

if TYPE_CHECKING:
    from shadowkv.kvcache.batch import SealedBatch
    from shadowkv.kvcache.store import Store


class Skewed(ScoredIndex):
    kept = 0.3
    """Share of the columns that is kept: the paper's partial weight ratio."""

    @property
    def width(self) -> int:
        return max(1, round(self.kept * self.shape.head_dim))

    def page_fields(self) -> tuple[Field, ...]:
        shape = (self.shape.num_kv_heads, self.chunks, self.spec.chunk, self.width)
        return (Field("skewed_keys", shape, self.dtype),)

    def state_fields(self) -> tuple[Field, ...]:
        return (Field("skew", (self.shape.num_kv_heads, self.shape.head_dim, self.width), torch.float32),)

    def fit(
        self, store: Store, layer: int, state: int, keys: Tensor, rotated: Tensor, values: Tensor, queries: Tensor
    ) -> None:
        grouped = queries.float().unflatten(1, (self.shape.num_kv_heads, -1))  # [w, H, G, d]
        for head in range(self.shape.num_kv_heads):
            asked, known = grouped[:, head].flatten(0, 1), rotated[:, head].float()
            # Queries that overflowed must not stop everybody: their sequence's logits say so soon enough.
            gram = (asked.T @ asked).nan_to_num_(0.0, 0.0, 0.0)
            skew = torch.linalg.eigh(gram).eigenvectors
            size = (asked @ skew).abs().sum(0) / max(1, len(asked)) + (known @ skew).abs().mean(0)
            columns = size.topk(self.width).indices
            store.state["skew"][layer, state, head] = skew[:, columns]

    def seal(self, store: Store, tokens: SealedTokens) -> None:
        skew = store.state["skew"][tokens.layers][:, tokens.states]
        skewed = (tokens.rotated.float().transpose(2, 3) @ skew).transpose(2, 3).to(self.dtype)  # [L, n, 64, H, w]
        store.write_heads("skewed_keys", tokens.layers, tokens.pages, skewed)

    def logits(self, store: Store, layer: int, q: Tensor, batch: SealedBatch) -> tuple[Tensor, Tensor]:
        fields = store.state["skew"][layer], store.page["skewed_keys"][layer], store.page["excluded"][layer]
        return projected_scores(q, *fields, batch)
