"""Messages between an engine's process and the serving processes, as msgpack over ZeroMQ.

Each serving process has a PULL socket. The engine pushes one message per step into it. The message holds the outputs of
that serving process's requests. Requests, and questions that have one answer each, go from a DEALER socket to the
engine's ROUTER socket. Refusals come back the same way, without waiting for a step. The sockets are in a folder that
only this user can enter. The engine refuses a ``Greeting`` with another ``VERSION``: both ends must be of the same
installation.
"""

from __future__ import annotations

import array
import sys
from typing import Any, TypeAlias

import msgspec

from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.sampling_params import SamplingParams

VERSION = 8
"""Version of these messages."""

ID_BYTES = 4
"""Bytes of a packed token id."""


class Greeting(msgspec.Struct, tag=True):
    """A serving process has opened its PULL socket at ``address``."""

    version: int
    address: str


class Add(msgspec.Struct, tag=True):
    """A new request.

    Attributes:
        request_id: the client's name, "-", and a number.
        prompt: token ids, from ``pack_ids``.
        arrival: time of arrival, in seconds of ``time.monotonic``, which all processes of a machine share.
        looked_up, tenant, priority: as in ``Request``.
        save: a question's number and the name under which to save the computed prompt. None saves nothing.
    """

    request_id: str
    prompt: bytes
    params: SamplingParams
    arrival: float
    looked_up: bool = True
    tenant: str = ""
    priority: int = 0
    save: tuple[int, str] | None = None


class Stop(msgspec.Struct, tag=True):
    """A request's text has reached a stop string: the engine must finish the request."""

    request_id: str


class Abort(msgspec.Struct, tag=True):
    """The client has given up a request: the engine must abort it."""

    request_id: str


class Forget(msgspec.Struct, tag=True):
    """The client has given up a question."""

    number: int


class Statistics(msgspec.Struct, tag=True):
    """Asks for ``EngineStats``, with or without ``usage``."""

    number: int
    usage: bool = False


class Compile(msgspec.Struct, tag=True):
    """Asks to compile a JSON schema or grammar. Compilations wait for one another, fairly between tenants."""

    number: int
    rules: str
    one_line: bool
    tenant: str


class Segments(msgspec.Struct, tag=True):
    """Asks for at most ``most`` segments of cached prompts with their tiers, and for the total number of segments."""

    number: int
    most: int


class Restore(msgspec.Struct, tag=True):
    """Asks to read the prompt saved under a name into host memory."""

    number: int
    name: str


class HandOver(msgspec.Struct, tag=True):
    """Asks to write a computed prompt to the disk, for another server."""

    number: int
    prompt: bytes
    cache_salt: str | None


class Expect(msgspec.Struct, tag=True):
    """Asks to wait for a chain of snapshots that another server writes, of ``tokens`` tokens in all."""

    number: int
    names: tuple[str, ...]
    tokens: int


Question: TypeAlias = Statistics | Compile | Segments | Restore | HandOver | Expect
Command: TypeAlias = Greeting | Add | Stop | Abort | Forget | Question


class Step(msgspec.Struct, tag=True):
    """A step's outputs for one serving process's requests."""

    outputs: list[TokenOutput]


class Refused(msgspec.Struct, tag=True):
    """A request was refused: because it can never be served, or, if ``busy``, because the queue is full."""

    request_id: str
    message: str
    param: str | None = None
    busy: bool = False


class Reply(msgspec.Struct, tag=True):
    """The answer to a question, as msgpack."""

    number: int
    value: msgspec.Raw


class Failure(msgspec.Struct, tag=True):
    """A question has failed. ``kind`` is the name of the error's class, ``param`` is as in ``RequestError``."""

    number: int
    kind: str
    message: str
    param: str | None = None


class Ended(msgspec.Struct, tag=True):
    """The engine has ended. ``error`` says why; None if it was stopped."""

    error: str | None = None


Event: TypeAlias = Step | Refused | Reply | Failure | Ended


def pack_ids(token_ids: list[int]) -> bytes:
    """Packs token ids as int32, in this machine's byte order."""
    return array.array("i", token_ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Unpacks the bytes of ``pack_ids``."""
    ids = array.array("i")
    ids.frombytes(packed)
    return ids.tolist()


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode


def reply(number: int, value: Any) -> Reply:
    """Makes the message that answers question ``number`` with ``value``."""
    return Reply(number, msgspec.Raw(encode(value)))


def decode_reply(value: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decodes a reply's value, of type ``kind``."""
    return msgspec.msgpack.decode(value, type=kind)


def socket_address(folder: str, name: str) -> str:
    """The address of a socket in the private folder. Raises OSError on Windows, which has no such sockets."""
    if sys.platform == "win32":
        raise OSError("an engine's process needs Unix sockets, which Windows does not support")
    return f"ipc://{folder}/{name}"
