"""Quest's upper bound in Triton: the kernel of ``chunk_mean_scores`` with two keys per chunk."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.chunk_mean_scores.triton import score_chunks


def min_max_scores(
    q: Tensor, bounds: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference, with products summed in float32. T programs share the chunks of a row and kv head, so the
    log-sum-exps have an axis of T, one entry per program."""
    return score_chunks(q, bounds, excluded, pages, num_chunks)
