"""Which CUDA ops count as changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import changed_kernels
import pytest


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ops, one of which includes a header through another, as they landed."""
    own = "csrc/build_cuda.py", "shadowkv/ops/cuda_compiler.py", "shadowkv/ops/sources.py"
    sources = {
        **{name: (changed_kernels.ROOT / name).read_text() for name in own},
        "csrc/constants.h": "",
        "csrc/kernels/add/add.cuh": '#include "constants.h"\n',
        "csrc/kernels/add/add.cu": '#include "add.cuh"\n#include <vector>\n',
        "csrc/kernels/move/move.cu": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(changed_kernels, "ROOT", tmp_path)
    monkeypatch.setattr(changed_kernels, "BUILDER", tmp_path / "csrc/build_cuda.py")
    monkeypatch.setattr(sys, "argv", ["changed_kernels.py"])
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    git(tmp_path, "switch", "-q", "-c", "work")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a change")


def changed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    changed_kernels.main()
    return capsys.readouterr().out.split()


def test_a_header_counts_for_those_that_include_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "README").touch()
    commit(repository)
    assert changed(capsys) == []
    (repository / "csrc/constants.h").write_text("// changed, committed or not\n")
    assert changed(capsys) == ["add"]
    commit(repository)
    (repository / "README").write_text("another commit")
    commit(repository)
    assert changed(capsys) == ["add"]
    (repository / "csrc/kernels/fill").mkdir()
    (repository / "csrc/kernels/fill/fill.cu").touch()
    assert changed(capsys) == ["add", "fill"]


def test_of_main_the_last_commit_counts(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(repository, "switch", "-q", "main")
    assert changed(capsys) == ["add", "move"]  # there is none before
    (repository / "csrc/kernels/move/move.cu").write_text("// changed\n")
    commit(repository)
    assert changed(capsys) == ["move"]


def test_new_flags_count_for_all(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (repository / "csrc/build_cuda.py").open("a") as file:
        file.write("\n")
    assert changed(capsys) == ["add", "move"]
