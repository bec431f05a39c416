"""A matrix of several row blocks that is packed as a whole, with a stand-in for the GPU's product."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_quantized_groups import FORMS, random_rows
from torch import Tensor

from shadowkv.layers.quantized_matrix import QuantizedMatrix, RowBlock
from shadowkv.models import Decoder, load_config
from shadowkv.ops.quantized.rows import QuantizedRows
from shadowkv.ops.quantized_matmul.humming import PackedRows, pack_rows
from shadowkv.ops.registry import Ops

ROOT = Path(__file__).resolve().parents[2]
KEPT: dict[str, QuantizedRows] = {}


def stand_in(rows: QuantizedRows) -> PackedRows:
    """Packed rows that the stand-in finds by their name."""
    KEPT[name := f"{len(KEPT)}"] = QuantizedRows(tuple(tensor.clone() for tensor in rows.tensors), rows.form)
    return PackedRows(name, {"weight": torch.zeros(len(rows), 7)}, rows.columns, len(rows))


def test_a_model_without_such_weights_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming", None)  # cannot be imported
    model = Decoder(load_config("smollm2-135m-instruct"), torch.bfloat16, "meta")
    model.pack()
    assert model.forms == []


@pytest.fixture
def matrix(seed: int, monkeypatch: pytest.MonkeyPatch) -> QuantizedMatrix:
    monkeypatch.setattr("shadowkv.layers.quantized_matrix.pack_rows", stand_in)
    form = FORMS["int4"]
    made = QuantizedMatrix(
        64, [RowBlock(40, form), RowBlock(8, None), RowBlock(16, form)], dtype=torch.float32, device=CPU
    )
    for rows in made.stored(0, 64):
        if isinstance(rows, QuantizedRows):
            for mine, drawn in zip(rows.tensors, random_rows(form, len(rows), 64).tensors, strict=True):
                mine.copy_(drawn)
        else:
            rows.data.normal_()
    ops: Any = SimpleNamespace(quantized_matmul=multiply, dequantize_rows=Ops().dequantize_rows)
    made.ops = ops
    return made


CPU = torch.device("cpu")


def multiply(x: Tensor, rows: QuantizedRows | PackedRows) -> Tensor:
    return Ops().quantized_matmul(x, KEPT[rows.layer] if isinstance(rows, PackedRows) else rows)


def test_runs_of_rows_are_multiplied_as_before(matrix: QuantizedMatrix) -> None:
    x = torch.randn(5, 64)
    whole, before = matrix(x, 0, 64), matrix.nbytes
    packed = matrix.pack([24])
    assert [len(rows) for rows in packed] == [24, 16, 16]
    torch.testing.assert_close(matrix(x, 0, 64), whole)
    torch.testing.assert_close(matrix(x, 0, 24), whole[:, :24])
    torch.testing.assert_close(matrix(x, 24, 64), whole[:, 24:])
    assert matrix.nbytes == 56 * 7 * 4 + 8 * 64 * 4 < before + 56 * 7 * 4
    with pytest.raises(AssertionError, match="rows 0 to 30 are in no pieces"):
        matrix(x, 0, 30)


def test_rows_of_one_form_are_multiplied_at_once_where_all_are(
    seed: int, monkeypatch: pytest.MonkeyPatch, matrix: QuantizedMatrix
) -> None:
    made = QuantizedMatrix(64, [RowBlock(56, FORMS["int4"])], dtype=torch.float32, device=CPU)
    for mine, drawn in zip(made.parts, random_rows(FORMS["int4"], 56, 64).tensors, strict=True):
        mine.data.copy_(drawn)
    made.ops, x = matrix.ops, torch.randn(5, 64)
    whole = made(x, 0, 56)
    assert [len(rows) for rows in made.pack([40])] == [40, 16, 56]
    multiplied: list[int] = []

    def counted(x: Tensor, rows: PackedRows) -> Tensor:
        multiplied.append(len(rows))
        return multiply(x, rows)

    made.ops = SimpleNamespace(quantized_matmul=counted)
    for start, stop in ((0, 56), (0, 40), (40, 56)):
        torch.testing.assert_close(made(x, start, stop), whole[:, start:stop])
    assert multiplied == [56, 40, 16]
    assert made.nbytes == 2 * 56 * 7 * 4


def test_rows_are_looked_up_beside_products(matrix: QuantizedMatrix) -> None:
    index, x = torch.tensor([3, 39, 0]), torch.randn(2, 64)
    rows, whole, before = matrix.look_up(index), matrix(x, 0, 64), matrix.nbytes
    matrix.pack(looked_up=True)
    assert torch.equal(matrix.look_up(index), rows)
    torch.testing.assert_close(matrix(x, 0, 64), whole)
    assert matrix.nbytes == before + 56 * 7 * 4


def test_sizes_that_kernels_do_not_take_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="multiples of 8, not 5 x 64"):
        pack_rows(random_rows(FORMS["int4"], 5, 64))


def test_the_library_is_imported_without_pytorchs_compiler(tmp_path: Path) -> None:
    """And what its decorator is to others stays as it was, whatever becomes of the import."""
    package = tmp_path / "humming"
    package.mkdir()
    decorated = "import torch\n@torch.compiler.assume_constant_result\ndef number(): return 3\n"
    (package / "__init__.py").write_text(f"{decorated}assert number() == 3\nraise ImportError('not whole')\n")
    code = """
import sys, torch
from shadowkv.ops.quantized_matmul.humming import _import_library
before = torch.compiler.assume_constant_result
try:
    _import_library()
except ImportError as error:
    assert "not whole" in str(error)
assert torch.compiler.assume_constant_result is before and "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)
