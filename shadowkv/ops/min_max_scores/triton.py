"""Quest's upper bound in Triton: the kernel of ``chunk_mean_scores`` with two keys per chunk."""

from __future__ import annotations

from torch import Tensor

from shadowkv.ops.chunk_mean_scores.triton import score_chunks


def min_max_scores(
    q: Tensor, bounds: Tensor, excluded: Tensor, pages: Tensor, num_chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as the reference. T is the number of programs that share a row. Products are summed in float32."""
    return score_chunks(q, bounds, excluded, pages, num_chunks)
