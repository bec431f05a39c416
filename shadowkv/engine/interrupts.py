"""Ctrl-C between two steps of an engine: in the middle of one it would leak pages and slots."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], None]]:
    """Within, a Ctrl-C takes effect when the yielded function is called, or at the end."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None  # nothing to raise here
        return
    pending: list[Any] = []

    def deliver() -> None:
        if pending:
            signum, frame = pending.pop()
            pending.clear()
            handler(signum, frame)

    try:
        signal.signal(signal.SIGINT, lambda signum, frame: pending.append((signum, frame)))
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()
