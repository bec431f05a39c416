"""The file system calls and the threads of the disk tier. In tests, subclasses of ``FileSystem`` are slow, full or
read-only."""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")

TEMPORARY = ".tmp-"
"""Start of the names of unfinished files."""

HAS_NO_RESERVATIONS = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS}
HAS_NO_LINKS = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.ENOSYS}


class FileSystem:
    """The machine's file system. All methods raise OSError."""

    def make_directory(self, path: Path) -> None:
        """Creates a directory and its parents if they are missing. Only its owner has access."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def names(self, directory: Path) -> list[str]:
        """Names of all entries of a directory."""
        return os.listdir(directory)

    def stat(self, path: Path) -> os.stat_result:
        """Size and times of a file."""
        return os.stat(path)

    def open(self, path: Path) -> int:
        """Opens a file for sequential reads. It does not follow links, and does not block on pipes."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if hasattr(os, "posix_fadvise"):  # macOS has none
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor

    def create(self, path: Path) -> int:
        """Creates a file for writing. Only its owner has access."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def reserve(self, descriptor: int, size: int) -> None:
        """Reserves all blocks of a file, so that a full disk is detected before writing."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in HAS_NO_RESERVATIONS:
                raise

    def read(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Reads into ``buffer`` from ``offset``. Returns the number of bytes, 0 at the file's end."""
        return os.preadv(descriptor, [buffer], offset)

    def write(self, descriptor: int, data: memoryview | bytes, offset: int) -> int:
        """Writes at ``offset``. Returns the number of bytes."""
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        """Waits until all written bytes are on the disk."""
        os.fsync(descriptor)

    def publish(self, temporary: Path, path: Path, replace: bool) -> bool:
        """Gives a complete file its permanent name. Returns False if a file already has that name and ``replace`` is
        False. The temporary name is removed only on success."""
        if replace:
            os.replace(temporary, path)
        else:
            try:
                # Unlike a rename, ``os.link`` fails if the name is taken, even if another server takes the name at this
                # moment.
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in HAS_NO_LINKS:
                    raise
                if path.exists():
                    return False
                os.replace(temporary, path)
            else:
                os.unlink(temporary)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return True

    def remove(self, path: Path) -> None:
        """Removes a file. A missing file is no error."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def touch(self, path: Path, seconds: float) -> None:
        """Sets a file's time of last use."""
        os.utime(path, (seconds, seconds))


class NewFile:
    """A file that has a temporary name until it is published. If it was not published, it is removed at the end of its
    context. The constructor and all methods raise OSError.

    Attributes:
        path: the temporary path in ``directory``.
        descriptor: the file, open for writing until it is published.
    """

    def __init__(self, directory: Path, files: FileSystem) -> None:
        self.path, self._files = directory / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}", files
        self.descriptor, self._open = files.create(self.path), True

    def write(self, data: memoryview | bytes, offset: int) -> None:
        """Writes all of ``data`` at ``offset``."""
        data = memoryview(data)
        while data:
            count = self._files.write(self.descriptor, data, offset)
            data, offset = data[count:], offset + count

    def publish(self, path: Path, replace: Callable[[], bool]) -> bool:
        """Gives the file its permanent name once all bytes are on the disk. Returns False if another file has that name
        and stays. ``replace`` is called last, and returns whether to replace that other file."""
        self._files.sync(self.descriptor)
        self._close()
        return self._files.publish(self.path, path, replace())

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self.descriptor)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close()
        finally:
            self._files.remove(self.path)


class Workers:
    """Like ``ThreadPoolExecutor``, but with daemon threads, so that a slow disk does not delay the exit of the
    process."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Queues a function. Its future is cancelled at once if the workers are closed."""
        future: Future[Result] = Future()
        with self._changed:
            if not self._closed:
                self._jobs.append((future, lambda: function(*arguments)))
                self._changed.notify()
                return future
        _cancel(future)
        return future

    def close(self, timeout: float, *, drain: bool = False) -> bool:
        """Stops accepting jobs. Cancels queued jobs. With ``drain``, jobs are done for up to ``timeout`` seconds before
        the rest is cancelled.

        Returns whether all threads have ended.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            if drain:
                self._changed.wait_for(lambda: not self._jobs, timeout)
            waiting = [future for future, _ in self._jobs]
            self._jobs.clear()
            self._changed.notify_all()
        for future in waiting:
            _cancel(future)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        # A separate function, so that no local variable refers to the last job's buffers between two jobs.
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return False
            future, function = self._jobs.popleft()
            self._changed.notify_all()
        if future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        return True


def _cancel(future: Future[Any]) -> None:
    # Only the second call wakes up threads that wait for the future.
    future.cancel()
    future.set_running_or_notify_cancel()
