"""An additional HTTP process of a server. The first process starts it. It serves clients on the same socket until the
first process stops it or has ended.

``python -m shadowkv.serve.worker FD LISTENER``, where both are file descriptors: FD of the socket to the first process
(``workers.py``), and LISTENER of the socket that clients connect to.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from shadowkv.engine.child_process import ignore_stop_signals
from shadowkv.engine.held_folder import remove_folder
from shadowkv.engine.process.client import EngineClient
from shadowkv.engine.startup.loading import tokenizer_from_config
from shadowkv.log_format import set_up_log
from shadowkv.serve.app import ready_app
from shadowkv.serve.http.counts import Counts
from shadowkv.serve.http.server import Server
from shadowkv.serve.workers import DRAIN, WorkerLaunch, counts_file


class _WorkerServer(Server):
    """A server that ignores signals. The first process stops it."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def main(descriptor: int, listening: int) -> int:
    """Serves until the first process stops it; returns the exit code."""
    ignore_stop_signals()
    set_up_log()
    control, listener = Connection(descriptor), socket.socket(fileno=listening)
    try:
        launch: WorkerLaunch = control.recv()
    except (OSError, EOFError):
        return 1
    tokenizer = tokenizer_from_config(launch.facts[0].config)
    tokenizer.chat_encoder.prepare()  # as in the first process (engine/process/launch.py)
    clients = [EngineClient(facts, tokenizer, launch.sockets) for facts in launch.facts]
    counts = Counts(len(launch.settings.api_key), counts_file(launch.shared), launch.row)
    app = ready_app(clients, launch.served_name, launch.settings, counts)

    async def stop() -> None:
        for client in clients:
            client.stopping = True
            client.has_ended("the server has been stopped")

    def ready() -> None:
        with suppress(OSError):
            control.send([client.name for client in clients])

    server = _WorkerServer(app, [stop, app.state.drop], ready, lambda: None)
    threading.Thread(
        target=_watch, args=(control, server, clients, launch.shared), name="shadowkv-first-process", daemon=True
    ).start()
    server.run(sockets=[listener])
    return 0


def _watch(control: Connection, server: Server, clients: Sequence[EngineClient], shared: str) -> None:
    with suppress(OSError, EOFError):
        while True:
            text = control.recv()
            if text == DRAIN:
                server.should_exit = True
            else:
                for client in clients:
                    client.has_ended(text)
                server.fail()
    remove_folder(shared)  # the first process is gone
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
