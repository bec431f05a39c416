"""``python -m shadowkv.serve.bodies.reader_process FD``: the process that reads long bodies for the server.

FD is the socket to the server (``reader.py``). For each body the process receives a memory limit and a function, and
then the body itself. It sends back the function's result or its ApiError, and the names of unknown parameters. It ends
when the connection is closed, so that it does not outlive the server.
"""

from __future__ import annotations

import contextlib
import sys
from multiprocessing.connection import Connection

from shadowkv.engine.child_process import limit_memory
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.parameters import unknown


def main(server: Connection) -> None:
    """Reads bodies until the connection is closed."""
    unknown.collects = True
    with contextlib.suppress(EOFError, OSError):
        while True:
            _read_one(server)


def _read_one(server: Connection) -> None:
    memory, work = server.recv()
    limit_memory(memory)
    raw = server.recv_bytes()
    try:
        try:
            server.send((work(raw), unknown.take()))
        except MemoryError:
            message = f"reading this body of {len(raw)} bytes takes more memory than the limit; send less"
            raise ApiError(message, status=413, code="body_too_large") from None
    except ApiError as error:
        server.send((error, unknown.take()))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
