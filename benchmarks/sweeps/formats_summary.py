"""Makes the outputs of ``formats.py`` from its stages' rows: a CSV file with one line per policy, a Markdown table, and
plots."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.sweeps.plots import kl_by_bytes, score_by_speed
from benchmarks.sweeps.rows import read, write

COLUMNS = {
    "bytes_per_token": ("bytes", {}, "bytes_per_token"),
    "d_keys": ("distortion", {}, "d_keys"),
    "d_values": ("distortion", {}, "d_values"),
    "kl": ("fidelity", {}, "kl"),
    "top1": ("fidelity", {}, "top1"),
    "ruler_16k": ("ruler", {"length": "16384"}, "score"),
    "ruler_32k": ("ruler", {"length": "32768"}, "score"),
    "ruler_16k_difference": ("ruler", {"length": "16384"}, "difference"),
    "ruler_32k_difference": ("ruler", {"length": "32768"}, "difference"),
    "batch_60k": ("throughput", {"context": "61440"}, "batch"),
    "tokens_per_s_60k": ("throughput", {"context": "61440"}, "tokens_per_s"),
    "batch_122k": ("throughput", {"context": "124928"}, "batch"),
    "tokens_per_s_122k": ("throughput", {"context": "124928"}, "tokens_per_s"),
}
"""Columns of summary.csv after ``kv``. For each: the stage's file, the values that a row must have in other columns,
and the column with the figure."""

BEGIN, END = "<!-- table -->", "<!-- end of table -->"
"""Lines that enclose the table."""

Rows = dict[str, list[dict[str, str]]]


def summarise(out: Path, docs: Path) -> None:
    """Joins the stages' files in ``out``. Writes summary.csv and the plots into ``out``, and the table into ``docs``.

    If a policy has several matching rows, the last one counts. Raises ValueError if ``docs`` does not have the lines
    that enclose the table.
    """
    files = ("bytes", "distortion", "fidelity", "ruler", "throughput")
    rows: Rows = {name: read(path) if (path := out / f"{name}.csv").exists() else [] for name in files}
    joined = join(rows)
    write(out / "summary.csv", ["kv", *COLUMNS], joined)
    plots = [path for draw in (score_by_speed, kl_by_bytes) if (path := draw(joined, out)) is not None]
    text = docs.read_text(encoding="utf-8") if docs.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{docs} has no lines {BEGIN} and {END}, between which the table stands")
    images = [f"![{path.stem.replace('_', ' ')}]({os.path.relpath(path, docs.parent)})" for path in plots]
    table = "\n\n".join([markdown(rows), *sources(rows), *images])
    docs.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def policies(rows: Rows) -> list[str]:
    """All policies in any file, in order of appearance."""
    return list(dict.fromkeys(row["kv"] for of_file in rows.values() for row in of_file))


def find(rows: Rows, kv: str, file: str, having: dict[str, str]) -> dict[str, str]:
    """Returns the last row of a policy in a file that has the values ``having``. The dictionary is empty if there is no
    such row."""
    matching = [row for row in rows[file] if row["kv"] == kv and having.items() <= row.items()]
    return matching[-1] if matching else {}


def join(rows: Rows) -> list[dict[str, str]]:
    """Returns the lines of summary.csv. Figures that were not measured are empty."""
    return [
        {"kv": kv}
        | {name: find(rows, kv, file, having).get(figure, "") for name, (file, having, figure) in COLUMNS.items()}
        for kv in policies(rows)
    ]


def markdown(rows: Rows) -> str:
    """Returns the table in Markdown."""
    head = ["`--kv`", "bytes a token", "D of keys", "of values", "KL, nats/token", "top-1, %", "RULER 16K", "32K"]
    of_speed = "batch", "ms a step", "tokens/s", "commit"
    head += [f"{context}: {name}" for context in ("60K", "122K") for name in of_speed]
    lines = [head, ["---", *(["---:"] * (len(head) - 1))]]
    full = float(find(rows, "full", "bytes", {}).get("bytes_per_token", "nan"))
    for kv in policies(rows):
        size, error, kept = (find(rows, kv, file, {}) for file in ("bytes", "distortion", "fidelity"))
        cells = [f"`{kv}`", _shown(size, "bytes_per_token", lambda x: f"{x:,.0f}, {full / x:.2f}x")]
        cells += [_shown(error, name, lambda x: f"{x:.2g}") for name in ("d_keys", "d_values")]
        cells += [_with_error(kept, "kl", 1, "{:.2g}"), _with_error(kept, "top1", 100, "{:.1f}")]
        cells += [_paired(find(rows, kv, "ruler", {"length": length})) for length in ("16384", "32768")]
        for context in ("61440", "124928"):
            speed = find(rows, kv, "throughput", {"context": context})
            cells.append(speed.get("batch", ""))
            cells += [
                _shown(speed, name, form)
                for name, form in (("step_ms", "{:.1f}".format), ("tokens_per_s", "{:,.0f}".format))
            ]
            cells.append(speed.get("commit", "")[:7])
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sources(rows: Rows) -> list[str]:
    """Returns a Markdown list of where each file's figures come from, as one string; an empty list if there are no
    rows."""
    counts = {"prompts": "{} prompts", "prompt_tokens": "{} tokens each", "new_tokens": "{} generated"}
    counts |= {"length": "{} tokens", "samples": "{} samples a task", "context": "{} tokens"}
    told = []
    for file, of_file in rows.items():
        origins: dict[str, set[str]] = {}
        for row in of_file:
            words = [form.format(row[name]) for name, form in counts.items() if row.get(name)]
            device = [] if row["device"] == "none" else [row["device"]]
            where = ", ".join([f"`{row['model']}`", *words, *device, row["commit"][:7]])
            origins.setdefault(where, set()).add(row["kv"])
        told += [f"- `{file}.csv`, {len(kvs)} policies: {where}" for where, kvs in origins.items()]
    return ["\n".join(told)] if told else []


def _shown(row: dict[str, str], name: str, form: Callable[[float], str]) -> str:
    return form(float(row[name])) if row.get(name) else ""


def _with_error(row: dict[str, str], name: str, scale: float, form: str) -> str:
    if not row.get(name):
        return ""
    error = row.get(f"{name}_stderr")
    text = form.format(scale * float(row[name]))
    return f"{text} ± {form.format(scale * float(error))}" if error and float(error) else text


def _paired(row: dict[str, str]) -> str:
    """Returns a score as text, with its difference to that of ``full`` on the same samples."""
    if not row or row["kv"] == "full":
        return _shown(row, "score", "{:.1f}".format)
    error = f" ± {float(row['difference_stderr']):.1f}" if row["difference_stderr"] else ""
    return f"{float(row['score']):.1f} ({float(row['difference']):+.1f}{error})"
