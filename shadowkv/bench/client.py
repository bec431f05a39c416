"""A cheap client for streamed completions: HTTP/1.1 on asyncio's transports, with one JSON parse per event.

General HTTP clients spend more time per event than servers do, so a benchmark would measure the client. Proxies of the
environment are not used.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from shadowkv.bench.serving_stats import Record

IDLE_SECONDS = 1.0
"""Maximum idle time of a connection that is used again; servers close theirs after a few seconds."""

EventTaker = Callable[[bytes, float], None]


class Refused(Exception):
    """The server cannot be reached, returns an error, or breaks off."""


class CompletionClient:
    """Sends completions to one server, any number in parallel. Connections are reused.

    Args:
        base_url: URL of the API, with its ``/v1``; http or https.
        api_key: sent as bearer token.
        path: path below ``base_url``.
    """

    def __init__(self, base_url: str, api_key: str = "none", path: str = "completions") -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise ValueError(f"{base_url!r} is not an http or https URL")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._name, self._host = url.hostname, url.hostname
        self._port = url.port or (443 if self._tls else 80)
        self._head = (
            f"POST {url.path.rstrip('/')}/{path} HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n"
            f"Authorization: Bearer {api_key}\r\nContent-Type: application/json\r\n"
            "Accept: text/event-stream\r\nContent-Length: "
        ).encode()
        self._idle: list[_Connection] = []

    async def stream(
        self, body: bytes, record: Record, see: Callable[[dict[str, Any], float], None] = lambda event, when: None
    ) -> None:
        """Sends the JSON of a streaming completion, and fills ``record`` until the answer has ended. ``see`` is called
        with each event and its time.

        Sets ``record.sent`` first, so that connecting counts, as in vLLM's benchmark. Raises Refused for anything but a
        complete answer; ``record`` then has what arrived before.
        """
        record.sent = time.perf_counter()

        def take(data: bytes, when: float) -> None:
            if data == b"[DONE]":
                record.done = True
                return
            event = json.loads(data)
            if "error" in event:
                raise Refused(event["error"]["message"])
            if event["choices"]:
                record.chunks.append(when)
            if event.get("usage"):
                record.output_tokens = event["usage"]["completion_tokens"]
            see(event, when)

        try:
            connection = await self._connection()
        except OSError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        try:
            await connection.post(self._head + f"{len(body)}\r\n\r\n".encode() + body, take)
        except BaseException:
            connection.close()
            raise
        if not record.done:
            connection.close()
            raise Refused("the stream broke off")
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and time.perf_counter() - connection.last_used < IDLE_SECONDS:
                return connection
            connection.close()
        name = self._name if self._tls else None
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._tls, server_hostname=name
        )
        self._host = transport.get_extra_info("peername")[0]  # the next connection need not resolve the name
        return connection


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, which answers one request at a time with an event stream."""

    def __init__(self) -> None:
        self.reusable, self.last_used = True, 0.0
        self._buffer, self._body = bytearray(), bytearray()
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def post(self, request: bytes, take: EventTaker) -> None:
        """Sends ``request``; ``take`` is called with each event's data and the arrival time of its last byte.

        Raises Refused for any status but 200 and for an answer that is not HTTP, and whatever ``take`` raises.
        """
        self._take, self._status = take, 0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._answered

    def close(self) -> None:
        """Closes the connection at once."""
        self.reusable = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        when = time.perf_counter()
        if self._answered is None or self._answered.done():
            self.close()  # no request is pending
            return
        self._buffer += data
        try:
            if not self._status and not self._read_head():
                return
            if self._read_body(when):
                self._end()
        except Refused as error:
            self._fail(error)
        except (ValueError, LookupError, TypeError) as error:
            self._fail(Refused(f"the answer cannot be read: {type(error).__name__}: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._answered is None or self._answered.done():
            return
        if not self._status:
            self._fail(Refused(f"no answer: {error or 'the connection was closed'}"))
            return
        try:
            self._end()  # ends a body without a length; the caller checks that its events are complete
        except Refused as refusal:
            self._fail(refusal)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (s.partition(":") for s in lines)}
        del self._buffer[: end + 4]
        self._status = int(first.split()[1])
        self._chunked = "chunked" in headers.get("transfer-encoding", "")
        length = headers.get("content-length")
        self._left: int | None = None if self._chunked or length is None else int(length)
        self.reusable = headers.get("connection") != "close" and (self._chunked or length is not None)
        return True

    def _read_body(self, when: float) -> bool:
        """Reads what has arrived; returns whether the body has ended."""
        if self._chunked:
            ended = self._read_chunks()
        else:
            if self._left is not None:
                self._left -= len(self._buffer)
            self._body += self._buffer
            self._buffer.clear()
            ended = self._left is not None and self._left <= 0
        if self._status == 200:
            *lines, rest = self._body.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):  # other lines are empty or keep-alive comments
                    self._take(bytes(line[5:].strip()), when)
            self._body = rest
        return ended

    def _read_chunks(self) -> bool:
        buffer, position = self._buffer, 0
        while (end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:end].partition(b";")[0], 16)
            if size == 0:
                if buffer.find(b"\r\n\r\n", end) < 0:
                    break  # trailers and the empty line after them are missing
                buffer.clear()
                return True
            begin = end + 2
            if len(buffer) < begin + size + 2:
                break
            self._body += buffer[begin : begin + size]
            position = begin + size + 2
        del buffer[:position]
        return False

    def _end(self) -> None:
        self.last_used = time.perf_counter()
        if self._status != 200:
            raise Refused(f"status {self._status}: {error_text(bytes(self._body))}")
        self._body.clear()
        assert self._answered is not None
        self._answered.set_result(None)

    def _fail(self, error: Refused) -> None:
        self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


def error_text(body: bytes) -> str:
    """Returns the message of an error's body. A body that is not in the OpenAI API's format is returned as text, cut to
    200 bytes."""
    with suppress(ValueError, LookupError, TypeError):
        message: Any = json.loads(body)["error"]["message"]
        return str(message)
    return body[:200].decode("utf-8", "replace")
