"""Plots of sweeps: time to first token by prompt length, decode speed and memory of policies, and policies by two
figures (score and speed, or KL and bytes).

python -m benchmarks.sweeps.plots results/prefill/summary.csv   # all engines in the prefill sweep's columns
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sweeps.rows import read
from shadowkv.eval.reports.colours import OTHERS, PRESETS, colour
from shadowkv.eval.reports.plots import add_legend, new_figure, save_figure, set_logarithmic

DASHES = {"dense": "-", "sparse": "--", "auto": "-."}
MARKERS = {"none": "o", "fp8": "s"}

Cell = dict[str, Any]
Lines = Sequence[dict[str, str]]
Point = tuple[float, float]


def plot_prefill(path: Path) -> Path:
    """Plots a CSV file of the prefill sweep. The plot is written beside the file, with the suffix ``.png``. Returns the
    plot's path."""
    lines: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    for row in read(path):
        name = row["engine"], row["kv"], row["prefill"], row["quantization"]
        lines[name].append((int(row["context"]), float(row["ttft_s"])))
    figure, (axis,) = new_figure(1, 1, (6.4, 4.4))
    for (engine, kv, prefill, quantization), points in lines.items():
        axis.plot(
            *zip(*sorted(points), strict=True),
            color=colour(kv) if engine == "shadowkv" else OTHERS,
            linestyle=DASHES.get(prefill, ":"),
            marker=MARKERS.get(quantization, "x"),
            markersize=4,
            label=f"{engine} {kv}, {prefill}" + (f", {quantization}" if quantization != "none" else ""),
        )
    contexts = sorted({context for points in lines.values() for context, _ in points})
    axis.set(xscale="log", xlabel="prompt tokens", ylabel="seconds to the first token")
    axis.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axis.set_xticks([], minor=True)
    set_logarithmic(axis, "y")
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False)
    save_figure(figure, path.with_suffix(".png"))
    return path.with_suffix(".png")


def plot_throughput(cells: list[Cell], out: Path) -> list[Path]:
    """Writes ``throughput.png`` and ``memory.png`` from the cells of the throughput sweep. Returns their paths.

    A plot has a panel per model and context, and a bar per policy. Cells that did not run are left out.
    """
    panels: dict[tuple[str, int], dict[str, Cell]] = defaultdict(dict)
    for cell in sorted((cell for cell in cells if cell["status"] == "ok"), key=_place):
        panels[cell["model"], cell["context"]][cell["kv"]] = cell  # cells are sorted: the largest batch stays
    if not panels:
        return []
    longest = max(map(len, panels.values()))

    def drawn(name: str, label: str, draw: Any) -> Path:
        figure, axes = new_figure(1, len(panels), (4.8, 1.2 + 0.36 * longest))
        for axis, ((model, context), policies) in zip(axes, panels.items(), strict=True):
            draw(axis, policies)
            axis.set_title(f"{model}, {context:,} tokens", fontsize=10)
            axis.set_xlabel(label)
            axis.set_ylim(longest - 0.5, -0.5)
            axis.set_xlim(0, 1.4 * axis.get_xlim()[1])  # room for the text after a bar
            axis.grid(alpha=0.3, axis="x")
            axis.set_axisbelow(True)
        add_legend(figure)
        save_figure(figure, out / name)
        return out / name

    return [
        drawn("throughput.png", "decode tokens/s at the largest batch", _speeds),
        drawn("memory.png", "GiB per sequence", _sizes),
    ]


def _place(cell: Cell) -> tuple[int, int, str, int]:
    order = list(PRESETS)
    shown = order.index(cell["kv"]) if cell["kv"] in order else len(order)
    return cell["context"], shown, cell["kv"], cell["batch"]


def _speeds(axis: Any, policies: dict[str, Cell]) -> None:
    """Draws a bar for each policy's speed, labelled with its batch. If ``full`` is a policy, labels also have the speed
    relative to it."""
    full = policies.get("full")
    speeds = [cell["decode_tokens_per_s"] for cell in policies.values()]
    axis.barh(list(policies), speeds, color=[colour(kv) for kv in policies])
    for row, (cell, speed) in enumerate(zip(policies.values(), speeds, strict=True)):
        times = "" if full is None or cell is full else f", {speed / full['decode_tokens_per_s']:.1f}×"
        axis.text(speed, row, f" {speed:,.0f} ({cell['batch']}){times}", va="center", fontsize=8)


def _sizes(axis: Any, policies: dict[str, Cell]) -> None:
    device = [cell["device_gib_per_sequence"] for cell in policies.values()]
    host = [cell["host_gib"] / cell["batch"] for cell in policies.values()]
    colours = [colour(kv) for kv in policies]
    axis.barh(list(policies), device, label="device", color=colours)
    style = {"color": "white", "edgecolor": colours, "hatch": "///"}
    axis.barh(list(policies), host, left=device, label="pinned host memory", **style)
    for row, size in enumerate(map(sum, zip(device, host, strict=True))):
        axis.text(size, row, f" {size:.2f}", va="center", fontsize=8)


def score_by_speed(lines: Lines, out: Path) -> Path | None:
    """Writes ``score_by_speed.png``, for the RULER length at which most policies have both figures. Returns the plot's
    path, or None if no policy has both figures.

    Args:
        lines: lines of summary.csv.
    """
    at = {length: _points(lines, "tokens_per_s_60k", f"ruler_{length}k_difference") for length in (32, 16)}
    length = max(at, key=lambda length: len(at[length]))
    points = at[length]
    labels = "decode tokens/s at 60K, largest batch", f"RULER {length}K, difference to full, points"
    return _draw(points, _best(points, 1, 1), labels, False, out / "score_by_speed.png")


def kl_by_bytes(lines: Lines, out: Path) -> Path | None:
    """Writes ``kl_by_bytes.png``. Policies with a KL of 0, such as ``full``, are at the lower edge. Returns the plot's
    path, or None if no KL is above 0."""
    points = _points(lines, "bytes_per_token", "kl")
    positive = [kl for _, kl in points.values() if kl > 0]
    if not positive:
        return None
    floor = min(positive) / 3
    points = {kv if kl else f"{kv} (0)": (size, max(kl, floor)) for kv, (size, kl) in points.items()}
    labels = "bytes a token at 60K, all tiers", "KL to full, nats/token"
    return _draw(points, _best(points, -1, -1), labels, True, out / "kl_by_bytes.png")


def _points(lines: Lines, x: str, y: str) -> dict[str, Point]:
    """Returns the points of the policies that have both figures."""
    return {line["kv"]: (float(line[x]), float(line[y])) for line in lines if line[x] and line[y]}


def _best(points: dict[str, Point], x_sign: int, y_sign: int) -> list[Point]:
    """Returns the points that are not dominated by another point in both figures, from left to right. A sign of 1 means
    that more is better, and -1 that less is."""
    kept: list[Point] = []
    for x, y in sorted(points.values(), key=lambda point: (-x_sign * point[0], -y_sign * point[1])):
        if not kept or y_sign * y > y_sign * kept[-1][1]:
            kept.append((x, y))
    return sorted(kept)


def _draw(
    points: dict[str, Point], best: list[Point], labels: tuple[str, str], logarithmic: bool, path: Path
) -> Path | None:
    if not points:
        return None
    figure, (axis,) = new_figure(1, 1, (7.6, 5.2))
    axis.plot(*zip(*best, strict=True), color="tab:gray", linestyle=":", zorder=1)
    for kv, (x, y) in points.items():
        axis.scatter(x, y, color=colour(kv), s=28, zorder=2)
    if logarithmic:
        axis.set_yscale("log")
    axis.margins(0.15, 0.12)
    if logarithmic:
        set_logarithmic(axis, "y")
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.grid(alpha=0.3, which="both")
    figure.draw_without_rendering()  # so that positions of texts are known
    _name(axis, points)
    save_figure(figure, path)
    return path


def _name(axis: Any, points: dict[str, Point]) -> None:
    """Labels each point at the nearest free place."""
    from matplotlib.transforms import Bbox

    renderer = axis.figure.canvas.get_renderer()
    frame = axis.get_window_extent(renderer)
    centres = axis.transData.transform(list(points.values()))
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in centres]
    places = [(side, 9 * row * sign) for row in range(len(points)) for sign in (1, -1) for side in (1, -1)]
    for kv, point in points.items():
        for side, height in places:
            horizontal = "left" if side > 0 else "right"
            offset = {"textcoords": "offset points", "va": "center", "ha": horizontal, "fontsize": 8}
            text = axis.annotate(kv, point, (6 * side, height), **offset)
            box = text.get_window_extent(renderer)
            inside = frame.x0 < box.x0 and box.x1 < frame.x1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            if (side, height) != places[-1]:
                text.remove()
        taken.append(box)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    print(plot_prefill(parser.parse_args().csv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
