"""Plots of a throughput sweep: tokens per second by batch, the trade with speed per user, and memory per sequence."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

COLOURS = {
    "full": "tab:gray",
    "shadowkv": "tab:blue",
    "quest": "tab:green",
    "turbo-host": "tab:orange",
    "turbo": "tab:red",
}
"""Of the policies, in the order in which they are shown; others come after them."""


def plot(cells: list[dict[str, Any]], out: Path) -> list[Path]:
    """Writes ``throughput.png``, ``pareto.png`` and ``memory.png`` from a sweep's cells; returns their paths.

    One panel per model and context; cells that did not run are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    order = list(COLOURS)

    def place(cell: dict[str, Any]) -> tuple[int, int, str, int]:
        shown = order.index(cell["kv"]) if cell["kv"] in order else len(order)
        return cell["context"], shown, cell["kv"], cell["batch"]

    for cell in sorted((cell for cell in cells if cell["status"] == "ok"), key=place):
        panels[cell["model"], cell["context"]][cell["kv"]].append(cell)
    written = []

    def draw(name: str, x: str, y: str, labels: tuple[str, str]) -> None:
        figure, axes = pyplot.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.8), squeeze=False)
        for axis, ((model, context), policies) in zip(axes[0], panels.items(), strict=True):
            for kv, rows in policies.items():
                points = [(figure_of(row, x), figure_of(row, y)) for row in rows]
                axis.plot(*zip(*points, strict=True), "o-", label=kv, color=COLOURS.get(kv), markersize=4)
            axis.set(title=f"{model}, {context:,} tokens", xlabel=labels[0], ylabel=labels[1])
            axis.set_xlim(0, 1.05 * axis.get_xlim()[1])
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
            axis.grid(alpha=0.3)
        save(figure, name)

    def bars() -> None:
        figure, axes = pyplot.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.8), squeeze=False)
        for axis, ((model, context), policies) in zip(axes[0], panels.items(), strict=True):
            largest = {kv: rows[-1] for kv, rows in policies.items()}
            device = [row["device_gib_per_sequence"] for row in largest.values()]
            host = [row["host_gib"] / row["batch"] for row in largest.values()]
            axis.bar(list(largest), device, label="device", color="tab:blue")
            axis.bar(list(largest), host, bottom=device, label="pinned host", color="tab:cyan")
            axis.set(title=f"{model}, {context:,} tokens", ylabel="GiB per sequence")
            axis.tick_params(axis="x", labelrotation=15)
            axis.set_ylim(0, 1.1 * max(map(sum, zip(device, host, strict=True))))
        save(figure, "memory.png")

    def save(figure: Any, name: str) -> None:
        shown = {
            label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.tight_layout(rect=(0, 0.07, 1, 1))
        figure.legend(shown.values(), shown.keys(), loc="lower center", ncols=len(shown), frameon=False)
        figure.savefig(out / name, dpi=120)
        pyplot.close(figure)
        written.append(out / name)

    if panels:
        draw("throughput.png", "batch", "decode_tokens_per_s", ("sequences", "decode tokens/s"))
        draw("pareto.png", "tokens_per_s_per_user", "decode_tokens_per_s", ("tokens/s per user", "tokens/s per GPU"))
        bars()
    return written


def figure_of(cell: dict[str, Any], name: str) -> float:
    """A figure of a cell; a user's tokens per second are one per step."""
    return float(1e3 / cell["step_ms"] if name == "tokens_per_s_per_user" else cell[name])
