"""Temporary folders that running processes hold, for sockets and shared files. Folders of killed processes are removed
when the next folder is made."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

PREFIX = "shadowkv-"

LOCK = "held"
"""Name of the lock file in a folder. All processes that hold the folder share its lock. The system frees the lock when
the last of them ends, even if it is killed. Unlike a process id, a lock also works between containers that share the
parent folder."""


class HeldFolder:
    """A new folder that only this user can enter. The folder is removed at the end of the object's context, or at the
    end of this process. Other processes hold the folder if they inherit ``descriptor``.

    Args:
        kind: part of the folder's name.

    Attributes:
        path: the folder's path.
        descriptor: file descriptor of the locked file.
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

    def __exit__(self, *_: object) -> None:
        self.remove()


def _locked_file(folder: Path) -> int:
    import fcntl  # imported here because Windows has no such module; only servers and ranks need it

    # The file gets its name after it is locked: otherwise a process that looks for abandoned folders could lock it
    # first.
    new = folder / "new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(folder / LOCK)
    return descriptor


def _close(folder: str, descriptor: int) -> None:
    remove_folder(folder)
    os.close(descriptor)


def remove_abandoned() -> None:
    """Removes this user's folders that no process holds. A folder without a lock file stays: it is of another program,
    or not ready yet."""
    import fcntl

    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # no lock file, or a process holds the lock, or another process removes the folder
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
    """Removes a folder if it exists. The lock file is removed last, so that another process can finish an interrupted
    removal."""
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                with suppress(OSError):  # another process that holds the folder can remove the file first
                    os.unlink(entry.path)
    shutil.rmtree(path, ignore_errors=True)
