"""Sign scores in C++, ``csrc/cpu/sketch/``: a table holds the contribution of each byte of signs to a product."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.sketch_queries.cpu import supports
from shadowkv.ops.sketch_queries.reference import SketchQueries

__all__ = ["missing", "sign_scores", "supports"]


def sign_scores(queries: SketchQueries, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor) -> Tensor:
    """Same as the reference, to the last bit of finite scores; ids of pages past the valid ones are not read.

    The head dim is at most 256.
    """
    return torch.ops.shadowkv.sign_scores(queries.whole, queries.unit, signs, scale, pages, num_pages)
