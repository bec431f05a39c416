"""The table of attention's backends: tiny, on a CPU, with the libraries' functions as their documentation has them."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.ops import attention_backends as bench

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from attention_stubs import stub

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes are a GPU's there")


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as rows:
        return list(csv.DictReader(rows))


def test_every_backend_has_a_row_of_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, stub(name))
        monkeypatch.setattr(getattr(bench, name), "missing", lambda: [])
    monkeypatch.setitem(bench.STEPS, "cpu", [(2, 512)])  # whole pages of flash-attn's
    assert bench.main(["--out", str(tmp_path / "a.csv"), "--dims", "64"]) == 0
    rows = table(tmp_path / "a.csv")
    assert tuple(rows[0]) == bench.COLUMNS
    assert all(float(row["ms"]) > 0 and not row["error"] and row["commit"] for row in rows)
    found = {op: {row["backend"] for row in rows if row["op"] == op} for op in {row["op"] for row in rows}}
    assert found["dense_attention.causal"] >= {"reference"} and found["dense_attention.packed"] >= {"reference"}
    assert found["paged_attention"] >= {"reference", "sdpa", "flashinfer", "flash_attn"}
    nbytes = 2 * 2 * 512 * bench.HEADS * 64 * 4
    for row in rows:
        if row["op"] == "paged_attention":
            assert float(row["gb_s"]) == pytest.approx(nbytes / (1e6 * float(row["ms"])), rel=2e-3)
        else:
            pairs = {"33 x 33": 33 * 34 / 2, "20 x 70": 20 * 50 + 20 * 21 / 2, "3 up to 40": 15 + 820 + 1}[row["case"]]
            work = 4 * bench.HEADS * bench.GROUP * 64 * pairs
            assert float(row["tflops"]) == pytest.approx(work / (1e9 * float(row["ms"])), rel=2e-3)


def test_a_wrong_result_is_an_error_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object) -> torch.Tensor:
        q = args[0]
        assert isinstance(q, torch.Tensor)
        return torch.full_like(q, 3.0)

    right = bench.functions

    def functions(op: str, dim: int, device: str):
        yield from right(op, dim, device)
        if op == "dense_attention.packed":
            yield "wrong", wrong

    monkeypatch.setattr(bench, "functions", functions)
    assert bench.main(["--out", str(tmp_path / "b.csv"), "--dims", "64"]) == 1
    bad = [row for row in table(tmp_path / "b.csv") if row["error"]]
    assert [(row["backend"], row["ms"]) for row in bad] == [("wrong", "")]
