"""The guided fuzzer: coverage leads it to a fault that chance would not find, and the bytes are kept."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = """
import sys, atheris
from robustness import fuzz_files, fuzz_guided
@atheris.instrument_func
def read(raw):
    for index, byte in enumerate(b"fault"):
        if raw[index : index + 1] != bytes([byte]):
            return
    raise KeyError("x")
fuzz_files.read_json = read
sys.exit(fuzz_guided.main(sys.argv[1:]))
"""


def test_coverage_leads_to_a_fault_and_the_bytes_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    out = tmp_path / "out.json"
    args = ["--seconds", "3", "--targets", "body", "--faults", str(tmp_path / "faults"), "--out", str(out)]
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", BROKEN, *args], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr[-2000:]
    found = json.loads(out.read_text())["targets"]["body"]
    assert len(found["faults"]) == 1 and "KeyError" in found["faults"][0]
    assert found["runs"] > 0 and found["in the end"]["edges"] > found["good files"]["edges"] > 0
    assert [path.read_bytes()[:5] for path in (tmp_path / "faults").iterdir()] == [b"fault"]


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    monkeypatch.delitem(sys.modules, "robustness.fuzz_guided", raising=False)
    with pytest.raises(SystemExit, match=r"-m pip install atheris"):
        importlib.import_module("robustness.fuzz_guided")
