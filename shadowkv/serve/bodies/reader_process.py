"""``python -m shadowkv.serve.bodies.reader_process BYTES``: the process that reads long bodies for the server.

A frame is a length in 8 bytes and that many bytes. The process receives a pickled function and a body. It sends back,
pickled, the function's result or its ApiError, and the names of unknown parameters. It ends when its input ends, so
that it does not outlive the server.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import sys
from typing import IO

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.bodies.parameters import unknown

LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], data: bytes | bytearray) -> None:
    """Writes one frame."""
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """Reads one frame; raises EOFError if the other side has ended."""
    length = stream.read(LENGTH.size)
    if len(length) < LENGTH.size:
        raise EOFError
    (size,) = LENGTH.unpack(length)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def limit_memory(size: int) -> None:
    """Limits this process to ``size`` bytes of address space, if the platform supports it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main(source: IO[bytes], target: IO[bytes]) -> None:
    """Reads bodies until the input ends."""
    unknown.collects = True
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            work, raw = pickle.loads(read_frame(source)), read_frame(source)
            try:
                try:
                    answer = pickle.dumps((work(raw), unknown.take()))
                except MemoryError:
                    message = f"reading this body of {len(raw)} bytes takes more memory than the limit; send less"
                    raise ApiError(message, status=413, code="body_too_large") from None
            except ApiError as error:
                answer = pickle.dumps((error, unknown.take()))
            del raw
            write_frame(target, answer)
            del answer


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    answers, sys.stdout = sys.stdout, sys.stderr  # prints must not go between the frames
    main(sys.stdin.buffer, answers.buffer)
