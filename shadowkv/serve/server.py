"""Runs the HTTP API on a socket until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import uvicorn

from shadowkv.serve.api import build_app

if TYPE_CHECKING:
    from shadowkv.engine.async_engine import AsyncEngine

ENGINE_SECONDS = 5.0
CONNECTION_SECONDS = 5
"""How long a stop waits for the step at work, and then for clients to read what they still get."""


class _Server(uvicorn.Server):
    """uvicorn's server, with the engine's end as part of its own."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, url: str) -> None:
        super().__init__(config)
        self._engine, self._url = engine, url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"ready: {self._url}/v1", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First, so that requests in flight end with an error instead of keeping the server up until they are done.
        await asyncio.to_thread(self._engine.shutdown, ENGINE_SECONDS)
        await super().shutdown(sockets)


def serve(engine: AsyncEngine, served_name: str, listener: socket.socket) -> None:
    """Serves on a bound socket; raises KeyboardInterrupt after a Ctrl-C, everything being shut down."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        build_app(engine, served_name),
        log_level="warning",
        timeout_graceful_shutdown=CONNECTION_SECONDS,
    )
    _Server(config, engine, url).run(sockets=[listener])
