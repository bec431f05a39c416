"""Scores chunks in PyTorch: by landmarks (ShadowKV, arXiv:2410.21465, algorithm 2), or by Quest's upper bound
(arXiv:2406.10774, section 3.2). Also finds outliers (ShadowKV, section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_mean_scores(
    q: Tensor, landmarks: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the score q . landmark / sqrt(d) for every chunk and query head. A landmark is a chunk's mean key.
    Scores are float32, because bfloat16 scores would tie.

    There are B rows with P pages each, C chunks in a page, and G query heads per kv head.

    Args:
        q: [B, H_q, d], after RoPE.
        landmarks: [N, H, C, d], views over all pages, in the dtype of ``q``, or in float8_e4m3fn with a ``scale``.
        excluded: bool [N, H, C], views over all pages, true for chunks that may not be selected.
        pages: int64 [B, P].
        num_chunks: int64 [B], chunks of each row.
        scale: float32 [N, H], factor of the landmarks of a page and head. None if the landmarks have no factor.

    Returns:
        Scores float32 [B, H, G, P * C], -inf where a chunk may not be selected, and their log-sum-exps over T disjoint
        ranges of chunks, float32 [B, H, G, T].
    """
    batch, _, dim = q.shape
    keys = landmarks[pages].float()  # [B, P, H, C, d]
    if scale is not None:
        keys = keys * scale[pages][..., None, None]
    keys = keys.transpose(1, 2).flatten(2, 3)
    logits = q.view(batch, keys.shape[1], -1, dim).float() @ keys.transpose(-1, -2)
    return mask_logits(logits * dim**-0.5, excluded, pages, num_chunks)


def mask_logits(logits: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Sets ``logits`` float32 [B, H, G, P * C] to -inf where a chunk may not be selected. Returns the result and its
    log-sum-exps [B, H, G, 1]. The other arguments are those of ``chunk_mean_scores``."""
    bits = excluded[pages].transpose(1, 2).flatten(2)
    bits = bits | (torch.arange(bits.shape[-1], device=bits.device) >= num_chunks[:, None, None])
    logits = logits.masked_fill(bits.unsqueeze(2), float("-inf"))
    return logits, logits.logsumexp(-1, keepdim=True)


def min_max_scores(
    q: Tensor, bounds: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes, for each chunk and query head, an upper bound on q . k / sqrt(d) over the chunk's keys k, in float32.

    Args:
        q: [B, H_q, d], query heads of B sequences, after RoPE.
        bounds: [N, H, 2, C, d], views over all N pages and their H kv heads. For each of C chunks and each dimension:
            the smallest and the largest entry of the chunk's keys.
        excluded: bool [N, H, C], views over all pages, true for chunks that may not be selected.
        pages: int64 [B, P], page ids of each row.
        num_chunks: int64 [B], chunks of each row.

    Returns:
        Same as ``chunk_mean_scores``.
    """
    batch, _, dim = q.shape
    low, high = bounds[pages].permute(3, 0, 2, 1, 4, 5).flatten(3, 4).float()  # [B, H, P * C, d] each
    grouped = q.view(batch, low.shape[1], -1, dim).float()
    logits = grouped.clamp(min=0) @ high.transpose(-1, -2) + grouped.clamp(max=0) @ low.transpose(-1, -2)
    return mask_logits(logits * dim**-0.5, excluded, pages, num_chunks)


def find_outliers(rope_keys: Tensor, chunk: int, count: int, sink: int = 1) -> Tensor:
    """Finds the chunks that their mean key represents worst. A chunk is ranked by the lowest cosine similarity between
    its mean key and any of its keys.

    Args:
        rope_keys: [S, H, d], keys of S tokens after RoPE. S is a multiple of ``chunk``.
        chunk: tokens of a chunk.
        count: number of chunks to find per kv head, at most S / chunk - ``sink``.
        sink: number of chunks at the start that are not candidates.

    Returns:
        int64 [H, count], chunk numbers.
    """
    if not count:
        return torch.empty(rope_keys.shape[1], 0, dtype=torch.int64, device=rope_keys.device)
    members = rope_keys.unflatten(0, (-1, chunk)).float()  # [chunks, c, H, d]
    mean = members.mean(1, keepdim=True)
    norms = members.norm(dim=-1) * mean.norm(dim=-1)
    worst = ((members * mean).sum(-1) / norms.clamp(min=1e-12)).amin(1)  # [chunks, H]
    return worst[sink:].topk(count, dim=0, largest=False).indices.T + sink
