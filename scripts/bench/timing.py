"""What the benchmarks of single ops share: times of calls from CUDA graphs, and their table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

READ_SPEED = 4.5e12
"""Bytes a second that an H200 reads at the most, measured."""


def microseconds(calls: Sequence[Callable[[], object]], rounds: int = 20) -> float:
    """Median time of one of ``calls`` in a CUDA graph of all."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def report(results: list[dict[str, object]], out: Path | None) -> None:
    """Prints a table and writes the file."""
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    if out:
        content = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
