"""Answers as server-sent events, with a status of its own for what fails at once, and a sign of life in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import monotonic
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from shadowkv.serve.disconnect import unless_disconnected
from shadowkv.serve.errors import as_api_error, error_response

PROMPTLY = 0.05
"""Seconds in which a stream may still fail with a status: a full queue says so at once."""

TURNS = 8
"""Turns of the event loop in which a refusal, which waits for nothing, is sure to be told."""


class EventStream(StreamingResponse):
    """Chunks as server-sent events, closed when the client is gone.

    Starlette's own response, depending on the server, notices that only when it next sends, which a long prefill puts
    off for minutes, and never closes its iterator.

    Args:
        chunks: what to send, as JSON.
        keep_alive: seconds of silence after which a comment is sent, so that proxies do not hang up; 0 is never.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], keep_alive: float) -> None:
        super().__init__((), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._chunks, self._keep_alive = chunks, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            first = asyncio.ensure_future(anext(self._chunks))
            try:
                await asyncio.wait((first,), timeout=PROMPTLY)
                for _ in range(TURNS):  # on a busy loop the time may be up before anything has had its turn
                    await asyncio.sleep(0)
                error = first.exception() if first.done() else None
                if isinstance(error, Exception):
                    return await error_response(as_api_error(error))(scope, receive, send)
                self.body_iterator = self._events(first)
                lively = _Lively(send, self._keep_alive)
                try:
                    await self.stream_response(lively)
                finally:
                    lively.stop()
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def _events(self, first: asyncio.Future[dict[str, Any]]) -> AsyncGenerator[str, None]:
        """An error is the last event but one, since the status has long been sent."""
        try:
            yield _event(await first)
            async for chunk in self._chunks:
                yield _event(chunk)
        except Exception as error:
            yield _event(as_api_error(error).body())
        yield "data: [DONE]\n\n"


class _Lively:
    """``send`` with a comment after every ``interval`` seconds of silence, until the last message or ``stop``."""

    def __init__(self, send: Send, interval: float) -> None:
        self._send, self._interval, self._last = send, interval, monotonic()
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.stop()
        await self._send(message)
        self._last = monotonic()
        if message["type"] == "http.response.start" and self._interval:
            self._task = asyncio.create_task(self._comment())

    def stop(self) -> None:
        """No more comments."""
        if self._task is not None:
            self._task.cancel()

    async def _comment(self) -> None:
        while True:
            wait = self._last + self._interval - monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            await self._send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
            self._last = monotonic()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
