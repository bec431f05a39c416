"""An application behind a real socket, for clients that need one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from shadowkv.serve.http.connections import ConnectionConfig


@contextmanager
def http_server(app: FastAPI, listener: socket.socket | None = None) -> Iterator[str]:
    """Base URL of ``app``, served by a thread; on a socket that clients may have come to before."""
    with listener or socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(ConnectionConfig(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
