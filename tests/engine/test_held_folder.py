"""Folders that processes hold: removed with the last of them or, where all were killed, when the next one is made."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shadowkv.engine.child_process import start_process
from shadowkv.engine.held_folder import LOCK, HeldFolder, remove_abandoned

HOLDER = """
import os, sys
from shadowkv.engine.held_folder import HeldFolder
folder = HeldFolder("test-")
open(folder.path + "/socket", "w").close()
os.makedirs(folder.path + "/kept/deep")
print(folder.path, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, here and in processes that are started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder until a line comes, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_context_its_owner_or_its_process(temporary: Path) -> None:
    with HeldFolder("kind-") as folder:
        path = Path(folder.path)
        assert path.parent == temporary and path.name.startswith("shadowkv-kind-")
        assert path.stat().st_mode & 0o077 == 0
        (path / "file").touch()
    folder.remove()  # once more is no error
    unused = HeldFolder()
    assert os.listdir(temporary) == [os.path.basename(unused.path)]
    del unused
    assert not os.listdir(temporary)
    process, path = holder()
    with process:
        assert path.is_dir()
        process.communicate("\n", timeout=300)
    assert process.returncode == 0 and not os.listdir(temporary)


def test_what_a_killed_process_has_left_is_removed_by_the_next_and_what_is_held_is_not(temporary: Path) -> None:
    (live, held), (killed, left) = holder(), holder()
    with live, killed:
        killed.kill()
        killed.wait(300)
        assert (left / "kept/deep").is_dir()
        with HeldFolder() as folder:
            assert {path.name for path in temporary.iterdir()} == {held.name, os.path.basename(folder.path)}
        assert (held / "socket").exists() and (held / "kept/deep").is_dir()
        live.kill()
    remove_abandoned()
    assert not os.listdir(temporary)


def test_a_process_that_is_given_the_folder_holds_it(temporary: Path) -> None:
    folder = HeldFolder()
    process, connection = start_process("shadowkv.engine.process.main", holds=[folder])  # waits for what to launch
    try:
        folder.remove.detach()
        os.close(folder.descriptor)  # as if this process was killed
        remove_abandoned()
        assert os.listdir(temporary) == [os.path.basename(folder.path)]
    finally:
        connection.close()
        process.wait(300)
    remove_abandoned()
    assert not os.listdir(temporary)


def test_what_may_belong_to_others_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = temporary / "elsewhere"
    for folder in (elsewhere, temporary / "shadowkv-new", temporary / "shadowkv-not-locked-yet"):
        folder.mkdir()
    (temporary / "shadowkv-not-locked-yet/new").touch()
    (temporary / "shadowkv-file").touch()
    (elsewhere / LOCK).touch()
    (temporary / "shadowkv-link").symlink_to(elsewhere)
    (temporary / "shadowkv-linked").mkdir()
    (temporary / f"shadowkv-linked/{LOCK}").symlink_to(elsewhere / LOCK)
    before = sorted(temporary.rglob("*"))
    remove_abandoned()
    assert sorted(temporary.rglob("*")) == before
    (temporary / f"shadowkv-new/{LOCK}").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        remove_abandoned()
        assert (temporary / "shadowkv-new").is_dir()
    remove_abandoned()
    assert not (temporary / "shadowkv-new").exists()


def test_many_that_start_and_end_at_once_take_nothing_from_one_another(temporary: Path) -> None:
    def work() -> int:
        for number in range(40):
            with HeldFolder() as folder:
                Path(folder.path, "socket").write_text(str(number))
                remove_abandoned()
                assert Path(folder.path, "socket").read_text() == str(number)
        return number

    with ThreadPoolExecutor(8) as threads:
        assert [one.result() for one in [threads.submit(work) for _ in range(8)]] == [39] * 8
    assert not os.listdir(temporary)
