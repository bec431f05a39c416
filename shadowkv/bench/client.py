"""A cheap client for streamed completions: HTTP/1.1 on asyncio's streams, with one JSON parse per event.

General HTTP clients spend more time per event than servers do, so a benchmark with such a client would measure the
client. Proxies that environment variables name are not used.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from shadowkv.bench.serving_stats import Record

IDLE_SECONDS = 1.0
"""A connection that was idle for longer is not used again, because servers close idle connections after a few
seconds."""

EventTaker = Callable[[bytes, float], None]


class Refused(Exception):
    """The server cannot be reached, returns an error, or breaks off its answer."""


class CompletionClient:
    """Sends completions to one server, any number in parallel. Connections are reused.

    Args:
        base_url: http or https URL of the API, including ``/v1``.
        api_key: the API key, which is sent as bearer token.
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
        """Sends ``body``, the JSON of a request for a streamed completion, and fills ``record`` until the answer has
        ended. ``see`` is called with each event and the time at which it arrived.

        ``record.sent`` is set before a connection is opened, so latencies include connecting, as in vLLM's benchmark.
        Raises Refused if the answer is not complete; ``record`` then describes the part that arrived.
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
        streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls, server_hostname=name)
        self._host = streams[1].get_extra_info("peername")[0]  # the next connection need not resolve the name
        return _Connection(*streams)


class _Connection:
    """One HTTP/1.1 connection, which answers one request at a time with an event stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._may_be_reused, self.last_used = True, 0.0

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent."""
        return self._may_be_reused and not self._reader.at_eof() and not self._writer.is_closing()

    async def post(self, request: bytes, take: EventTaker) -> None:
        """Sends ``request``; ``take`` is called with each event's data and the arrival time of its last byte.

        Raises Refused if there is no answer, if its status is not 200, and if it cannot be read. It cannot be read if
        it is not HTTP, or if ``take`` raises ValueError, LookupError or TypeError.
        """
        self._writer.write(request)
        status, body = 0, b""
        try:
            status, headers = await self._read_head()
            async for data in self._pieces(headers):
                body += data
                if status == 200:
                    when = time.perf_counter()
                    *lines, body = body.split(b"\n")
                    for line in lines:
                        if line.startswith(b"data:"):  # other lines are empty or keep-alive comments
                            take(line[5:].strip(), when)
        except (OSError, asyncio.IncompleteReadError) as error:
            self._may_be_reused = False
            if not status:
                reason = "the connection was closed" if isinstance(error, asyncio.IncompleteReadError) else error
                raise Refused(f"no answer: {reason}") from error
            # If there is a status, the answer ends here, and the caller checks that its events are complete.
        except (ValueError, LookupError, TypeError, asyncio.LimitOverrunError) as error:
            raise Refused(f"the answer cannot be read: {type(error).__name__}: {error}") from error
        self.last_used = time.perf_counter()
        if status != 200:
            raise Refused(f"status {status}: {error_text(body)}")

    def close(self) -> None:
        """Closes the connection at once."""
        self._writer.transport.abort()

    async def _read_head(self) -> tuple[int, dict[str, str]]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.strip().lower(): value.strip().lower() for name, _, value in fields}

    async def _pieces(self, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yields the body's pieces as they arrive."""
        reader, length = self._reader, headers.get("content-length")
        self._may_be_reused = headers.get("connection") != "close"
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        elif length is not None:
            yield await reader.readexactly(int(length))
        else:
            self._may_be_reused = False
            while data := await reader.read(2**16):
                yield data


def error_text(body: bytes) -> str:
    """Returns the message of an error's body. A body that is not in the OpenAI API's format is returned as text, cut to
    200 bytes."""
    with suppress(ValueError, LookupError, TypeError):
        message: Any = json.loads(body)["error"]["message"]
        return str(message)
    return body[:200].decode("utf-8", "replace")
