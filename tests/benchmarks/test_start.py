"""How long a server takes to its first token."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from benchmarks.serving import start
from robustness.tiny_model import tiny_model


def test_a_server_that_starts_and_one_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--out", str(tmp_path), "--times", "1", "--", "--model"]
    with tiny_model() as model:
        assert start.main([*flags, str(model), "--load-format", "dummy", "--device", "cpu"]) == 0
    line = capsys.readouterr().out
    found = re.fullmatch(r"start 0: answers after (\S+) s, first token after (\S+) s: .*\n", line)
    assert found and 0 < float(found[1]) <= float(found[2])
    assert "ready: " in (tmp_path / "start-0.log").read_text()
    assert start.main([*flags, str(tmp_path / "none")]) == 1
    assert "no directory" in capsys.readouterr().err
