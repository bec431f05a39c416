"""Selection in two levels in C++ (``csrc/cpu/sketch/``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.sampling import Sampling
from shadowkv.ops.select_by_sketch import reference
from shadowkv.ops.sign_scores.cpu import supports
from shadowkv.ops.sketch_queries.reference import SketchQueries

__all__ = ["missing", "select_by_sketch", "supports"]


def select_by_sketch(
    queries: SketchQueries,
    coarse: Tensor,
    signs: Tensor,
    rest: Tensor,
    scale: Tensor,
    pages: Tensor,
    num_pages: Tensor,
    budget: Tensor,
    chunk: int,
    k: int,
    sampling: Sampling | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Same as the reference, for head dims up to 256. Page ids from ``num_pages`` on are not read."""
    heads, fields = signs.shape[1], (coarse, signs, rest, scale, pages, num_pages)
    counts = torch.zeros_like(budget) if sampling is None else sampling.counts.where(budget > 0, 0)
    keep = reference.kept_runs(num_pages, budget + counts, chunk)
    numbers = torch.stack((keep, reference.sampled_runs(num_pages, keep, sampling), budget, counts))
    length = reference.mean_length(queries, heads)
    random = torch.stack(sampling.uniform(layer, heads)) if sampling else length.new_zeros(2, *length.shape).long()
    to_logit, sharpness = queries.unit * queries.length, (reference.RUN_SHARPNESS, reference.CHUNK_SHARPNESS)
    selected, log_weight = torch.ops.shadowkv.select_by_sketch(
        queries.whole, to_logit, *fields, numbers, length, *sharpness, random, chunk, k
    )
    return selected, None if sampling is None else log_weight
