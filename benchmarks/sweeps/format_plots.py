"""Plots of ``formats_table.py``: score against tokens per second, and KL against bytes, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sweeps.plots import COLOURS, OTHERS

Lines = Sequence[dict[str, str]]
Point = tuple[float, float]


def score_by_speed(lines: Lines, out: Path) -> Path | None:
    """Writes ``score_by_speed.png``, for the RULER length that most policies have; returns its path, or None if no
    policy has both figures.

    Args:
        lines: lines of summary.csv.
    """
    at = {length: _points(lines, "tokens_per_s_60k", f"ruler_{length}k_difference") for length in (32, 16)}
    length = max(at, key=lambda length: len(at[length]))
    points = at[length]
    labels = "decode tokens/s at 60K, largest batch", f"RULER {length}K, difference to full, points"
    return _draw(points, _best(points, 1, 1), labels, False, out / "score_by_speed.png")


def kl_by_bytes(lines: Lines, out: Path) -> Path | None:
    """Writes ``kl_by_bytes.png``; policies whose KL is 0, as that of ``full``, are at its lower edge."""
    points = _points(lines, "bytes_per_token", "kl")
    positive = [kl for _, kl in points.values() if kl > 0]
    if not positive:
        return None
    floor = min(positive) / 3
    points = {kv if kl else f"{kv} (0)": (size, max(kl, floor)) for kv, (size, kl) in points.items()}
    labels = "bytes a token at 60K, all tiers", "KL to full, nats/token"
    return _draw(points, _best(points, -1, -1), labels, True, out / "kl_by_bytes.png")


def _points(lines: Lines, x: str, y: str) -> dict[str, Point]:
    """Points of the policies that have both figures."""
    return {line["kv"]: (float(line[x]), float(line[y])) for line in lines if line[x] and line[y]}


def _best(points: dict[str, Point], x_sign: int, y_sign: int) -> list[Point]:
    """Points that no other matches or exceeds in both figures, from left to right; a sign of 1 means more is better."""
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.6, 5.2))
    axis.plot(*zip(*best, strict=True), color="tab:gray", linestyle=":", zorder=1)
    for kv, (x, y) in points.items():
        axis.scatter(x, y, color=COLOURS.get(kv.split()[0], OTHERS), s=28, zorder=2)
    if logarithmic:
        axis.set_yscale("log")
    axis.margins(0.15, 0.12)
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    _name(axis, points)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _name(axis: Any, points: dict[str, Point]) -> None:
    """Labels the points, each at the nearest free place."""
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
