"""Quest's upper bound in PyTorch (arXiv:2406.10774, section 3.2)."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.chunk_mean_scores.reference import mask_logits


def min_max_scores(
    q: Tensor, bounds: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """Upper bounds on q . k / sqrt(d) for the keys of each chunk, per query head, in float32.

    Args:
        q: [B, H_q, d], query heads of B sequences, after RoPE.
        bounds: [N, H, 2, C, d], the smallest and the largest entry per dimension of the keys of each of C chunks, views
            over all N pages and their H kv heads.
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
