"""Plots of fidelity: KL by policy, attention losses by layer, hit rates by buffer size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shadowkv.eval.fidelity.attention_loss import SIZES
from shadowkv.eval.fidelity.measured import Measured, labels, of_policy
from shadowkv.eval.fidelity.report import FIGURES, LAYER_FIGURES, layer_means, over_prompts
from shadowkv.eval.reports.colours import styles
from shadowkv.eval.reports.plots import bar_length, new_figure, save_figure, set_logarithmic


def plot_fidelity(measured: Sequence[Measured], title: str, folder: Path) -> None:
    """Writes all plots."""
    plot_kl(measured, title, folder / "kl.png")
    words = {
        "mass_recall": "share of the exact softmax that is read",
        "output_error": "relative error of attention's output",
    }
    for name, label in words.items():
        plot_layers(measured, name, label, title, folder / f"{name}.png")
    if any(result.hit_rates is not None for result in measured):
        plot_hit_rates(measured, title, folder / "hit_rate.png")


def plot_kl(measured: Sequence[Measured], title: str, path: Path) -> None:
    """Plots the mean KL of each policy as a point with its standard error, on a logarithmic scale. A mean of 0 has no
    point."""
    policies = labels(measured)
    style_of = styles(policies)
    width = 4.5 + 0.08 * max(map(len, policies), default=0)  # room for the labels
    figure, (axis,) = new_figure(1, 1, (width, 1.2 + 0.35 * len(policies)))
    for number, label in enumerate(policies):
        estimate = over_prompts(of_policy(measured, label), FIGURES["mean_kl"])
        if estimate and estimate[0] > 0:
            axis.errorbar(estimate[0], number, xerr=bar_length(estimate[1]), capsize=3, **style_of[label])
    axis.set_yticks(range(len(policies)), policies)
    axis.set_ylim(len(policies) - 0.5, -0.5)
    set_logarithmic(axis, "x")
    axis.set_xlabel("mean KL to full attention, nats per token")
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3, axis="x", which="both")
    save_figure(figure, path)


def plot_layers(measured: Sequence[Measured], name: str, words: str, title: str, path: Path) -> None:
    """Plots one of ``LAYER_FIGURES`` by layer: a line per policy, in a band that shows its standard error."""
    figure, (axis,) = new_figure(1, 1, (7.5, 4.5))
    for label, style in styles(labels(measured)).items():
        estimates = layer_means(of_policy(measured, label), LAYER_FIGURES[name])
        means, errors = [mean for mean, _ in estimates], [bar_length(error) for _, error in estimates]
        axis.plot(means, markersize=4, label=label, **style)
        low, high = ([m + sign * e for m, e in zip(means, errors)] for sign in (-1, 1))
        axis.fill_between(range(len(means)), low, high, color=style["color"], alpha=0.2, linewidth=0)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("layer")
    axis.set_ylabel(words)
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save_figure(figure, path)


def plot_hit_rates(measured: Sequence[Measured], title: str, path: Path) -> None:
    """Plots hit rates, as means over layers, against the buffer size: a line per policy that selects."""
    figure, (axis,) = new_figure(1, 1, (6, 4.2))
    for label, style in styles(labels(measured)).items():
        of_label = of_policy(measured, label)
        estimates = [over_prompts(of_label, FIGURES[f"hit_rate_{size}x"]) for size in SIZES]
        points = [(mean, bar_length(error)) for mean, error in filter(None, estimates)]
        if points:
            means, errors = zip(*points)
            axis.errorbar(SIZES, means, errors, capsize=3, label=label, **style)
    axis.set_xscale("log", base=2)
    axis.set_xticks(SIZES, [f"{size}x" for size in SIZES])
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("buffer size, in multiples of the chunks that a step selects")
    axis.set_ylabel("share of selected chunks in the buffer")
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save_figure(figure, path)
