"""Sign scores in C++ (``csrc/cpu/sketch/``). A table holds the contribution of each byte of signs to a product."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.sketch_queries.cpu import supports
from shadowkv.ops.sketch_queries.reference import SketchQueries

__all__ = ["missing", "sign_scores", "supports"]


def sign_scores(queries: SketchQueries, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor) -> Tensor:
    """Same as the reference, for head dims up to 256. Finite scores are bitwise equal. Page ids from ``num_pages`` on
    are not read."""
    return torch.ops.shadowkv.sign_scores(queries.whole, queries.unit, signs, scale, pages, num_pages)
