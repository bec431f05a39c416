"""The HTTP server: it runs the API on a socket until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic
from types import FrameType

import uvicorn
from fastapi import FastAPI

from shadowkv.serve.http.connections import Connection, ConnectionConfig
from shadowkv.wording import counted

Stop = Callable[[], Awaitable[object]]

CONNECTION_SECONDS = 5
"""Maximum time that a shutdown waits for clients to read their answers, in seconds."""

POLL_SECONDS = 0.05

HANGUP = getattr(signal, "SIGHUP", None)
"""The signal that a terminal sends as it closes; None on Windows, which does not have it."""
WAITING_CONNECTIONS = 2048
"""The listen backlog: connections that the system establishes before the server accepts them."""


class Server(uvicorn.Server):
    """uvicorn's server, which on shutdown also stops the engine or whatever else produces the answers.

    The first SIGTERM, SIGINT or SIGHUP closes the listening sockets and gives running requests ``shutdown_timeout``
    seconds to finish (``shutdown``). A second signal ends the process immediately (``handle_exit``). A second SIGHUP is
    ignored, because shell and terminal can send one each.

    Args:
        app: its state has ``settings``, ``metrics`` and ``counts``, as ``build_app`` sets them.
        stops: functions that end the work that is still in progress after ``shutdown_timeout``.
        ready: called once connections are accepted.
        draining: called once no more connections are accepted.

    Attributes:
        has_failed: whether ``fail`` was called.
    """

    def __init__(
        self, app: FastAPI, stops: Sequence[Stop], ready: Callable[[], object], draining: Callable[[], object]
    ) -> None:
        config = ConnectionConfig(
            app,
            log_config=None,  # keep the process's log configuration
            log_level=app.state.settings.uvicorn_log_level,
            timeout_graceful_shutdown=CONNECTION_SECONDS,
        )
        super().__init__(config)
        self._stops, self._ready, self._draining, self._drain = stops, ready, draining, config.settings.shutdown_timeout
        self.has_failed = False

    def fail(self) -> None:
        """Stops the server without giving requests time, because their engine is gone. Any thread can call it, also
        before the server runs."""
        self.has_failed, self._drain = True, 0.0

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.has_failed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # The backlog is not set by uvicorn's ``backlog``, because uvicorn would also accept that many connections
            # in one turn of the event loop.
            listener.listen(WAITING_CONNECTIONS)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals(), ExitStack() as stack:
            if HANGUP is not None and (before := signal.getsignal(HANGUP)) is not signal.SIG_IGN:  # as under nohup
                signal.signal(HANGUP, self.handle_exit)
                stack.callback(signal.signal, HANGUP, before)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif sig != HANGUP:
            os._exit(128 + sig)  # no clean-up: the current step may take minutes

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        self._draining()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes idle connections at once, the others after their answers
        tasks, end = self.server_state.tasks, monotonic() + self._drain
        if tasks and self._drain:
            with suppress(OSError):  # the terminal may be closed
                in_flight = counted(len(tasks), "request")
                print(f"stopping: {self._drain:g} s for {in_flight} to end", file=sys.stderr, flush=True)
        while tasks and monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        # ``stops`` come before the connections end. So requests that are still in progress are answered with an error
        # and do not delay the shutdown.
        await asyncio.gather(*(stop() for stop in self._stops))
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)  # the only kind that ConnectionConfig makes
            connection.cut_short()
        await super().shutdown(sockets)


def server_on(
    listener: socket.socket, app: FastAPI, stops: Sequence[Stop], draining: Callable[[], object] = lambda: None
) -> Server:
    """A server that prints its URL once it runs on a bound socket; other arguments as for ``Server``."""
    scheme = "http" if app.state.settings.ssl_certfile is None else "https"
    address = listener.getsockname()
    if isinstance(address, str):
        url = f"unix:{address}"
    else:
        host, port = address[:2]
        url = f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"
    return Server(app, stops, lambda: print(f"ready: {url}", flush=True), draining)
