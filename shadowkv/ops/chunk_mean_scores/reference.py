"""Landmark scoring in PyTorch (ShadowKV, arXiv:2410.21465, algorithm 2)."""

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
        scale: float32 [N, H], factor of the landmarks of a page and head. None if the landmarks have none.

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
    """Sets ``logits`` float32 [B, H, G, P * C] to -inf where a chunk may not be selected. Returns them and their
    log-sum-exps [B, H, G, 1]. The other arguments are those of ``chunk_mean_scores``."""
    bits = excluded[pages].transpose(1, 2).flatten(2)
    bits = bits | (torch.arange(bits.shape[-1], device=bits.device) >= num_chunks[:, None, None])
    logits = logits.masked_fill(bits.unsqueeze(2), float("-inf"))
    return logits, logits.logsumexp(-1, keepdim=True)
