"""Tables of fidelity: means over prompts with their standard errors, for each policy and for each layer under each
policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from shadowkv.eval.fidelity.attention_loss import SIZES
from shadowkv.eval.fidelity.measured import Measured, by_kind, labels, of_policy
from shadowkv.eval.records.predictions import write_csv, write_text
from shadowkv.eval.reports.statistics import markdown_table, mean_and_error

Figure = Callable[[Measured], float | None]
Cell = float | str
LayerFigure = Callable[[Measured], list[float] | None]


def _hit_rates(number: int) -> LayerFigure:
    return lambda result: None if result.hit_rates is None else result.hit_rates[number]


LAYER_FIGURES: dict[str, LayerFigure] = {
    "mass_recall": lambda result: result.mass_recall,
    "output_error": lambda result: result.output_error,
    **{f"hit_rate_{size}x": _hit_rates(number) for number, size in enumerate(SIZES)},
}
"""Figures that are measured for every layer."""


def _over_layers(figure: LayerFigure) -> Figure:
    def mean(result: Measured) -> float | None:
        values = figure(result)
        return None if values is None else fmean(values)

    return mean


FIGURES: dict[str, Figure] = {
    "mean_kl": lambda result: result.mean_kl,
    "max_kl": lambda result: result.max_kl,
    "top1_agreement": lambda result: result.top1_agreement,
    "acceptance_rate": lambda result: fmean(result.acceptance_rates),
    "perplexity_difference": lambda result: result.perplexity_difference,
    "attended_tokens": lambda result: result.attended_tokens,
    "least_kept_energy": lambda result: result.least_kept_energy,
    **{name: _over_layers(figure) for name, figure in LAYER_FIGURES.items()},
}
"""Columns of fidelity.csv. For figures that are measured for every layer, the column has the mean over layers."""


def over_prompts(measured: Sequence[Measured], figure: Figure) -> tuple[float, float] | None:
    """Returns a figure's mean over prompts and the mean's standard error, which is NaN for a single prompt. None if no
    prompt has the figure."""
    values = [value for result in measured if (value := figure(result)) is not None]
    return mean_and_error(values) if values else None


def layer_means(measured: Sequence[Measured], figure: LayerFigure) -> list[tuple[float, float]]:
    """Returns, for every layer, a figure's mean over prompts and the mean's standard error. The list is empty if no
    prompt has the figure."""
    values = [value for result in measured if (value := figure(result)) is not None]
    return [mean_and_error(layer) for layer in zip(*values)]


def write_tables(measured: Sequence[Measured], model: str, tokens: int, folder: Path) -> None:
    """Writes fidelity.csv, layers.csv and summary.md.

    Args:
        tokens: number of tokens of each prompt.
    """
    write_csv(folder / "fidelity.csv", _policy_rows(measured, model, tokens))
    write_csv(folder / "layers.csv", _layer_rows(measured, model))
    write_text(folder / "summary.md", markdown(measured, model, tokens))


def _policy_rows(measured: Sequence[Measured], model: str, tokens: int) -> Iterator[list[Cell]]:
    yield ["model", "kv", "length", "budget", "texts", "prompts", "steps", *_with_errors(FIGURES)]
    for kind, of_kind in by_kind(measured).items():
        for label in labels(of_kind):
            of_label = of_policy(of_kind, label)
            cells = chain.from_iterable(_cells(over_prompts(of_label, figure)) for figure in FIGURES.values())
            yield [model, of_label[0].kv, tokens, of_label[0].budget, kind, len(of_label), of_label[0].steps, *cells]


def _layer_rows(measured: Sequence[Measured], model: str) -> Iterator[list[Cell]]:
    yield ["model", "policy", "layer", *_with_errors(LAYER_FIGURES)]
    for label in labels(measured):
        of_label = of_policy(measured, label)
        columns = [layer_means(of_label, figure) for figure in LAYER_FIGURES.values()]
        for layer in range(len(of_label[0].mass_recall)):
            cells = [_cells(column[layer] if column else None) for column in columns]
            yield [model, label, layer, *chain.from_iterable(cells)]


def markdown(measured: Sequence[Measured], model: str, tokens: int) -> str:
    """Returns the text of summary.md: a table for each kind of text."""
    kinds = by_kind(measured)
    tables = [
        _table(of_kind, model, tokens, "" if len(kinds) == 1 else f" of {kind}") for kind, of_kind in kinds.items()
    ]
    return "\n".join(tables)


def _table(measured: Sequence[Measured], model: str, tokens: int, texts: str) -> str:
    shown = {
        "KL, nats/token": ("mean_kl", "{:.2g}"),
        "top-1, %": ("top1_agreement", "{:.2%}"),
        "acceptance, %": ("acceptance_rate", "{:.2%}"),
        "perplexity": ("perplexity_difference", "{:+.2g}"),
        "attended": ("attended_tokens", "{:.0f}"),
        "mass recall": ("mass_recall", "{:.3f}"),
        "output error": ("output_error", "{:.2g}"),
        **{f"hits {size}x": (f"hit_rate_{size}x", "{:.2f}") for size in SIZES},
    }
    table = [["policy", *shown], ["---", *(["---:"] * len(shown))]]
    for label in labels(measured):
        of_label = of_policy(measured, label)
        figures = ((over_prompts(of_label, FIGURES[name]), form) for name, form in shown.values())
        table.append([label, *(_shown(figure, form) for figure, form in figures)])
    of_label = of_policy(measured, measured[0].policy)
    full = fmean(result.full_perplexity for result in of_label)
    note = (
        f"Model `{model}`. Prompts{texts} of {tokens} tokens ({len(of_label)}), {of_label[0].steps} tokens generated by"
        f" `full` after each; mean ± standard error over prompts."
        f" Perplexity: the increase over `full`'s {full:.3f}."
    )
    return markdown_table(note, table)


def _shown(estimate: tuple[float, float] | None, form: str) -> str:
    if estimate is None:
        return "–"
    mean, error = estimate
    plain = form.replace("+", "")
    return form.format(mean).rstrip("%") + ("" if not error > 0 else f" ± {plain.format(error).rstrip('%')}")


def _cells(estimate: tuple[float, float] | None) -> list[Cell]:
    """Cells of a figure and its error."""
    if estimate is None:
        return ["", ""]
    return [float(f"{estimate[0]:.6g}"), "" if math.isnan(estimate[1]) else float(f"{estimate[1]:.3g}")]


def _with_errors(names: Iterable[str]) -> list[Cell]:
    return [column for name in names for column in (name, f"{name}_stderr")]
