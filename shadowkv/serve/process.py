"""What every process that serves clients sets up for itself: how signals end it, and how many files it may open."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from shadowkv.log_format import set_up_log
from shadowkv.wording import SettingsError

logger = logging.getLogger("shadowkv.serve.open_files")  # the name that the log shows

ENGINE_DIED = 70
"""Exit status where the engine has ended by itself; a supervisor is to start the command again."""

AGAIN_SECONDS = 0.5
"""How long after a signal it is seen whether what it has raised was dropped."""

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
    """Makes SIGINT, SIGTERM and SIGHUP end the process by an exception, until a server handles them. One that is
    ignored stays so: the command was started to outlive its terminal (nohup), or in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop.handle)


@contextmanager
def stops_repeated() -> Iterator[None]:
    """Within, no signal that ends the process is lost. What it raises is dropped where it comes up in a finalizer, a
    callback or C code, as imports have them; so half a second later the signal is raised again, for whatever handles it
    by then, unless the exception is still on its way; where an import has made another error of it, it is raised here.
    To be the first context that an exception leaves: what frees resources is not interrupted."""
    _stop.repeats = True
    try:
        yield
    finally:
        _stop.repeats = False
        if signal.getsignal(signal.SIGALRM) == _stop.look:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if (stop := _stop.raised()) is not None and sys.exc_info()[1] not in (None, stop):
            raise stop


class _Interrupted(KeyboardInterrupt):
    """Of a class of its own, as those of Python's have no weak references. Once a plain KeyboardInterrupt has left an
    ``exec``, the interpreter ends by SIGINT, whatever exit status the command has."""


class _Terminated(SystemExit):
    """The same for the other signals."""


class _Stop:
    """The last signal that ended something.

    Attributes:
        repeats: whether it is raised again where it was dropped.
        raised: what it has raised, while that is on its way.
    """

    def __init__(self) -> None:
        self.repeats, self._number = False, 0
        self.raised: Callable[[], BaseException | None] = lambda: None

    def handle(self, number: int, frame: FrameType | None) -> NoReturn:
        """The handler of these signals."""
        stop = _Interrupted() if number == signal.SIGINT else _Terminated(128 + number)
        self._number, self.raised = number, weakref.ref(stop)
        if self.repeats:
            signal.signal(signal.SIGALRM, self.look)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS, AGAIN_SECONDS)
        try:
            raise stop
        finally:
            del stop  # its traceback has this frame, which must not keep it alive

    def look(self, number: int, frame: FrameType | None) -> None:
        """The handler of the timer."""
        if not self.repeats:
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif self.raised() is None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(self._number)


_stop = _Stop()


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
