"""How replies are sent: whole, as an error with its status, or as server-sent events; and no longer than their client
waits, so that what a request holds is free at once when it hangs up, not at the next token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from shadowkv.engine.request import EngineStopped
from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.errors import as_api_error, error_response
from shadowkv.serve.http.request_record import INTERNAL, SERVER_STOPPING, current_record

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that the client did not wait for."""

PROMPTLY = 0.05
"""Seconds during which a stream may still fail with a status: a full queue is reported at once."""

TURNS = 8
"""Turns of the event loop within which an immediate refusal is certain to be reported."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; when the client is gone, ``work`` is cancelled and the result is None."""
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
    """The response that ``work`` makes, or that of the error that it raises; ``work`` ends when the client is gone."""

    async def answer() -> Response:
        try:
            return await work()
        except Exception as error:
            return error_response(as_api_error(error), request.url.path)

    return await unless_disconnected(request.receive, answer()) or Response(status_code=CLIENT_CLOSED_REQUEST)


@dataclass
class Events:
    """What a stream sends, and how its API formats that.

    Attributes:
        chunks: what to send, as JSON.
        failure: the chunk for an error.
        named: whether an event has its ``type`` as its name.
        end: what comes last.
        sign_of_life: what is sent during silence, so that proxies do not hang up.
    """

    chunks: AsyncGenerator[dict[str, Any], None]
    failure: Callable[[ApiError], dict[str, Any]] = ApiError.body
    named: bool = False
    end: str = "data: [DONE]\n\n"
    sign_of_life: str = ": keep-alive\n\n"

    async def texts(self, first: asyncio.Future[dict[str, Any]]) -> AsyncGenerator[str, None]:
        """All events, beginning with a chunk that has already been requested. An error comes last but for the end,
        since the status was sent long before."""
        try:
            yield self._event(await first)
            async for chunk in self.chunks:
                yield self._event(chunk)
        except Exception as error:
            shown = as_api_error(error)
            if (record := current_record()) is not None:
                record.cut = SERVER_STOPPING if isinstance(error, EngineStopped) else shown.code or INTERNAL
            yield self._event(self.failure(shown))
        yield self.end

    def _event(self, data: dict[str, Any]) -> str:
        return event_text(data, self.named)


def event_text(data: dict[str, Any], named: bool) -> str:
    """An event of a stream, with its ``type`` as its name if ``named``."""
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, closed when the client is gone.

    Depending on the server, Starlette's own response notices that only when it next sends, which a long prefill delays
    by minutes, and it never closes its iterator.

    Args:
        events: what to send.
        keep_alive: seconds of silence after which a sign of life is sent; 0 means never.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, keep_alive: float) -> None:
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._keep_alive = events, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events.chunks) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            try:
                await asyncio.wait((first,), timeout=PROMPTLY)
                for _ in range(TURNS):  # on a busy loop, the time may be up before anything has run
                    await asyncio.sleep(0)
                error = first.exception() if first.done() else None
                if isinstance(error, Exception):
                    return await error_response(as_api_error(error), scope["path"])(scope, receive, send)
                self.body_iterator = self._events.texts(first)
                lively = _Lively(send, self._keep_alive, self._events.sign_of_life.encode())
                try:
                    await self.stream_response(lively)
                finally:
                    lively.stop()
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)


class _Lively:
    """``send``, with a sign of life after every ``interval`` seconds of silence, until the last message or ``stop``."""

    def __init__(self, send: Send, interval: float, sign: bytes) -> None:
        self._send, self._interval, self._sign, self._last = send, interval, sign, monotonic()
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.stop()
        await self._send(message)
        self._last = monotonic()
        if message["type"] == "http.response.start" and self._interval:
            self._task = asyncio.create_task(self._say())

    def stop(self) -> None:
        """Ends the signs of life."""
        if self._task is not None:
            self._task.cancel()

    async def _say(self) -> None:
        while True:
            wait = self._last + self._interval - monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            await self._send({"type": "http.response.body", "body": self._sign, "more_body": True})
            self._last = monotonic()
