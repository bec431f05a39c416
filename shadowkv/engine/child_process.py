"""Starts child processes with a connection to them: engines, ranks, HTTP servers, processes that read request bodies,
and the forker of grammar processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

from shadowkv.engine.held_folder import HeldFolder

GRACE_SECONDS = 5.0
"""Seconds to wait for the exit of a process whose connection is closed."""

STOP_SECONDS = 5.0
"""Seconds that an engine's current step gets to end when the engine's process is stopped (``EngineProcess.stop``)."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals by which a user or a service manager ends a command."""


def ignore_stop_signals() -> None:
    """Makes this process ignore ``STOP_SIGNALS``. A terminal or a service manager sends them to all processes of a
    command at once. The process that started this one handles the signals, and then ends this one."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def start_process(
    module: str,
    *descriptors: int,
    holds: Sequence[HeldFolder] = (),
    own_session: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts a process that runs a module. Returns the process and a connection to it.

    Args:
        module: name of the module, which is run with ``python -m``.
        descriptors: file descriptors that the process inherits. The process's command line has the descriptor of its
            end of the connection, then these descriptors.
        holds: folders that must exist as long as the process lives.
        own_session: whether the process has a session of its own, so that a terminal's signals do not reach it.
        environment: environment variables of the new process, in addition to those of this one.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        inherited = (theirs.fileno(), *descriptors)
        # The child finds modules where this process does. Only this process reads the terminal.
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, inherited)],
            pass_fds=(*inherited, *(folder.descriptor for folder in holds)),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            start_new_session=own_session,
        )
    return process, Connection(ours.detach())


def ending(process: subprocess.Popen[bytes]) -> str:
    """Describes how a process has ended. It waits up to ``GRACE_SECONDS`` for the exit."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    code = process.returncode
    if code is None:
        return "its connection is closed"
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGKILL:
        return "SIGKILL: the system may have run out of memory"
    names = {one.value: one.name for one in signal.Signals}
    return names.get(-code, f"signal {-code}")  # real-time signals have no names


def limit_memory(size: int, is_beside: bool = False) -> None:
    """Limits the address space of this process to ``size`` bytes, or with ``is_beside`` to ``size`` bytes more than it
    uses now. This has no effect on platforms without such a limit."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        if is_beside:
            size += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
