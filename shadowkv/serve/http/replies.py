"""Sends responses: whole, as an error with its status, or as server-sent events. When a client disconnects, the work on
its request is cancelled at once, so that the request's resources are free before the next token is generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.errors import CLIENT_CLOSED_REQUEST, as_api_error, error_response
from shadowkv.serve.http.request_record import INTERNAL, current_record

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode

PROMPTLY = 0.05
"""Seconds that a stream waits for its first chunk before it sends the status 200. If an error comes first, such as a
full queue, the response has the error's status."""

TURNS = 8
"""Minimum number of turns of the event loop to wait for the first chunk, even if the turns take longer than
``PROMPTLY``. If a request is refused immediately, the error arrives within these turns."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of ``work``. If the client disconnects first, ``work`` is cancelled and the result is None."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
    """Returns the response that ``work`` makes, or an error response if ``work`` raises. ``work`` is cancelled if the
    client disconnects."""

    async def answer() -> Response:
        try:
            return await work()
        except Exception as error:
            return error_response(as_api_error(error), request.url.path)

    return await unless_disconnected(request.receive, answer()) or Response(status_code=CLIENT_CLOSED_REQUEST)


@dataclass
class Events:
    """The chunks of a stream and the format of its API.

    Attributes:
        chunks: the values to send; each is sent as JSON.
        failure: makes the chunk for an error.
        named: whether each event has its ``type`` as its name.
        end: bytes that end the stream.
        sign_of_life: bytes to send during silence, so that proxies do not close the connection.
    """

    chunks: AsyncGenerator[dict[str, Any], None]
    failure: Callable[[ApiError], dict[str, Any]] = ApiError.body
    named: bool = False
    end: bytes = b"data: [DONE]\n\n"
    sign_of_life: bytes = b": keep-alive\n\n"

    async def encoded(self, first: asyncio.Future[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
        """Yields all events. ``first`` is the first chunk, which has already been requested. An error becomes an event,
        since the status has already been sent."""
        try:
            yield self._event(await first)
            async for chunk in self.chunks:
                yield self._event(chunk)
        except Exception as error:
            shown = as_api_error(error)
            if (record := current_record()) is not None:
                record.cut = shown.code or INTERNAL
            yield self._event(self.failure(shown))
        if self.end:
            yield self.end

    def _event(self, data: dict[str, Any]) -> bytes:
        return encoded_event(data, self.named)


def encoded_event(data: dict[str, Any], named: bool) -> bytes:
    """One server-sent event, with its ``type`` as its name if ``named``."""
    event = b"data: %b\n\n" % encode_json(data)
    return b"event: %b\n%b" % (data["type"].encode(), event) if named else event


class EventStream(Response):
    """Server-sent events that stop when the client disconnects.

    Events go directly to the connection's ``BodyWriter``, if the request's scope has one. They then skip the
    middleware, which the application's other messages pass through.

    Args:
        events: what to send.
        keep_alive: seconds of silence after which a sign of life is sent; 0 means never.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, keep_alive: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events, self._keep_alive = events, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events.chunks) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            try:
                await asyncio.wait((first,), timeout=PROMPTLY)
                for _ in range(TURNS):  # on a busy loop the time can be up before anything has run
                    if first.done():
                        break
                    await asyncio.sleep(0)
                error = first.exception() if first.done() else None
                if isinstance(error, Exception):
                    return await error_response(as_api_error(error), scope["path"])(scope, receive, send)
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                write = scope.get(BODY_WRITER) or partial(_write, send)
                async with aclosing(self._events.encoded(first)) as encoded:
                    with _Lively(write, self._keep_alive, self._events.sign_of_life) as lively:
                        async for event in encoded:
                            await write(event)
                            lively.last = monotonic()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)


Write = Callable[[bytes], Awaitable[None]]

BODY_WRITER = "shadowkv.body_writer"
"""Key in a request's ASGI scope for the write function of the connection's ``BodyWriter``, if there is one."""


async def _write(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


class _Lively:
    """A context that sends a sign of life after every ``interval`` seconds of silence.

    Attributes:
        last: time of the last write, in seconds of ``time.monotonic``.
    """

    def __init__(self, write: Write, interval: float, sign: bytes) -> None:
        self._write, self._interval, self._sign, self.last = write, interval, sign, monotonic()
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> _Lively:
        if self._interval:
            self._task = asyncio.create_task(self._say())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _say(self) -> None:
        while True:
            wait = self.last + self._interval - monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            await self._write(self._sign)
            self.last = monotonic()
