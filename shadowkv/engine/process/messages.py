"""What an engine's process and those that serve its clients say to one another, as msgpack over ZeroMQ.

Every serving process has a PULL socket, into which the engine pushes one message for each step: all that the step
added to that process's requests. In the other direction go requests and questions, from a DEALER socket to the
engine's ROUTER, through which refusals come back: these do not wait for a step. The sockets are in a folder that
nobody else may enter; both ends are of one installation, which ``VERSION`` checks.
"""

from __future__ import annotations

import array
import sys
from typing import Any, TypeAlias

import msgspec

from shadowkv.engine.outputs import TokenOutput
from shadowkv.engine.sampling_params import SamplingParams
from shadowkv.engine.structured.json_schema import Effort

VERSION = 5
"""Of these messages."""

ID_BYTES = 4
"""Of a packed token id."""


class Greeting(msgspec.Struct, tag=True):
    """A serving process has opened its PULL socket."""

    version: int
    address: str


class Add(msgspec.Struct, tag=True):
    """A new request.

    Attributes:
        request_id: begins with the number of the serving process.
        prompt: token ids, from ``pack_ids``.
        arrival: when it came, in seconds of ``time.monotonic``, which all processes of a machine share.
        looked_up, tenant, priority: as in ``Request``.
        save: number of the question, and the name, where its prompt is to be saved once it is computed.
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
    """The answer to a request is complete: it has a stop string."""

    request_id: str


class Abort(msgspec.Struct, tag=True):
    """Nobody waits for a request any more."""

    request_id: str


class Forget(msgspec.Struct, tag=True):
    """Nobody waits for the answer to a question any more."""

    number: int


class Statistics(msgspec.Struct, tag=True):
    """Asks for ``EngineStats``, with or without the ``usage``."""

    number: int
    usage: bool = False


class Compile(msgspec.Struct, tag=True):
    """Asks for a JSON schema or other rules to be made ready for use. It waits for others of as much ``effort``, which
    take turns by tenant."""

    number: int
    rules: str
    one_line: bool
    effort: Effort
    tenant: str


class Segments(msgspec.Struct, tag=True):
    """Asks where cached prompts are: at most ``most`` segments, and their number."""

    number: int
    most: int


class Restore(msgspec.Struct, tag=True):
    """Asks for what is kept under a name to be brought to host memory."""

    number: int
    name: str


class HandOver(msgspec.Struct, tag=True):
    """Asks for a computed prompt to be written to the disk, for another server."""

    number: int
    prompt: bytes
    cache_salt: str | None


class Expect(msgspec.Struct, tag=True):
    """Asks for snapshots of prompts of ``tokens`` tokens that another server has written, or is about to."""

    number: int
    names: tuple[str, ...]
    tokens: int


Question: TypeAlias = Statistics | Compile | Segments | Restore | HandOver | Expect
Command: TypeAlias = Greeting | Add | Stop | Abort | Forget | Question


class Step(msgspec.Struct, tag=True):
    """What a step added to one serving process's requests."""

    outputs: list[TokenOutput]


class Refused(msgspec.Struct, tag=True):
    """A request that is not served: for good, or because the queue is ``busy``."""

    request_id: str
    message: str
    param: str | None = None
    busy: bool = False


class Reply(msgspec.Struct, tag=True):
    """The answer to a question, as msgpack."""

    number: int
    value: msgspec.Raw


class Failure(msgspec.Struct, tag=True):
    """A question that has no answer, by the name of the error's class; ``param`` as in ``RequestError``."""

    number: int
    kind: str
    message: str
    param: str | None = None


class Ended(msgspec.Struct, tag=True):
    """The engine has ended; ``error`` says why, where it was not stopped."""

    error: str | None = None


Event: TypeAlias = Step | Refused | Reply | Failure | Ended


def pack_ids(token_ids: list[int]) -> bytes:
    """Token ids as int32, in this machine's byte order."""
    return array.array("i", token_ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse."""
    ids = array.array("i")
    ids.frombytes(packed)
    return ids.tolist()


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode


def reply(number: int, value: Any) -> Reply:
    """The answer ``value`` to a question."""
    return Reply(number, msgspec.Raw(encode(value)))


def decode_reply(value: bytes | msgspec.Raw, kind: Any) -> Any:
    """A reply's value, of type ``kind``."""
    return msgspec.msgpack.decode(value, type=kind)


def socket_address(folder: str, name: str) -> str:
    """Address of a socket in the private folder; Windows has no such sockets."""
    if sys.platform == "win32":
        raise OSError("an engine's process is reached through Unix sockets, which Windows does not have")
    return f"ipc://{folder}/{name}"
