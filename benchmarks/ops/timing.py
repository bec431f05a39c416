"""Functions that benches of single ops share: a registry of benches, arenas like the KV cache's, and times of calls in
CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shadowkv.kvcache.memory.arenas import Field, Tier
from shadowkv.kvcache.presets import preset

Row = dict[str, object]

READ_SPEED = 4.5e12
"""Measured read speed of an H200, in bytes per second."""


def selected_by_turbo(tokens: int) -> int:
    """Returns how many tokens a step of the default policy selects from a context of ``tokens`` tokens."""
    return int(preset("turbo").budget_tokens(np.asarray(tokens)))


class Bench(NamedTuple):
    """The shapes to measure, a function that measures one shape and returns rows of results, and a function that tells
    whether the op is available."""

    cases: Sequence[Any]
    measure: Callable[[Any], list[Row]]
    available: Callable[[], bool]


BENCHES: dict[str, Bench] = {}


def bench(
    cases: Sequence[Any], available: Callable[[], bool] = torch.cuda.is_available
) -> Callable[[Callable[[Any], list[Row]]], Callable[[Any], list[Row]]]:
    """Returns a decorator that registers a function as the bench of its name. The function measures one case."""

    def register(measure: Callable[[Any], list[Row]]) -> Callable[[Any], list[Row]]:
        BENCHES[measure.__name__] = Bench(cases, measure, available)
        return measure

    return register


def arena(fields: Sequence[Field], rows: int, columns: int, most_layers: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Allocates pages of random bytes on the GPU, laid out as in the KV cache.

    Args:
        most_layers: maximum number of layers. If it is above 1, there are at least two layers, with 1 GB in total, so
            that a call on one layer does not find its bytes in the L2 cache.

    Returns:
        A view of each field, [layers, ...], and page ids [rows, columns], shuffled.
    """
    size, device = -(-sum(field.nbytes for field in fields) // 256) * 256, torch.device("cuda")
    layers = 1 if most_layers == 1 else max(2, min(most_layers, 2**30 // (size * rows * columns)))
    tier = Tier("device", layers, size, rows * columns, device)
    tier.arena.random_()
    page_ids = torch.tensor(tier.allocate(rows * columns)).to(device)
    return tier.views(fields), page_ids[torch.randperm(len(page_ids), device=device)].view(rows, columns)


def microseconds(calls: Sequence[Callable[[], object]], rounds: int = 20) -> float:
    """Returns the median time of one call, from replays of a CUDA graph that has all ``calls``."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return statistics.median(replay_times(graph, rounds + 2)[2:]) / len(calls)


def replay_times(graph: torch.cuda.CUDAGraph, rounds: int) -> list[float]:
    """Returns the microseconds of each of ``rounds`` replays of a graph."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return times


def against_floor(nbytes: float, time: float, speed: float = READ_SPEED) -> Row:
    """Returns the columns for a call that moves ``nbytes`` in ``time`` microseconds. The floor is the time for
    ``nbytes`` at ``speed``."""
    floor = nbytes / speed * 1e6
    return {
        "us": round(time, 1), "MB": round(nbytes / 1e6, 1), "GB/s": round(nbytes / time / 1e3),
        "floor us": round(floor, 1), "times the floor": round(time / floor, 2),
    }  # fmt: skip
