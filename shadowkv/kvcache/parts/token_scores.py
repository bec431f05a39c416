"""Scores of chunks from the scores of all their tokens: the log-sum-exp, the log of the chunk's softmax mass."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.decode.batch import SealedBatch
from shadowkv.ops.chunk_mean_scores.reference import mask_logits


def chunk_scores(q: Tensor, keys: Tensor, excluded: Tensor, batch: SealedBatch, scale: float) -> tuple[Tensor, Tensor]:
    """log sum exp(scale q . k) over each chunk's tokens, in float32.

    Args:
        q: [B, H_q, w].
        keys: [N, H, C, c, w], views over all pages.
        excluded: bool [N, H, C], views over all pages: chunks that may not be selected.

    Returns:
        As ``chunk_mean_scores``.
    """
    heads, chunk = keys.shape[1], keys.shape[3]
    queries = scale * q.float().unflatten(1, (heads, -1)).transpose(0, 1)
    # Head by head, to bound what the keys take in float32.
    scores = [queries[h] @ keys[:, h][batch.pages].flatten(1, 3).float().transpose(1, 2) for h in range(heads)]
    logits = torch.stack(scores, dim=1)
    if chunk > 1:
        logits = logits.unflatten(-1, (-1, chunk)).logsumexp(-1)
    return mask_logits(logits, excluded, batch.pages, batch.num_chunks)


def projected_scores(
    q: Tensor, basis: Tensor, keys: Tensor, excluded: Tensor, batch: SealedBatch
) -> tuple[Tensor, Tensor]:
    """The same for keys that are kept in a basis of their sequence and kv head.

    Args:
        q: [B, H_q, d].
        basis: float32 [states, H, d, w].
        keys: [N, H, C, c, w], in that basis.
    """
    projected = q.float().unflatten(1, (basis.shape[1], -1)) @ basis[batch.states]  # [B, H, G, w]
    return chunk_scores(projected.flatten(1, 2), keys, excluded, batch, q.shape[-1] ** -0.5)
