"""Servers that end in every way: all is well with them, and what would not be is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from robustness import endings
from robustness.endings import Endings
from robustness.tiny_model import tiny_model


@pytest.mark.slow
def test_live_servers(tmp_path: Path) -> None:
    out = tmp_path / "endings.json"
    with tiny_model() as model:
        flags = ["--model", str(model), "--load-format", "dummy", "--moments", "4", "--kills", "2", "--out", str(out)]
        assert endings.main(flags) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["ok"] and found["commit"]
    assert (found["signals"], found["signals lost"], found["engines killed"], found["servers killed"]) == (4, 0, 2, 2)
    assert found["told so"] == found["requests in flight"] == 2 * endings.REQUESTS
    assert found["folders they left"] == 3 and found["of these there after the next start"] == 0


def test_what_is_left_is_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "unused_memory", set)  # tests beside this one may leave some for a moment
    run = Endings(endings.parse([]))
    with run._workplace("here") as (folder, where):
        (folder / "shadowkv-x").mkdir()
    assert (run.counts["left a folder"], where) == (1, "here") and "left ['shadowkv-x']" in run.faults[0]
    run._judge_answer("here", "none")
    assert (run.counts["told so"], len(run.faults)) == (0, 2)
    assert not run.summary()["ok"] and "a request ended with none" in capsys.readouterr().err


def test_a_process_that_is_left_is_noticed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "GONE_SECONDS", 0.1)
    run = Endings(endings.parse([]))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run._check_gone(endings.family_of(process.pid), "here")
        assert process.wait(300) == -9
    assert run.counts["left a process"] == 1 == len(run.faults)
