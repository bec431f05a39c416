"""Indexes that store no data of their own: all tokens, the newest tokens, and the tokens with the largest exact scores.

``Recent`` with the sink, which is always exact, is StreamingLLM (arXiv:2309.17453). The paper renumbers the remaining
positions; here every token keeps its position, as under every other index. ``Exact`` is the oracle. Its exact scores
separate the loss of a limited budget from the errors of an index. A chunk's score is the log-sum-exp over its tokens,
the logarithm of its softmax mass (``chunk_scores``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field
from shadowkv.kvcache.memory.compressed import CompressedBatch, CompressedStore
from shadowkv.kvcache.parts.base import EXCLUDED, CompressedTokens, IndexPart, RankedIndex, ScoredIndex, Selection
from shadowkv.kvcache.policy.shape import ModelShape
from shadowkv.kvcache.policy.spec import KVSpec
from shadowkv.ops.chunk_mean_scores.reference import mask_logits


class AttendAll(IndexPart):
    reads_excluded = False

    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        return

    def select(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> Selection:
        raise NotImplementedError("index='none' selects nothing: a step attends to all tokens")


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


class Exact(ScoredIndex):
    @classmethod
    def unsupported(cls, spec: KVSpec, shape: ModelShape) -> list[str]:
        if spec.keys != "dense":
            return [f"index='exact' scores exact keys: it needs keys='dense', not {spec.keys!r}"]
        return super().unsupported(spec, shape)

    def page_fields(self) -> tuple[Field, ...]:
        return ()

    def scored_bytes(self, tokens: int, chunks: int) -> float:
        return tokens * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize

    def compress(self, store: CompressedStore, tokens: CompressedTokens) -> None:
        return

    def logits(self, store: CompressedStore, layer: int, q: Tensor, batch: CompressedBatch) -> tuple[Tensor, Tensor]:
        return chunk_scores(q, store.page["keys"][layer], store.page[EXCLUDED][layer], batch, q.shape[-1] ** -0.5)


def chunk_scores(
    q: Tensor, keys: Tensor, excluded: Tensor, batch: CompressedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores of chunks: log sum exp(scale q . k) over each chunk's tokens, in float32.

    Args:
        q: [B, H_q, w].
        keys: [N, H, C, c, w], a view over all pages.
        excluded: bool [N, H, C], a view over all pages: True for chunks that must not be selected.

    Returns:
        Logits and log-sum-exps, as ``chunk_mean_scores``.
    """
    heads, chunk = keys.shape[1], keys.shape[3]
    queries = scale * q.float().unflatten(1, (heads, -1)).transpose(0, 1)
    # Head by head, which limits the memory of float32 keys.
    scores = [queries[h] @ keys[:, h][batch.pages].flatten(1, 3).float().transpose(1, 2) for h in range(heads)]
    logits = torch.stack(scores, dim=1)
    if chunk > 1:
        logits = logits.unflatten(-1, (-1, chunk)).logsumexp(-1)
    return mask_logits(logits, excluded, batch.pages, batch.num_chunks)


def projected_scores(
    q: Tensor, basis: Tensor, keys: Tensor, excluded: Tensor, batch: CompressedBatch
) -> tuple[Tensor, Tensor]:
    """Scores of chunks as ``chunk_scores``, for keys projected on a basis of their sequence and kv head.

    Args:
        q: [B, H_q, d].
        basis: float32 [states, H, d, w].
        keys: [N, H, C, c, w], projected on the basis, a view over all pages.
        excluded: bool [N, H, C], as in ``chunk_scores``.
    """
    projected = q.float().unflatten(1, (basis.shape[1], -1)) @ basis[batch.states]  # [B, H, G, w]
    return chunk_scores(projected.flatten(1, 2), keys, excluded, batch, q.shape[-1] ** -0.5)
