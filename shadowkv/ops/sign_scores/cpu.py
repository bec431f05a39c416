"""Sign scores in C++, ``csrc/cpu/sketch.h``: what each byte of signs adds to a product stands in a table."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.extension import load_cpu as available
from shadowkv.ops.sign_scores import reference
from shadowkv.ops.sketch_queries.reference import SketchQueries

__all__ = ["available", "sign_scores"]

MOST_BYTES = 32
"""Of a plane: 256 dimensions, whose sums fit in 16 bits."""


def sign_scores(queries: SketchQueries, signs: Tensor, scale: Tensor, pages: Tensor, num_pages: Tensor) -> Tensor:
    """As the reference, to the last bit of finite scores; names of pages past the valid ones are not read.

    A head dim over 256 is left to the reference.
    """
    if signs.shape[-1] > MOST_BYTES:
        return reference.sign_scores(queries, signs, scale, pages, num_pages)
    return torch.ops.shadowkv.sign_scores(queries.whole, queries.unit, signs, scale, pages, num_pages)
