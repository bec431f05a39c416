"""Ragged begins and ends of rows, sequences of several rows, and a check of calls of ``attend_coded`` that are captured
in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shadowkv.ops.attend_selected.sources import of_rows
from shadowkv.ops.sequence_rows import SequenceRows

BEGIN = [0, 8, 0, 3, 17, 64, 130, 40, 0, 200, 15]
END = [640, 640, 1, 64, 65, 600, 131, 40, 0, 100, 16]
"""Tokens of rows; the last but one ends before it begins."""


def sequences_of(counts: list[int], device: torch.device | str, most: int | None = None) -> SequenceRows:
    """Sequences with the given numbers of rows."""
    starts = torch.tensor([0, *counts], device=device).cumsum(0)
    return SequenceRows(starts, most or max(counts))


def with_rows(args: tuple[Any, ...], counts: list[int]) -> tuple[Any, ...]:
    """Arguments of ``attend_coded`` for several rows of each sequence, from those for one row of each, and the
    sequences. ``counts`` repeats for more sequences than it has numbers."""
    q, keys, values, begin, end = args
    of_all = [counts[row % len(counts)] for row in range(len(q))]
    row = torch.arange(len(q), device=q.device).repeat_interleave(torch.tensor(of_all, device=q.device))
    asked = torch.randn(len(row), *q.shape[1:], device=q.device).to(q.dtype)
    own_keys, own_values = (of_rows(source, row) for source in (keys, values))
    if values.pages is keys.pages:
        own_values = replace(own_values, pages=own_keys.pages)
    return asked, own_keys, own_values, begin[row], end[row], sequences_of(of_all, q.device)


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
