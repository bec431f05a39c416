"""Processes that this one starts and talks to: engines, ranks, servers for HTTP"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import MappingProxyType

from shadowkv.engine.held_folder import HeldFolder

GRACE_SECONDS = 5.0
"""How long one may take to exit once it is about to."""


def start_process(
    module: str,
    *descriptors: int,
    holds: Sequence[HeldFolder] = (),
    own_session: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that runs a module, and a connection to it; its command line has the connection's other end and
    ``descriptors``, which it inherits. It holds folders for as long as it lives."""
    ours, theirs = socket.socketpair()
    with theirs:
        inherited = (theirs.fileno(), *descriptors)
        # Modules are found where this process finds them; a terminal, its input and signals are for this one alone.
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, inherited)],
            pass_fds=(*inherited, *(folder.descriptor for folder in holds)),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            start_new_session=own_session,
        )
    return process, Connection(ours.detach())


def ending(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended, or is about to."""
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
