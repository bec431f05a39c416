"""Connections of clients that may be slow, dead or hostile: each has a time limit, and their number is limited.

uvicorn closes idle connections (``timeout_keep_alive``) and limits a header's size. This module adds time-outs for
incomplete requests and for unread answers. It also limits the number of connections in a way that keeps silent clients
from crowding out active ones.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections import OrderedDict
from typing import Any, Literal
from urllib.parse import unquote

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shadowkv.serve.bodies.api_error import ApiError
from shadowkv.serve.http.errors import RETRY_SECONDS, error_response
from shadowkv.serve.http.middleware import OPEN_PATHS
from shadowkv.serve.http.replies import BODY_WRITER
from shadowkv.serve.http.settings import ServerSettings
from shadowkv.wording import counted

MIN_BODY_RATE = 500
"""Minimum rate at which a body must arrive, in bytes per second, averaged over ``client_body_timeout`` seconds. It is
the default of Apache's ``MinRate``."""

UNSENT_BYTES = 2**14
"""Maximum number of unsent bytes of an answer that the operating system buffers. With a larger buffer it takes longer
to notice that a client does not read."""

HEADER_PIECE = 4096
"""A header is parsed in pieces of this many bytes; its length is checked after each piece."""

ACCEPTED_AT_ONCE = 64
"""Maximum number of connections accepted before any of them is handled."""

ABSOLUTE_FORM = re.compile(rb"https?://(?P<host>[^/]*)(?P<path>/.*)?", re.IGNORECASE)

IDLE = {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
"""States of a connection whose last request and answer are complete."""

Owed = Literal["request", "header", "body"]


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration for an application from ``build_app``, whose settings limit the connections.

    It always uses the h11 parser, whichever others are installed. It disables WebSockets, because the limits would not
    cover them.
    """

    def __init__(self, app: FastAPI, **options: Any) -> None:
        self.settings: ServerSettings = app.state.settings
        self.metrics, self.counts = app.state.metrics, app.state.counts
        self.owing: OrderedDict[Connection, None] = OrderedDict()
        """Connections on which the server waits for the client to send something, longest wait first."""
        super().__init__(
            app,
            http=Connection,
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=self.settings.timeout_keep_alive,
            h11_max_incomplete_event_size=self.settings.h11_max_incomplete_event_size,
            ssl_certfile=self.settings.ssl_certfile,
            ssl_keyfile=self.settings.ssl_keyfile,
            ssl_ca_certs=self.settings.ssl_ca_certs,
            ssl_cert_reqs=self.settings.ssl_cert_reqs,
            **options,
        )


class Connection(H11Protocol):
    """One connection. The server limits both the time in which the client must send a request, and the time in which it
    must read the answer."""

    config: ConnectionConfig

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._served, self.app = self.app, self._admitted
        self._owed: tuple[Owed | None, Any] = (None, None)
        self._idle = self._surplus = False
        self._received = 0
        self._read_clock: asyncio.TimerHandle | None = None
        self._write_clock: asyncio.TimerHandle | None = None

    # -- uvicorn's and asyncio's calls -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        # asyncio calls ``pause_writing`` when the transport's buffer exceeds this limit; the method starts the timer
        # for unread answers. With the limit 0, every answer that does not go out at once has a timer: also a small one,
        # and one on a closing connection. With TLS, asyncio pauses when the buffer reaches the limit. With the limit 0
        # it would then never resume.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0)
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and self._socket.family in (socket.AF_INET, socket.AF_INET6):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.config.metrics.connections.inc()
        self._count()
        self._watch_reading()
        if self._are_too_many():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._idle = False
        self._received += len(data)
        while data and not self.transport.is_closing():
            # h11 checks a header's length only while the header is incomplete. So it gets headers in pieces.
            size = HEADER_PIECE if self._owes() == "header" else len(data)
            super().data_received(data[:size])
            data = data[size:]
        if self._is_between_requests() and not self.transport.is_closing():
            # The rest of a body has arrived after its answer was sent. uvicorn's keep-alive timer stopped at the body's
            # first byte, so it is started again.
            self._idle = True
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._watch_reading()

    def _is_between_requests(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.states == IDLE and not self.conn.trailing_data[0]

    def on_response_complete(self) -> None:
        self._idle = True
        super().on_response_complete()
        self._watch_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._write_clock)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.config.metrics.connections.dec()
        self._count()
        self.config.owing.pop(self, None)
        _stop(self._read_clock)
        _stop(self._write_clock)

    # -- what the client sends -------------------------------------------------------------------------------------

    def _owes(self) -> Owed | None:
        """What the server waits for: a further request, the rest of a header, the rest of a body, or nothing
        (None)."""
        if self.transport.is_closing():
            return None
        if self.cycle is None or self.cycle.response_complete:
            return "request" if self._idle else "header"
        return "body" if self.cycle.more_body else None

    def _watch_reading(self) -> None:
        """If the result of ``_owes`` has changed, stops the old timer and starts a new one. While the server waits for
        a further request, uvicorn's keep-alive timer runs instead."""
        owed = self._owes(), self.cycle
        if owed == self._owed:
            return
        self._owed = owed
        _stop(self._read_clock)
        self.config.owing.pop(self, None)
        if owed[0] is not None:
            self.config.owing[self] = None
        seconds = self.config.settings
        if owed[0] == "header" and seconds.client_header_timeout:
            self._read_clock = self.loop.call_later(seconds.client_header_timeout, self._late_header)
        elif owed[0] == "body" and seconds.client_body_timeout:
            self._watch_body()

    def _late_header(self) -> None:
        seconds = self.config.settings.client_header_timeout
        self._cut("header_timeout", 408, f"the header did not arrive within {seconds:g} s (--client-header-timeout)")

    def _watch_body(self) -> None:
        seconds, before = self.config.settings.client_body_timeout, self._received

        def check() -> None:
            # While the server has paused reading, the client is not at fault for a low rate.
            if self.flow.read_paused or self._received - before >= seconds * MIN_BODY_RATE:
                self._watch_body()
            else:
                came = counted(self._received - before, "byte")
                slow = f"{came} of the body arrived in {seconds:g} s (--client-body-timeout)"
                self._cut("body_timeout", 408, f"{slow}; the minimum is {MIN_BODY_RATE} bytes per second")

        self._read_clock = self.loop.call_later(seconds, check)

    def cut_short(self) -> None:
        """Called when the server stops: closes the connection if its client is still sending a request."""
        if self._owes() in ("header", "body"):
            self._cut("server_stopping", 503, "the server is stopping")

    # -- what the client reads -------------------------------------------------------------------------------------

    def _watch_writing(self) -> None:
        seconds, before = self.config.settings.send_timeout, self.transport.get_write_buffer_size()

        def check() -> None:
            if self.transport.get_write_buffer_size() < before:
                self._watch_writing()
            else:
                self.config.metrics.cut("send_timeout")
                # Unlike an ordinary close, a reset makes the system drop the unsent answer.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.transport.abort()  # also tells the application that the client is gone

        _stop(self._write_clock)
        if seconds:
            self._write_clock = self.loop.call_later(seconds, check)

    # -- the number of connections ---------------------------------------------------------------------------------

    def _count(self) -> None:
        self.config.counts.connections = len(self.connections)

    def _are_too_many(self) -> bool:
        return self.config.counts.connections > self.config.settings.max_connections

    def _make_room(self) -> None:
        """Makes room for this new connection. Of this process's connections on which the server waits for the client,
        closes the one with the longest wait. If there is no other such connection, marks this one as surplus."""
        oldest = next(iter(self.config.owing))
        if oldest is self:
            self._surplus = True
        else:
            oldest._cut("limit_concurrency", 503, self._too_many())
            self.connections.discard(oldest)
            self._count()

    def _too_many(self) -> str:
        open_now = counted(self.config.settings.max_connections, "connection")
        return f"this server has {open_now} open (--limit-concurrency)"

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request to the application if its framing is valid and there is room for its connection."""
        _to_origin_form(scope)
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:  # together they are used for request smuggling
            text = "a request cannot have both Content-Length and Transfer-Encoding (RFC 9112, 6.3); leave one out"
            response = error_response(ApiError(text), scope["path"])
            response.headers["Connection"] = "close"
            return await response(scope, receive, send)
        await self._unless_surplus(scope, receive, send)

    async def _unless_surplus(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (self._surplus and self._are_too_many()) or scope["path"] in OPEN_PATHS:
            if scope["http_version"] == "1.1":  # other versions have no chunked encoding
                scope[BODY_WRITER] = BodyWriter(self).write
            return await self._served(scope, receive, send)
        self.config.metrics.cut("limit_concurrency")
        response = error_response(ApiError(self._too_many(), status=503, code="limit_concurrency"), scope["path"])
        response.headers.update({"Retry-After": str(RETRY_SECONDS), "Connection": "close"})
        await response(scope, receive, send)

    def _cut(self, reason: str, status: int, message: str) -> None:
        """Closes this connection, on which the server waits for the client. If a request has begun and has no answer
        yet, it is answered with an error."""
        self.config.metrics.cut(reason)
        self.config.owing.pop(self, None)
        _stop(self._read_clock)
        try:
            self._answer_cut(reason, status, message)
        finally:
            self.transport.close()

    def _answer_cut(self, reason: str, status: int, message: str) -> None:
        has_request = self.cycle is not None and not self.cycle.response_complete
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or not (has_request or self.conn.trailing_data[0]):
            return
        path = self.cycle.scope["path"] if has_request else ""
        body = json.dumps(ApiError(message, status=status, code=reason).body(path)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if has_request and self.cycle.scope["method"] == "HEAD":
            body = b""
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if has_request:
            self.cycle.disconnected = True  # discards whatever the application still sends


class BodyWriter:
    """Writes an answer's body in chunks (RFC 9112, 7.1), after its header has been sent.

    h11 takes ten times as long. It can be bypassed, because its state does not change within a body.
    """

    def __init__(self, connection: Connection) -> None:
        self._cycle, self._flow, self._transport = connection.cycle, connection.flow, connection.transport

    async def write(self, data: bytes) -> None:
        """Writes one chunk, once the client has read enough of the earlier ones."""
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()
        if not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _to_origin_form(scope: Scope) -> None:
    """Replaces the target ``http://host/path``, the form that clients send to proxies, by ``/path``. The host becomes
    the Host header (RFC 9112, 3.2.2)."""
    root = scope["root_path"].encode()
    match = ABSOLUTE_FORM.fullmatch(scope["raw_path"].removeprefix(root))
    if match is None:
        return
    scope["raw_path"] = root + (match["path"] or b"/")
    scope["path"] = unquote(scope["raw_path"].decode("latin-1"))
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", match["host"]), *headers]


def _stop(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()
