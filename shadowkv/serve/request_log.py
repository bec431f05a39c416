"""Request ids and the access log: every answer has an ``X-Request-Id``, and every request gets a line at its end."""

from __future__ import annotations

import asyncio
import logging
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shadowkv.serve.guard import OPEN_PATHS, STATS_PATH
from shadowkv.serve.request_record import CLIENT_GONE, INTERNAL, SERVER_STOPPING, RequestRecord, set_current_record
from shadowkv.serve.tracing import Tracing

logger = logging.getLogger(__name__)

MAX_FIELD_CHARS = 200
"""Limit for what a client influences: its address behind a proxy, the method and the path."""


class RequestLog:
    """ASGI middleware, the outermost one.

    Args:
        app: the application that answers.
        log: whether requests are logged.
        tracing: where spans are sent, if anywhere.
    """

    def __init__(self, app: ASGIApp, log: bool, tracing: Tracing | None) -> None:
        self._app, self._log, self._tracing = app, log, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = RequestRecord.of(scope)
        set_current_record(record)
        begun = whole = gone = False

        async def heard() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def noted(message: Message) -> None:
            nonlocal begun, whole
            if message["type"] == "http.response.start":
                begun, record.status = True, message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
                message = {**message, "headers": headers}
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                whole = True
            await send(message)

        try:
            await self._app(scope, heard, noted)
        except asyncio.CancelledError:  # for what is in progress at a stop that waits no longer
            record.cut = SERVER_STOPPING
            raise
        finally:
            if gone and not whole:
                record.cut = CLIENT_GONE
            elif begun and not whole:  # what has not begun is answered outside of this
                record.cut = record.cut or INTERNAL
            # Probes and the page poll every few seconds.
            if self._log and not (record.status == 200 and scope["path"] in OPEN_PATHS | {STATS_PATH}):
                logger.info("%s", _line(scope, record))
            if self._tracing is not None:
                self._tracing.add(scope, record)


def _line(scope: Scope, record: RequestRecord) -> str:
    """``name=value`` for all but the first fields; fields contain no blanks, so that a client cannot forge one."""
    client = "-" if scope.get("client") is None else "{}:{}".format(*scope["client"])
    path = scope.get("raw_path", b"").decode("latin-1")  # still quoted, and without the query
    fields = [_field(client), _field(scope["method"]), _field(path), str(record.status), f"id={record.id}"]
    if record.generation is not None:
        usage = record.generation.usage()
        fields += [
            f"prompt_tokens={usage['prompt_tokens']}",
            f"cached_tokens={usage['prompt_tokens_details']['cached_tokens']}",
            f"completion_tokens={usage['completion_tokens']}",
        ]
        if (first := record.time_to_first_token) is not None:
            fields.append(f"ttft={first:.3f}s")
    fields.append(f"duration={record.duration:.3f}s")
    return " ".join([*fields, *(() if record.cut is None else (f"cut={record.cut}",))])


def _field(text: str) -> str:
    return re.sub(r"[^!-~]", "?", text)[:MAX_FIELD_CHARS]
