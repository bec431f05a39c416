"""A plot of times to first token by prompt length, of all engines in a CSV of ``prefill_sweep.py``'s columns.

python -m benchmarks.sweeps.prefill_plots results/prefill/summary.csv
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.sweeps.plots import COLOURS
from benchmarks.sweeps.rows import read

DASHES = {"dense": "-", "sparse": "--", "auto": "-."}
MARKERS = {"none": "o", "fp8": "s"}
OTHERS = "tab:purple"
"""Colour of engines other than this one."""


def plot(path: Path) -> Path:
    """Writes ``path`` with the suffix ``.png``; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, NullLocator

    lines: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    for row in read(path):
        name = row["engine"], row["kv"], row["prefill"], row["quantization"]
        lines[name].append((int(row["context"]), float(row["ttft_s"])))
    figure, axis = pyplot.subplots(figsize=(6.4, 4.4))
    for (engine, kv, prefill, quantization), points in lines.items():
        axis.plot(
            *zip(*sorted(points), strict=True),
            color=COLOURS.get(kv) if engine == "shadowkv" else OTHERS,
            linestyle=DASHES.get(prefill, ":"),
            marker=MARKERS.get(quantization, "x"),
            markersize=4,
            label=f"{engine} {kv}, {prefill}" + (f", {quantization}" if quantization != "none" else ""),
        )
    shown = sorted({context for points in lines.values() for context, _ in points})
    axis.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds to the first token")
    axis.set_xticks(shown, [f"{context:,}" for context in shown])
    axis.xaxis.set_minor_locator(NullLocator())
    seconds = [time for points in lines.values() for _, time in points]
    ticks = [mark * 10.0**power for power in range(-3, 3) for mark in (1, 2, 3, 5)]
    ticks = [tick for tick in ticks if 0.8 * min(seconds) <= tick <= 1.25 * max(seconds)]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
    return target


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    print(plot(parser.parse_args().csv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
