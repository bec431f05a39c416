"""Temporary folders that belong to running processes: for sockets, and what processes share. Those that were left by
processes that were killed are removed when the next one is made."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

PREFIX = "shadowkv-"

LOCK = "held"
"""File in a folder that those who hold the folder have locked: the system frees a lock with the last process that has
it, however that ends. Unlike a process id it holds across containers that share the folder above."""


class HeldFolder:
    """A new folder that only this user may enter, a context at whose end it is removed; so it is at the end of this
    process. Others hold it too if they inherit ``descriptor``.

    Args:
        kind: of the folder, for its name.

    Attributes:
        path: where it is.
        descriptor: of the locked file.
    """

    def __init__(self, kind: str = "") -> None:
        remove_abandoned()
        self.path = tempfile.mkdtemp(prefix=PREFIX + kind)
        with ExitStack() as failing:
            failing.callback(remove_folder, self.path)
            self.descriptor = _locked_file(Path(self.path))
            failing.pop_all()
        self.remove = weakref.finalize(self, _close, self.path, self.descriptor)

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _locked_file(folder: Path) -> int:
    import fcntl  # here, as Windows has none: without servers and ranks this is not needed

    # It has its name only once it is locked: before, somebody who looks for abandoned folders could lock it.
    new = folder / "new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(folder / LOCK)
    return descriptor


def _close(folder: str, descriptor: int) -> None:
    remove_folder(folder)
    os.close(descriptor)


def remove_abandoned() -> None:
    """Removes this user's folders that no process holds. Whatever has no lock is none of them, or not ready."""
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has no lock, or that is held, or somebody else is removing it
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:  # otherwise it was removed before this process had the lock
                    remove_folder(str(folder))
            finally:
                os.close(descriptor)


def remove_folder(path: str) -> None:
    """Removes a folder, if it is there, its lock last: where this is interrupted the next process goes on."""
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                with suppress(OSError):  # another process that holds the folder removes it, too
                    os.unlink(entry.path)
    shutil.rmtree(path, ignore_errors=True)
