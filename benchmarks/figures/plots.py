"""Plots of README.md and docs/benchmarks, as SVG files that can be read on light and on dark pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.figures import models, speed
from benchmarks.figures.answers import BEFORE, DEFAULT, FORMER, FOUR_SEEDS
from benchmarks.figures.results import number, pooled, report, ruler, whole

INK = "#808080"
"""Colour of text and lines: a grey as far from white as from black."""

Values = tuple[float, ...]


class Plot(NamedTuple):
    """What a plot shows.

    Attributes:
        kind: ``lines`` over contexts; ``bars`` in groups, one group below another; or ``intervals``, points with their
            intervals in such groups.
        label: the label of the axis of values.
        series: for each label of a series, a list. ``lines``: pairs of a context and a value. ``bars``: a value for
            each group. ``intervals``: for each group a value with its bounds, or an empty tuple if there is none.
        groups: names of the groups.
        logarithmic: whether ``bars`` are drawn as points on a logarithmic axis. ``lines`` always have two logarithmic
            axes.
    """

    kind: Literal["lines", "bars", "intervals"]
    label: str
    series: dict[str, list[Values]]
    groups: tuple[str, ...] = ()
    logarithmic: bool = False

    def figures(self) -> str:
        """Returns all that is drawn, as JSON. The SVG file has this text as its description."""
        return json.dumps([self.kind, self.label, self.series, self.groups, self.logarithmic], ensure_ascii=False)


def decode() -> Plot:
    """Decode speed by context."""
    series: dict[str, list[Values]] = {}
    lines = {
        "turbo": lambda context: speed.decode_cell("turbo", context),
        "full": lambda context: speed.decode_cell("full", context),
        "vLLM": lambda context: speed.vllm_cell("bf16", context),
        "vLLM, fp8 cache": lambda context: speed.vllm_cell("fp8", context),
    }
    for label, cell_of in lines.items():
        cells = ((context, cell_of(context)) for context in speed.CONTEXTS)
        series[label] = [(context, cell[0]) for context, cell in cells if cell]
    return Plot("lines", "decode tokens/s at the largest batch", series)


def prompts() -> Plot:
    """Time to the first token by length."""
    series = {}
    for label, (kv, prefill, *rest) in speed.PROMPTS.items():
        points = ((context, speed.first_token(kv, prefill, context, *rest)) for context in speed.CONTEXTS)
        name = label.replace("`", "").replace("--", "").replace(" 0.26.0", "")
        series[name] = [(context, value) for context, value in points if value is not None]
    del series["turbo, prefill dense"]  # hardly differs from full's
    return Plot("lines", "seconds to the first token", series)


def serving() -> Plot:
    """Mean time to the first token in every case, for both servers."""
    cases = {
        "poisson": "12 short requests a second",
        "limits": "21 short requests a second",
        "mixed-short": "8 short ones beside\nprompts of 122,000 tokens",
        "at-once": "256 short ones at once",
        "long": "61,184 tokens every 4 s",
        "mixed-long": "122,000 tokens every 20 s\nbeside short ones",
    }
    series: dict[str, list[Values]] = {
        label: [(number(speed.SERVING, "ttft_mean_ms", engine=engine, case=case),) for case in cases]
        for label, engine in (("shadowkv", "shadowkv"), ("vLLM", "vllm"))
    }
    return Plot("bars", "milliseconds to the first token, mean", series, tuple(cases.values()), True)


def reuse() -> Plot:
    """Times for chats and questions about documents that the engine computed before."""

    def found(engine: str, case: str, column: str) -> Values:
        return (number(speed.REUSE, column, engine=engine, case=case, reuse="on", tokens=61440),)

    cases = {
        "48 questions at once about\none document: all done": ("shared", "wall_s"),
        "one question after another:\nfirst token, median": ("one-by-one", "ttft_p50_s"),
        "40 chats over 24 documents:\nfirst token, median": ("trace", "ttft_p50_s"),
        "the same, p99": ("trace", "ttft_p99_s"),
    }
    engines = {"shadowkv": "shadowkv", "vLLM, prefix caching": speed.VLLM}
    series = {label: [found(engine, *case) for case in cases.values()] for label, engine in engines.items()}
    return Plot("bars", "seconds", series, tuple(cases), True)


def answers() -> Plot:
    """Points of RULER that the default, and sparse prefill alone, lose on held-out seeds: first today's defaults, then
    the former ones."""
    today = [pooled(folder) for folder in FOUR_SEEDS.values()]
    series: dict[str, list[Values]] = {}
    for label, kv in (("turbo, sparse prefill", DEFAULT), ("full, sparse prefill", "full:prefill=sparse")):
        former = (ruler(folder)[length, "all", kv] for folder, length in FORMER.values())
        own = (scores[kv] if kv in scores else scores[f"{kv},{BEFORE}"] for scores in today)
        series[label] = [score.difference or () for score in (*own, *former)]
    of_today = zip(FOUR_SEEDS, today, strict=True)
    groups = [name if DEFAULT in scores else f"{name}: default before" for name, scores in of_today]
    groups += [f"{name}: former defaults" for name in FORMER]
    return Plot("intervals", "points of RULER lost or gained, beside full attention", series, tuple(groups))


def budgets() -> Plot:
    """RULER's scores by the share of the context that a step attends to."""
    series: dict[str, list[Values]] = {}
    shares = (0.4, 0.8, 1.56, 3.1, 6.25)
    for policy in ("turbo", "shadowkv", "quest"):
        table = ruler("h200/ruler_budgets")
        suffixes = ("@0.004", "@0.008", "@0.0156", "@0.031", "@0.0625")
        if policy != "turbo":
            suffixes = ("@0.004", "@0.008", "", "@0.03125", "@0.0625")
        name = "shadowkv:place=device" if policy == "shadowkv" else policy
        label = "the paper's policy, shadowkv" if policy == "shadowkv" else policy
        series[label] = [table[16384, "all", name + suffix].difference or () for suffix in suffixes]
    groups = tuple(f"{share} % of the tokens" for share in shares)
    return Plot("intervals", "points of RULER at 16K, beside full attention", series, groups)


def weights() -> Plot:
    """Decode speed by the format of weights."""
    shown = {form: label.split(",")[0].split(" by groups")[0] for form, label in models.FORMATS.items()}
    shown["fp8-g128"], shown["fp8"] = "fp8 by groups", "fp8 by rows"
    series: dict[str, list[Values]] = {
        f"turbo, {whole(context)} tokens": [
            (number(models.WEIGHTS, "tokens_per_s", model="llama-3.1-8b", format=form, kv="turbo", context=context),)
            for form in shown
        ]
        for context in models.CONTEXTS
    }
    return Plot("bars", "decode tokens/s at the largest batch, Llama-3.1-8B", series, tuple(shown.values()))


def gpus() -> Plot:
    """Times that a client sees, of a server on two cards and on one."""
    series: dict[str, list[Values]] = {}
    for label, name in (("two cards", "two_cards"), ("one card", "one_card")):
        rate = report(f"h200/two_cards/{name}-rate.json")
        series[label] = [(rate[key],) for key in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms")]
    groups = "first token, mean", "first token, p99", "each token, mean", "gap between tokens, p99"
    return Plot("bars", "milliseconds, 12 requests a second", series, groups)


def cpus() -> Plot:
    """Time per token of our server and of llama.cpp's."""
    series: dict[str, list[Values]] = {
        engine: [(models.peer(*pair, "tpot", f"{engine} median"),) for pair in models.PEERS]
        for engine in ("shadowkv", "llama.cpp")
    }
    groups = tuple(f"{model.split('-')[0]}, {case}" for model, case in models.PEERS)
    return Plot("bars", "milliseconds a token, two threads each", series, groups, True)


PLOTS: dict[str, Callable[[], Plot]] = {
    "decode": decode,
    "prompts": prompts,
    "serving": serving,
    "reuse": reuse,
    "answers": answers,
    "budgets": budgets,
    "weights": weights,
    "gpus": gpus,
    "cpus": cpus,
}

COLOURS = {"turbo": "#d62728", "full": "#8c8c8c", "vLLM": "#9467bd", "quest": "#2ca02c", "llama.cpp": "#9467bd"}
COLOURS |= {"the paper": "#1f77b4", "shadowkv": "#d62728", "two cards": "#d62728", "one card": "#8c8c8c"}
"""Colours of series by the beginning of their labels. If an earlier series has the same colour, a line is dashed and a
bar is paler."""


def draw(plot: Plot, path: Path) -> None:
    """Writes a plot as SVG without a background. The file's description has the plotted figures."""
    import matplotlib
    from matplotlib.figure import Figure

    inks = {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
    inks |= {"axes.labelcolor": INK, "axes.edgecolor": INK, "svg.hashsalt": "shadowkv", "svg.fonttype": "none"}
    with matplotlib.rc_context(inks):
        height = 3.6 if plot.kind == "lines" else 1.3 + 0.24 * len(plot.series) * len(plot.groups)
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axis = figure.subplots()
        {"lines": _lines, "bars": _bars, "intervals": _intervals}[plot.kind](axis, plot)
        axis.set_axisbelow(True)
        axis.grid(color=INK, alpha=0.25, axis="both" if plot.kind == "lines" else "x")
        axis.spines[["top", "right"]].set_visible(False)
        columns = len(plot.series) if sum(map(len, plot.series)) < 70 else 2
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        about = {"Date": None, "Creator": None, "Description": plot.figures()}
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, format="svg", transparent=True, metadata=about)


def _colours(labels: list[str]) -> dict[str, tuple[str, bool]]:
    """Returns the colour of each label, and whether an earlier label has the same colour."""
    colours: dict[str, tuple[str, bool]] = {}
    for label in labels:
        colour = next(COLOURS[start] for start in COLOURS if label.startswith(start))
        colours[label] = colour, any(colour == other for other, _ in colours.values())
    return colours


def _lines(axis: Any, plot: Plot) -> None:
    for label, (colour, again) in _colours(list(plot.series)).items():
        x, y = zip(*plot.series[label], strict=True)
        axis.plot(x, y, marker="o", markersize=4, color=colour, linestyle="--" if again else "-", label=label)
    contexts = sorted({point[0] for points in plot.series.values() for point in points})
    axis.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=plot.label)
    axis.set_xticks(contexts, [whole(context) for context in contexts])
    axis.set_xticks([], minor=True)
    _set_logarithmic(axis.yaxis, (1, 2, 5))


def _set_logarithmic(axis: Any, steps: tuple[int, ...]) -> None:
    """Labels a logarithmic axis at ``steps`` times the powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _rows(plot: Plot) -> tuple[list[str], list[float]]:
    """Returns the labels of the series, and for each series the distance of its rows from the middle of their
    groups."""
    labels = list(plot.series)
    return labels, [0.8 * ((row + 0.5) / len(labels) - 0.5) for row in range(len(labels))]


def _bars(axis: Any, plot: Plot) -> None:
    colours = _colours(list(plot.series))
    labels, beside = _rows(plot)
    for label, offset in zip(labels, beside, strict=True):
        colour, again = colours[label]
        places = [row + offset for row in range(len(plot.groups))]
        lengths = [values[0] for values in plot.series[label]]
        if plot.logarithmic:  # points and not bars, because the axis has no zero
            axis.plot(lengths, places, linestyle="", marker="o", markersize=7, color=colour, label=label)
        else:
            axis.barh(places, lengths, 0.8 / len(labels), color=colour, alpha=0.55 if again else 0.9, label=label)
        for place, length in zip(places, lengths, strict=True):
            text = whole(length) if length >= 100 else f"{length:.3g}"
            axis.annotate(text, (length, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
    if plot.logarithmic:
        axis.set_xscale("log")
        axis.margins(x=0.12)
        _set_logarithmic(axis.xaxis, (1, 3))
    axis.set_xlabel(plot.label)
    _name_groups(axis, plot)


def _intervals(axis: Any, plot: Plot) -> None:
    colours = _colours(list(plot.series))
    labels, beside = _rows(plot)
    for label, offset in zip(labels, beside, strict=True):
        points = [(row + offset, *values) for row, values in enumerate(plot.series[label]) if values]
        places, middles, lows, highs = zip(*points, strict=True)
        reach = [[m - low for m, low in zip(middles, lows, strict=True)]]
        reach.append([high - m for m, high in zip(middles, highs, strict=True)])
        style = {"linestyle": "", "marker": "o", "markersize": 5, "capsize": 3, "color": colours[label][0]}
        axis.errorbar(middles, places, xerr=reach, label=label, **style)
    axis.axvline(0, color=INK, linewidth=1)
    axis.set_xlabel(plot.label)
    _name_groups(axis, plot)


def _name_groups(axis: Any, plot: Plot) -> None:
    axis.set_yticks(range(len(plot.groups)), plot.groups)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(plot.groups) - 0.5, -0.5)
