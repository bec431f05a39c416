"""Attention over all tokens, captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check_captured(attend: Callable[..., tuple[Tensor, ...]], q: Tensor, keys: Any, values: Any, *ends: Tensor) -> None:
    """A replay has the bits of a call, of other lengths too, which are read on the device."""
    args, (begin, end) = (q, keys, values, *ends), ends
    attend(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(*args)
    for shorter in (0, 3):
        end.sub_(shorter)
        begin.add_(shorter)
        graph.replay()
        for found, expected in zip(captured, attend(*args), strict=True):
            assert torch.equal(found, expected)
