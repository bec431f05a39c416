"""Rows of a sweep in a CSV file. Each row is appended when it is measured, and existing rows are not measured again.

This module imports neither shadowkv nor PyTorch, because benchmarks of other engines also use it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPLAYED = ("replayed_density",)
"""Column with the density of the random blocks that sparse prefills attend to instead of selected ones. It has no
meaning for dense prefills."""

ABOUT = ("commit", "command", "device", "spec")
"""Last columns of every file. They say where a row comes from."""

Kind = tuple[tuple[str, ...], tuple[str, ...]]

PREFILL = (("engine", "kv", "prefill", "quantization", "context"), ("ttft_s", "first_ttft_s", "attention_density"))
SHORT = ("engine", "kv", "context"), ("ttft_s", "full_ttft_s", "ratio")
MIXED = (
    ("engine", "kv", "prefill", "quantization", "requests", "input", "output"),
    ("wall_s", "output_tokens_per_s", "ttft_mean_s", "tpot_ms"),
)
REUSE = (
    ("case", "engine", "kv", "prefill", "quantization", "reuse", "tokens"),
    ("wall_s", "ttft_p50_s", "ttft_p99_s", "output_tokens_per_s")
    + ("hit_rate_device", "hit_rate_host", "hit_rate_disk"),
)
GAPS = (
    ("engine", "kv", "prefill", "quantization", "decoding", "behind", "probe", "probe_behind"),
    ("gap_p50_ms", "gap_p99_ms", "probe_ttft_s"),
)
RANKS = ("case", "gpus", "kv", "context"), ("batch", "tokens_per_s", "step_ms", "ttft_s", "ratio")
BYTES = ("model", "kv", "context"), ("device_bytes_per_token", "host_bytes_per_token", "bytes_per_token")
DISTORTION = ("model", "kv", "prompts", "prompt_tokens"), ("d_keys", "d_values")
FIDELITY = (("model", "kv", "prompts", "prompt_tokens", "new_tokens"), ("kl", "kl_stderr", "top1", "top1_stderr"))
RULER = (("model", "kv", "length", "samples", "tasks"), ("score", "stderr", "difference", "difference_stderr"))
WEIGHTS = (
    ("model", "format", "kv", "gpus", "context", "batch"),
    ("ttft_s", "step_ms", "tokens_per_s", "weights_gib", "kv_gib_per_sequence", "load_s", "engine", *REPLAYED),
)
THROUGHPUT = ("model", "kv", "context"), ("batch", "step_ms", "tokens_per_s", "status")
DRAFTED_ANSWERS = (
    ("model", "kv", "method", "k", "dtype", "length", "task", "sample"),
    ("prompt_tokens", "tokens", "equal", "gap", "error", "near_ties", "drafted", "accepted"),
)
"""Kinds of files, from ``PREFILL`` on: columns that identify a row, and columns with figures. ``BYTES``,
``DISTORTION``, ``FIDELITY``, ``RULER`` and ``THROUGHPUT`` are the files of the stages of ``formats.py``. These and
``DRAFTED_ANSWERS`` have no column ``REPLAYED``."""

Row = Mapping[str, Any]


class Rows:
    """A file of rows. ``kind`` has its columns, such as ``PREFILL``.

    Raises ValueError if the file exists and has other columns.

    Args:
        replayed: ``REPLAYED``, or empty for files without this column.
    """

    def __init__(self, path: Path, kind: Kind, replayed: tuple[str, ...] = REPLAYED) -> None:
        self.path, (key, figures) = path, kind
        path.parent.mkdir(parents=True, exist_ok=True)
        self.key, self.columns = (*key, *replayed), [*key, *figures, *replayed, *ABOUT]
        self._there = set[tuple[str, ...]]()
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                columns = next(csv.reader(file), [])
            if columns != self.columns:
                raise ValueError(f"{path} has the columns {','.join(columns)}, not {','.join(self.columns)}")
            self._there = {self._name(row) for row in read(path)}

    def has(self, row: Row) -> bool:
        """Whether the file has a row with the same identifying columns."""
        return self._name(row) in self._there

    def add(self, row: Row) -> None:
        """Appends a row, and prints it."""
        shown = {name: show(row.get(name)) for name in self.columns}
        append(self.path, self.columns, [shown])
        self._there.add(self._name(row))
        print(" ".join(f"{name}={shown[name]}" for name in self.columns[: -len(ABOUT)] if shown[name]), flush=True)

    def _name(self, row: Row) -> tuple[str, ...]:
        return tuple(show(row.get(name)) for name in self.key)


def append(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """Appends rows to a file. A new file begins with the names of the columns."""
    if path.exists():
        _add_rows(path, "a", columns, rows)
    else:
        write(path, columns, rows)


def write(path: Path, columns: Sequence[str], rows: Iterable[Row] = ()) -> None:
    """Writes a file that has the names of the columns and these rows. An earlier file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _add_rows(path, "w", columns, rows)


def _add_rows(path: Path, mode: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if mode == "w":
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """All rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def show(value: Any) -> str:
    """Returns a value as text, with four digits for a float. None becomes an empty text."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
