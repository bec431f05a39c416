"""What the benchmarks of single ops share: a command line, times of calls from CUDA graphs, and their table."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from shadowkv.eval.provenance import provenance

Case = TypeVar("Case")
Row = dict[str, object]

READ_SPEED = 4.5e12
"""Measured read speed of an H200, in bytes per second."""


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


def run(text: str, available: bool, cases: Sequence[Case], measure: Callable[[Case], list[Row]]) -> int:
    """A benchmark's command line: prints the rows of every case and returns the exit status.

    ``text`` is the program's docstring, whose first line is its help; ``available`` says whether its ops are available.
    """
    parser = argparse.ArgumentParser(description=text.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--cases", type=int, default=len(cases), help="measure only the first N shapes")
    args = parser.parse_args()
    if not available:
        raise SystemExit("needs a GPU and the CUDA ops (csrc/build_cuda.py)")
    torch.manual_seed(0)
    results: list[Row] = []
    for case in cases[: args.cases]:
        for row in measure(case):
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            results.append(row)
        torch.cuda.empty_cache()
    if args.out:
        content = {**provenance(), "results": results}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0
