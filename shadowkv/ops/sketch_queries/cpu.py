"""Queries for a key sketch in C++ (``csrc/cpu/sketch/``)."""

from __future__ import annotations

import torch
from torch import Tensor

from shadowkv.ops.case import Case, unless
from shadowkv.ops.extension import cpu_missing as missing
from shadowkv.ops.sketch_queries.reference import SketchQueries

__all__ = ["missing", "sketch_queries", "supports"]

MAX_DIMS = 256
"""Maximum number of dimensions for which sums fit in 16 bits."""


def supports(case: Case) -> list[str]:
    """Why the C++ sketch cannot serve a case."""
    return unless(case.head_dim <= MAX_DIMS, f"head dim {case.head_dim} is above {MAX_DIMS}")


def sketch_queries(q: Tensor, maps: Tensor, states: Tensor) -> SketchQueries:
    """Same as the reference, except that coordinates near the middle between two whole numbers may be rounded
    differently.

    The head dim is a multiple of 8 up to 256.
    """
    return SketchQueries(*torch.ops.shadowkv.sketch_queries(q.float(), maps, states))
