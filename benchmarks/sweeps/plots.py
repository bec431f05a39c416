"""Plots of a throughput sweep: tokens per second, and memory per sequence, of each policy at its largest batch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from shadowkv.eval.plots import add_legend, new_figure, save_figure

COLOURS = {
    "full": "tab:gray",
    "shadowkv": "tab:blue",
    "quest": "tab:green",
    "turbo-host": "tab:orange",
    "turbo": "tab:red",
}
"""Colours of the policies, in the order in which they are shown; others follow."""

OTHERS = "tab:purple"
"""Colour of policies without their own."""

Cell = dict[str, Any]


def plot(cells: list[Cell], out: Path) -> list[Path]:
    """Writes ``throughput.png`` and ``memory.png`` from a sweep's cells; returns their paths.

    One panel per model and context, a bar per policy; cells that did not run are left out.
    """
    panels: dict[tuple[str, int], dict[str, Cell]] = defaultdict(dict)
    for cell in sorted((cell for cell in cells if cell["status"] == "ok"), key=_place):
        panels[cell["model"], cell["context"]][cell["kv"]] = cell  # the largest batch is the last
    if not panels:
        return []
    most = max(map(len, panels.values()))

    def drawn(name: str, label: str, draw: Any) -> Path:
        figure, axes = new_figure(1, len(panels), (4.8, 1.2 + 0.36 * most))
        for axis, ((model, context), policies) in zip(axes, panels.items(), strict=True):
            draw(axis, policies)
            axis.set_title(f"{model}, {context:,} tokens", fontsize=10)
            axis.set_xlabel(label)
            axis.set_ylim(most - 0.5, -0.5)
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
    order = list(COLOURS)
    shown = order.index(cell["kv"]) if cell["kv"] in order else len(order)
    return cell["context"], shown, cell["kv"], cell["batch"]


def _speeds(axis: Any, policies: dict[str, Cell]) -> None:
    """Bars with their batch and, if ``full`` is among them, their speed relative to it."""
    full = policies.get("full")
    speeds = [cell["decode_tokens_per_s"] for cell in policies.values()]
    axis.barh(list(policies), speeds, color=[COLOURS.get(kv, OTHERS) for kv in policies])
    for row, (cell, speed) in enumerate(zip(policies.values(), speeds, strict=True)):
        times = "" if full is None or cell is full else f", {speed / full['decode_tokens_per_s']:.1f}×"
        axis.text(speed, row, f" {speed:,.0f} ({cell['batch']}){times}", va="center", fontsize=8)


def _sizes(axis: Any, policies: dict[str, Cell]) -> None:
    device = [cell["device_gib_per_sequence"] for cell in policies.values()]
    host = [cell["host_gib"] / cell["batch"] for cell in policies.values()]
    axis.barh(list(policies), device, label="device", color="tab:blue")
    axis.barh(list(policies), host, left=device, label="pinned host memory", color="tab:cyan")
    for row, size in enumerate(map(sum, zip(device, host, strict=True))):
        axis.text(size, row, f" {size:.2f}", va="center", fontsize=8)
