"""Two source trees on one machine: medians of alternating pairs of timings, cell by cell.

    python scripts/bench/compare_commits.py .baseline . --out foundation.csv                 # one H200
    python scripts/bench/compare_commits.py .baseline . --out foundation.csv --device cpu

Each tree, built, runs in a separate process that imports its package and scripts, and keeps a cell's state while the
other tree is timed: on an H200 both are in memory, so that a cell is filled once. That allows half of Llama-3.1-8B's
layers, with the largest batches that then fit twice, and all prompts are random keys and values; windows have 24 steps,
after 64 untimed ones. A failed cell has no row. Rows of other cells that ``--out`` already has stay.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from compared_cells import CELLS, PAIRS, serve

SHARES = {"before": 0.58, "after": 0.985}
"""Share of the card's memory in use once a process has opened a cell, including the other process's."""


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of a tree")
    parser.add_argument("after", type=Path, help="folder of the other")
    parser.add_argument("--device", choices=CELLS, default="cuda")
    parser.add_argument("--only", nargs="+", help="cells with all of these words")
    parser.add_argument("--out", type=Path, required=True, help="CSV; every timing goes in a JSON file beside it")
    args = parser.parse_args()
    context, pipes = multiprocessing.get_context("spawn"), {}
    for name, share in SHARES.items():
        pipes[name], there = context.Pipe()
        context.Process(target=serve, args=(getattr(args, name).resolve(), share, there), daemon=True).start()
        there.close()  # here, so that the end of its process is noticed

    def ask(name: str, what: tuple[Any, ...] | None) -> dict[str, float] | None:
        try:
            pipes[name].send(what)
            found: dict[str, float] | None = pipes[name].recv()
        except (EOFError, OSError):  # its process has died
            return None
        return found

    log = args.out.with_suffix(".json")
    timings: dict[str, dict[str, list[float]]] = json.loads(log.read_text()) if log.exists() else {}
    for cell in CELLS[args.device]:
        if args.only and not {*args.only} <= {*map(str, cell)}:
            continue
        start, new = time.monotonic(), defaultdict[str, dict[str, list[float]]](lambda: {name: [] for name in pipes})
        if all([ask(name, cell) is not None for name in pipes]):
            for name in [*pipes] * PAIRS:
                for what, value in (ask(name, None) or {}).items():
                    new[what][name].append(value)
        for name in pipes:
            ask(name, ())
        timings |= new
        for what, of in new.items():
            print(what, {name: [float(f"{x:.5g}") for x in values] for name, values in of.items()}, flush=True)
        print(f"{' '.join(map(str, cell))}: {time.monotonic() - start:.0f} s", flush=True)
        log.write_text(json.dumps(timings, indent=1) + "\n")
        with args.out.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("what", "before", "after", "ratio"))
            for what, of in timings.items():
                if not all(of.values()):
                    continue
                before, after = (statistics.median(of[name]) for name in SHARES)
                rows.writerow((what, f"{before:.5g}", f"{after:.5g}", f"{after / before:.4f}"))
    print(args.out.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
