"""An index that scores all tokens by a few columns of skewed queries and keys (InfiniGen, arXiv:2406.19707).

InfiniGen skews queries and keys: it multiplies both by the right singular vectors of the queries. Skewing changes no
score, but concentrates the scores in few columns (dimensions). A token's score uses only some columns: those in which
the absolute values of skewed queries and keys have the largest sum. The paper finds the vectors offline, and chooses
the columns by the whole prompt. Here both come from each sequence's own prompt, per layer and kv head, after RoPE. The
vectors are computed from the last 64 queries of all query heads of a kv head. For each column, two means are added: the
mean absolute value of these queries after skewing, and that of all skewed keys. The columns with the largest sums are
kept. A segment of generated tokens has no queries. Its keys are not skewed, and its columns are chosen by the keys
alone.

In the paper, keys and values are in host memory. It scores one layer ahead, from the input of the previous layer, to
have time for the transfer. This index scores with a layer's own queries, and so avoids the error of scoring ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache import parts, presets
from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import COMPRESSED_AT_ONCE, EXCLUDED, CompressedTokens, FittedTokens, ScoredIndex
from shadowkv.kvcache.parts.scores import projected_scores
from shadowkv.kvcache.policy.spec import PAGE, KVSpec


class Skewed(ScoredIndex):
    kept = 0.3
    """Share of the columns that scores use: the paper's partial weight ratio."""

    @property
    def width(self) -> int:
        return max(1, round(self.kept * self.shape.head_dim))

    def page_fields(self) -> tuple[Field, ...]:
        shape = (self.shape.num_kv_heads, self.chunks, self.spec.chunk, self.width)
        return (Field("skewed_keys", shape, self.dtype),)

    def state_fields(self) -> tuple[Field, ...]:
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        return (
            Field("skew", (heads, dim, self.width), torch.float32),
            Field("skew_directions", (heads, dim, dim), torch.float32),
            Field("skew_asked", (heads, dim), torch.float32),
        )

    def observe(self, store: CompressedStore, layers: slice, states: Tensor, queries: Tensor, first: Tensor) -> None:
        grouped = queries.float().unflatten(3, (self.shape.num_kv_heads, -1))  # [layers, segments, queries, H, G, d]
        asked = grouped.transpose(2, 3).flatten(3, 4)
        # eigh raises an error for infinite or NaN entries, and the error would fail every sequence of the batch. So
        # these entries become 0 here. A sequence whose queries overflowed also gets non-finite logits, and these are
        # reported for this sequence alone.
        gram = (asked.transpose(3, 4) @ asked).nan_to_num_(0.0, 0.0, 0.0)
        directions = torch.linalg.eigh(gram).eigenvectors
        store.state["skew_directions"][layers][:, states] = directions
        store.state["skew_asked"][layers][:, states] = (asked @ directions).abs().sum(3) / max(1, asked.shape[3])

    def fitting_bytes(self, tokens: int) -> int:
        """One head's keys in float32, their projections, and the absolute values of the projections."""
        return 3 * 4 * tokens * self.shape.head_dim

    def compression_bytes(self) -> int:
        """Keys in float32, and their projections."""
        return 12 * COMPRESSED_AT_ONCE * PAGE * self.shape.kv_dim

    def fit(self, store: CompressedStore, layers: slice, states: Tensor, tokens: FittedTokens) -> None:
        for head in range(self.shape.num_kv_heads):
            directions, asked = (
                store.state[name][layers, :, head][:, states] for name in ("skew_directions", "skew_asked")
            )
            size = asked + (tokens.rope_keys[:, :, :, head].float() @ directions).abs().mean(2)
            columns = size.topk(self.width).indices
            kept = directions.gather(3, columns.unsqueeze(2).expand(-1, -1, len(directions[0, 0]), -1))
            store.state["skew"][layers, :, head][:, states] = kept

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        skew = store.state["skew"][tokens.layers][:, tokens.states]
        skewed = (tokens.rope_keys.float().transpose(2, 3) @ skew).transpose(2, 3).to(self.dtype)  # [..., H, width]
        store.write_heads("skewed_keys", tokens.layers, tokens.pages, skewed)

    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        fields = store.state["skew"][layer], store.page["skewed_keys"][layer], store.page[EXCLUDED][layer]
        return projected_scores(q, *fields, batch)


def register() -> None:
    """Registers the index and the preset. The paper selects at most a fifth of the tokens, which is
    ``budget=0.2``."""
    parts.register("index", "skewed", Skewed)
    presets.register("infinigen", KVSpec(index="skewed", chunk=1))
