"""The HTTP processes of ``--api-server-count`` besides the first one: starts them, and notices when one ends."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from shadowkv.engine.child_process import ending, start_process
from shadowkv.engine.held_folder import HeldFolder
from shadowkv.engine.process.launch import EngineProcess
from shadowkv.serve.http.counts import Counts
from shadowkv.serve.http.settings import ServerSettings

if TYPE_CHECKING:
    from shadowkv.engine.process.facts import EngineFacts
    from shadowkv.engine.process.launch import ReplicaProcesses

logger = logging.getLogger(__name__)

END_SECONDS = 10.0
"""Seconds after ``shutdown_timeout`` until a process is killed, so that clients can read the rest of their answers."""

DRAIN = "drain"
"""Message that tells a process to accept no more connections, and to end when its last request has ended. Any other
message says why the engine has ended; the process then ends, too."""


@dataclass(frozen=True)
class WorkerLaunch:
    """What an additional HTTP process needs to know in order to serve.

    Attributes:
        sockets: folder of the engines' sockets.
        shared: folder of the counts that all HTTP processes share. The first process removes the folder. If the first
            process was killed, the others remove it.
        row: the process's row in ``Counts``.
    """

    facts: list[EngineFacts]
    sockets: str
    shared: str
    served_name: str
    settings: ServerSettings
    row: int


def counts_file(shared: str) -> Path:
    """The file of ``Counts`` in the shared folder."""
    return Path(shared) / "counts"


@dataclass
class _Worker:
    row: int
    process: subprocess.Popen[bytes]
    control: Connection
    clients: list[str]

    def send(self, text: str) -> None:
        with suppress(OSError):  # the process has ended
            self.control.send(text)


class Workers:
    """A context with additional HTTP processes, which serve clients on the same socket as this process. At the end of
    the context, they are killed.

    The additional processes also end if this process is killed. A process that ends by itself is not restarted: its
    requests are aborted, and the other processes continue.

    Args:
        count: number of all HTTP processes, including this one.

    Attributes:
        counts: the counts of open connections and requests of all processes.
        settings: the settings, with a storage folder that all processes share.

    With more than one process, the constructor turns on prometheus_client's multiprocess mode. So ``prometheus_client``
    must not have been imported earlier. Raises ChildProcessError if a process does not start.
    """

    def __init__(
        self,
        count: int,
        process: EngineProcess | ReplicaProcesses,
        served_name: str,
        listener: socket.socket,
        settings: ServerSettings,
    ) -> None:
        self._seconds = settings.shutdown_timeout + END_SECONDS
        self._workers: list[_Worker] = []
        self._draining_since: float | None = None
        self._exit = ExitStack()
        keys = len(settings.api_key)
        self.settings = settings
        if count == 1:
            self.counts = Counts(keys)
            return
        assert isinstance(process, EngineProcess), "several engines have one HTTP process"
        self._process = process
        # The engine's folder is not used, because it is removed as soon as the engine ends.
        self._shared = self._exit.enter_context(HeldFolder())
        folder = self._shared.path
        Counts.create(counts_file(folder), keys, count)
        self.counts = Counts(keys, counts_file(folder))
        if settings.storage_dir is None and settings.storage_mib:
            self.settings = settings = replace(settings, storage_dir=str(Path(folder) / "kept"))
        metrics = Path(folder) / "metrics"
        metrics.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        try:
            for row in range(1, count):
                self._start(WorkerLaunch(process.facts, process.folder, folder, served_name, settings, row), listener)
            for worker in self._workers:
                self._wait_until_ready(worker)
        except BaseException:  # Ctrl-C, for example
            self._end()
            raise
        process.when_it_ends(self._give_up)
        for worker in self._workers:
            threading.Thread(target=self._watch, args=(worker,), name="shadowkv-worker", daemon=True).start()

    def _start(self, launch: WorkerLaunch, listener: socket.socket) -> None:
        process, control = start_process("shadowkv.serve.worker", listener.fileno(), holds=[self._shared])
        self._workers.append(worker := _Worker(launch.row, process, control, []))
        try:
            control.send(launch)
        except OSError as error:
            raise _not_started(worker) from error

    def _wait_until_ready(self, worker: _Worker) -> None:
        try:
            worker.clients = worker.control.recv()
        except (OSError, EOFError) as error:
            raise _not_started(worker) from error

    def _watch(self, worker: _Worker) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        worker.process.wait()
        if self._draining_since is not None:
            return
        for client in worker.clients:
            self._process.has_left(client)
        self.counts.clear(worker.row)
        mark_process_dead(worker.process.pid)
        logger.error("an HTTP process has ended (%s); it is not restarted", ending(worker.process))

    def _give_up(self, reason: str) -> None:
        """Ends the processes, because the engine has ended."""
        self._draining_since = self._draining_since or monotonic()
        self._tell_all(reason)

    def _tell_all(self, text: str) -> None:
        for worker in self._workers:
            worker.send(text)

    def drain(self) -> None:
        """Tells the processes to accept no more connections, and to end when their last requests have ended."""
        self._draining_since = self._draining_since or monotonic()
        self._tell_all(DRAIN)

    def join(self) -> None:
        """Waits until the processes have ended after ``drain``."""
        assert self._draining_since is not None, "drain was not called"
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, self._draining_since + self._seconds - monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._draining_since = self._draining_since or monotonic()
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
            worker.control.close()
        self._exit.close()


def _not_started(worker: _Worker) -> ChildProcessError:
    return ChildProcessError(f"an HTTP process has not started: {ending(worker.process)}")
