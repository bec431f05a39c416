"""Exact scores of chunks by the keys of their tokens, for indexes that score every token.

A chunk's score is the log-sum-exp of its tokens' scores. Up to a constant, this is the logarithm of the chunk's share
of the softmax.

Shapes: B rows of a step, N page ids, H kv heads, H_q query heads, C chunks per page, c tokens per chunk, d dimensions
of a head, w dimensions of the scored keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.kvcache.memory.compressed import CompressedBatch
from shadowkv.ops.chunk_scores.reference import mask_logits


def chunk_scores(
    q: Tensor, keys: Tensor, excluded: Tensor, batch: CompressedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores chunks: log sum exp(scale q . k) over each chunk's tokens, in float32.

    Args:
        q: [B, H_q, w].
        keys: [N, H, C, c, w], a view over all pages.
        excluded: bool [N, H, C], a view over all pages: True for chunks that must not be selected.

    Returns:
        Logits and log-sum-exps, as ``chunk_mean_scores`` returns them.
    """
    heads, chunk = keys.shape[1], keys.shape[3]
    queries = scale * q.float().unflatten(1, (heads, -1)).transpose(0, 1)
    # Heads are computed one by one, to limit the memory of float32 keys.
    scores = [queries[h] @ keys[:, h][batch.pages].flatten(1, 3).float().transpose(1, 2) for h in range(heads)]
    logits = torch.stack(scores, dim=1)
    if chunk > 1:
        logits = logits.unflatten(-1, (-1, chunk)).logsumexp(-1)
    return mask_logits(logits, excluded, batch.pages, batch.num_chunks)


def projected_scores(
    q: Tensor, basis: Tensor, keys: Tensor, excluded: Tensor, batch: CompressedBatch
) -> tuple[Tensor, Tensor]:
    """Scores chunks as ``chunk_scores`` does, for keys projected on a basis of their sequence and kv head.

    Args:
        q: [B, H_q, d].
        basis: float32 [states, H, d, w].
        keys: [N, H, C, c, w], projected on the basis, a view over all pages.
        excluded: bool [N, H, C], as in ``chunk_scores``.
    """
    projected = q.float().unflatten(1, (basis.shape[1], -1)) @ basis[batch.states]  # [B, H, G, w]
    return chunk_scores(projected.flatten(1, 2), keys, excluded, batch, q.shape[-1] ** -0.5)
