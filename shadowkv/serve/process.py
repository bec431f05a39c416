"""What every process that serves clients sets up for itself: how signals end it, and how many files it may open."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from shadowkv.log_format import set_up_log
from shadowkv.wording import SettingsError

logger = logging.getLogger("shadowkv.serve.open_files")  # the name that the log shows

FILES_BESIDE = 512
"""Reserved for everything else: the model's files, and accepted connections that are about to be closed."""


def run_until_stopped(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """The exit code of a command that runs until it is done or a signal ends it, with the server's log."""
    set_up_log()
    exit_on_signals()
    try:
        return run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def exit_on_signals() -> None:
    """Makes SIGTERM end the process like an exit, until a server handles it."""
    signal.signal(signal.SIGTERM, on_terminate)
    # A closing terminal stops it like SIGTERM, unless it was started to outlive the terminal (nohup).
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_terminate)


def on_terminate(number: int, frame: object) -> NoReturn:
    """The signal handler."""
    sys.exit(128 + number)


def allow_open_files(connections: int, *, or_fewer: bool = False) -> int:
    """Raises the limit of open files to what ``connections`` connections need; returns how many there may be.

    Where the system allows fewer, raises ValueError; with ``or_fewer``, warns and returns what it allows.
    """
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return connections
    needed = connections + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    if hard != resource.RLIM_INFINITY and hard < needed:
        allowed = max(1, hard - FILES_BESIDE)
        if connections > allowed:
            reason = f"needs {needed} open files, and the system allows {hard} (ulimit -Hn)"
            if not or_fewer:
                text = f"limit_concurrency={connections} {reason}; raise that, or pass at most {allowed}"
                raise SettingsError(text, ["limit_concurrency"])
            logger.warning("--limit-concurrency %d %s: it is %d", connections, reason, allowed)
        connections, needed = allowed, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return connections
