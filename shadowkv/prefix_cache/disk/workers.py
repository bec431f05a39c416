"""Threads that do file work one job after another, and do not delay the exit of the process on a slow disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workers:
    """Like ``ThreadPoolExecutor``, but with daemon threads, which the interpreter does not wait for."""

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
        """Runs a function when it is its turn; its future is cancelled at once if the workers are closed."""
        future: Future[Result] = Future()
        with self._changed:
            if not self._closed:
                self._jobs.append((future, lambda: function(*arguments)))
                self._changed.notify()
                return future
        _cancel(future)
        return future

    def close(self, timeout: float, *, drain: bool = False) -> bool:
        """Accepts no more jobs; queued ones are cancelled, or with ``drain`` done if there is time (seconds).

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
        # A separate call: between two jobs, nothing may refer to the buffers of the last one.
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
    # Both: waiters on the future wake up only at the second call.
    future.cancel()
    future.set_running_or_notify_cancel()
