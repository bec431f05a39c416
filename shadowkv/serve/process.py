"""Setup of the commands that serve clients: how signals end them, and how many files they can open."""

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

from shadowkv.engine.child_process import STOP_SIGNALS
from shadowkv.log_format import set_up_log
from shadowkv.wording import SettingsError

logger = logging.getLogger("shadowkv.serve.open_files")  # the name that the log shows

ENGINE_DIED = 70
"""Exit status if the engine's process has ended by itself. A supervisor should then start the command again."""

AGAIN_SECONDS = 0.5
"""Seconds after a signal until ``_Stop`` checks whether the signal's exception was dropped."""

FILES_BESIDE = 512
"""Number of open files that are reserved in addition to the allowed connections. They are for the model's files, and
for surplus connections, which are accepted before they are closed."""


def run_until_stopped(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command until it is done or a signal ends it; returns the exit code. Sets up the log first."""
    set_up_log()
    exit_on_signals()
    try:
        return run(args)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 128 + signal.SIGINT


def exit_on_signals() -> None:
    """Makes SIGINT, SIGTERM and SIGHUP raise an exception that ends the process, until a server installs its own
    handlers. A signal that is already ignored stays ignored. It is ignored if a script has started the command in the
    background, or if nohup lets the command outlive its terminal."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop.handle)


@contextmanager
def stops_repeated() -> Iterator[None]:
    """A context in which no signal that ends the process is lost.

    Python drops a signal's exception if it is raised in a finalizer, in a callback or in some C code. This can happen
    during an import, for example. So this context sends the signal again after half a second, unless the first
    exception is still propagating. The repeated signal goes to the handler that is installed by then. If an import has
    turned the exception into another error, this context raises the original exception.

    This must be the innermost context. Then no repeated signal can interrupt the outer contexts while they release
    their resources.
    """
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
    """The exception that SIGINT raises. It is a subclass, since Python's own exceptions cannot have weak references.
    Also, if a plain KeyboardInterrupt has passed through a call of ``exec()``, the interpreter ends by SIGINT, whatever
    exit status the command returns."""


class _Terminated(SystemExit):
    """The exception that the other signals raise. It is a subclass, so that it can have weak references."""


class _Stop:
    """The last signal that was handled.

    Attributes:
        repeats: whether the signal is raised again if its exception was dropped.
        raised: a weak reference to the signal's exception. It returns None once the exception no longer propagates.
    """

    def __init__(self) -> None:
        self.repeats, self._number = False, 0
        self.raised: Callable[[], BaseException | None] = lambda: None

    def handle(self, number: int, frame: FrameType | None) -> NoReturn:
        """The handler of the signals."""
        stop = _Interrupted() if number == signal.SIGINT else _Terminated(128 + number)
        self._number, self.raised = number, weakref.ref(stop)
        if self.repeats:
            signal.signal(signal.SIGALRM, self.look)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS, AGAIN_SECONDS)
        try:
            raise stop
        finally:
            del stop  # the traceback refers to this frame, which must not keep the exception alive

    def look(self, number: int, frame: FrameType | None) -> None:
        """The handler of the timer: raises the signal again if its exception was dropped."""
        if not self.repeats:
            signal.setitimer(signal.ITIMER_REAL, 0)
        elif self.raised() is None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.raise_signal(self._number)


_stop = _Stop()


def allow_open_files(connections: int, *, or_fewer: bool = False) -> int:
    """Raises the limit of open files to what ``connections`` connections need; returns how many connections are
    possible.

    If the system allows fewer connections, raises SettingsError. With ``or_fewer``, logs a warning instead and returns
    the number that the system allows.
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
                text = f"limit_concurrency={connections} {reason}; raise this limit, or pass at most {allowed}"
                raise SettingsError(text, ["limit_concurrency"])
            logger.warning("--limit-concurrency %d %s: %d is used", connections, reason, allowed)
        connections, needed = allowed, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return connections
