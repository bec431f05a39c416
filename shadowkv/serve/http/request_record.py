"""The record of an HTTP request while it is served: its id, and what the log and traces report at its end."""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Scope

from shadowkv.engine.outputs import TextOutput

if TYPE_CHECKING:
    from shadowkv.engine.process.client import ClientRequest

SANE_ID = re.compile(rb"[A-Za-z0-9._:=+/@-]{1,128}")
"""Format of ids that clients can choose; they appear in answers, headers and the log."""

CLIENT_GONE, SERVER_STOPPING, INTERNAL = "client_gone", "server_stopping", "internal_error"
"""Reasons why an answer was cut short, besides the codes of errors."""


class Generation(Protocol):
    """What the log and traces report about the generation for a request.

    Attributes:
        model: the name that clients use for the model.
        choices: the choices of the answer, each of which is a request to the engine.
        last_outputs: the latest output of each choice; keys are the choices' indices.
    """

    model: str
    choices: list[ClientRequest]
    last_outputs: dict[int, TextOutput]

    def usage(self) -> dict[str, Any]:
        """Token counts so far, as in an answer."""
        ...


@dataclass
class RequestRecord:
    """One HTTP request.

    Attributes:
        id: the client's ``X-Request-Id`` if it is valid, or a new one.
        began: time of arrival, in seconds of ``time.monotonic``.
        began_ns: time of arrival, in nanoseconds since 1970.
        status: the answer's status; 500 until the answer begins.
        cut: one word that says why the answer is incomplete, even though the status may be 200. None if the client
            gets a complete answer or a complete error.
        generation: the generation for the request, if any.
    """

    id: str
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    status: int = 500
    cut: str | None = None
    generation: Generation | None = None

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """The record of an ASGI request that has just arrived."""
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        return cls(given.decode() if SANE_ID.fullmatch(given) else uuid.uuid4().hex)

    @property
    def duration(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.began

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token of any choice; None before that."""
        outputs = () if self.generation is None else self.generation.last_outputs.values()
        first = [output.times.first_token for output in outputs if output.times.first_token is not None]
        return min(first) - self.began if first else None

    @property
    def time_in_queue(self) -> float | None:
        """Shortest time that a choice spent in the queue, in seconds; None before a choice has left the queue."""
        outputs = () if self.generation is None else self.generation.last_outputs.values()
        waited = [
            output.times.scheduled - output.times.arrival for output in outputs if output.times.scheduled is not None
        ]
        return min(waited) if waited else None


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def current_record() -> RequestRecord | None:
    """The record of the current request; None outside of a request, as in batch mode."""
    return _current.get()


def set_current_record(record: RequestRecord) -> None:
    """Makes ``record`` the current one in this task and in those that it starts."""
    _current.set(record)
