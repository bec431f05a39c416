"""Refuses what must not reach the API: requests without the key, and bodies that are too long."""

from __future__ import annotations

import asyncio
import contextlib
import hmac

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.settings import ServerSettings

OPEN_PATHS = frozenset(("/health", "/version", "/metrics"))
"""What probes and monitoring ask for, without a key."""

LINGER_SECONDS = 5.0
MAX_DIGITS = 18


class BodyTooLarge(HTTPException):
    """A body that turned out too long while it came in."""


class Guard:
    """ASGI middleware.

    Args:
        app: what is guarded.
        settings: the key and the limit.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._limit = app, settings.max_body_bytes
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._too_large = f"the body is longer than the limit of {settings.max_body_mib:g} MiB"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if self._key and scope["path"] not in OPEN_PATHS and not _has_key(given, self._key):
            text = "the API key is wrong" if given else "this server needs the header Authorization: Bearer <API key>"
            error = ApiError(text, status=401, code="invalid_api_key")
            refusal = JSONResponse(error.body(), 401, {"WWW-Authenticate": "Bearer"})
            return await refusal(scope, receive, send)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > MAX_DIGITS or int(length) > self._limit:
            return await too_large(self._too_large)(scope, receive, send)
        await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        left = self._limit

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                size, before = len(message.get("body", b"")), left
                left -= size
                if left < 0 <= before:  # once: what still comes is thrown away
                    raise BodyTooLarge(413, self._too_large)
            return message

        return limited


def _has_key(credentials: bytes, key: bytes) -> bool:
    """Whether an Authorization header has the key; its scheme may be in any case (RFC 9110, 11.1)."""
    scheme, _, given = credentials.partition(b" ")
    # The key's comparison takes as long for any key of its length.
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.lstrip(b" "), key)


def too_large(message: str) -> JSONResponse:
    """The refusal of a body."""
    return _Lingering(ApiError(message, status=413, code="body_too_large").body(), 413, {"Connection": "close"})


class _Lingering(JSONResponse):
    """Says no and goes on reading for a while: clients send a whole body before they look at the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def drain() -> None:
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drain(), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})
