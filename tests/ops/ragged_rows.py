"""Ragged begins and ends of rows, and a check of calls of ``attend_coded`` that are captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BEGIN = [0, 8, 0, 3, 17, 64, 130, 40, 0, 200, 15]
END = [640, 640, 1, 64, 65, 600, 131, 40, 0, 100, 16]
"""Tokens of rows; the last but one ends before it begins."""


def check_replays(attend: Callable[..., tuple[Tensor, Tensor]], args: tuple[Any, ...]) -> None:
    """Checks that replays give the same bits as eager calls, also for other lengths. The last two arguments are begins
    and ends, which the kernel reads on the device."""
    begin, end = args[-2:]
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
