"""Rows of the table of serving. Each row has a JSON file with its origin and with the times of every request."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.cases import LIMITS
from benchmarks.sweeps.rows import append, read, show
from shadowkv.bench.serving_stats import Record, details, figures, goodput

COLUMNS = (
    *("engine", "case", "rate", "ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "tpot_p99_ms", "itl_p99_ms"),
    *("output_tokens_per_s", "goodput"),
)


class Table:
    """``summary.csv`` in a folder, with a row for each engine and case, and a file ``ENGINE-CASE.json`` for each
    row."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "summary.csv"
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, engine: str, case: str) -> bool:
        """Whether a row has been measured."""
        return self.path.exists() and any((row["engine"], row["case"]) == (engine, case) for row in read(self.path))

    def add(
        self, engine: str, case: str, rate: float | None, result: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        """Appends a row, prints it, and writes ``result`` and ``about`` (the row's origin) into the row's JSON file."""
        names = {column: f"{column.split('_')[1]}_{column.split('_')[0]}_ms" for column in COLUMNS[3:8]}
        row = {"engine": engine, "case": case, "rate": rate, **{name: result[of] for name, of in names.items()}}
        row |= {"output_tokens_per_s": result["output_throughput"], "goodput": result["request_goodput"]}
        detail = self.folder / f"{engine.replace(' ', '-')}-{case}.json"
        detail.write_text(json.dumps({**about, "rate": rate, **result}, indent=1) + "\n", encoding="utf-8")
        append(self.path, COLUMNS, [{name: show(row[name]) for name in COLUMNS}])
        print(" ".join(f"{name}={show(row[name])}" for name in COLUMNS), flush=True)


def result_of(records: Sequence[Record], asked: int, start: float, end: float) -> dict[str, Any]:
    """Returns the figures of the records, the goodput within ``LIMITS``, and the times of every request. ``asked`` is
    the number of requests that were sent."""
    found = figures(records, len(records), start, end, percentiles=(50, 90, 99))
    found |= goodput(records, asked, end - start, LIMITS)
    return {**found, "requests": [details(record, start) for record in records]}


def device() -> str | None:
    """Returns the names of the GPU and its driver version. None without a GPU."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None
