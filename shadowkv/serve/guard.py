"""Refuses what must not reach the API: requests without a valid key, too many requests per key, and bodies that are
too long."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shadowkv.serve.api_error import ApiError
from shadowkv.serve.errors import BodyTooLarge, error_response, too_large
from shadowkv.serve.page_assets import PAGE_PATHS
from shadowkv.serve.settings import ServerSettings
from shadowkv.wording import counted

OPEN_PATHS = frozenset(("/health", "/version", "/metrics"))
"""Paths for probes and monitoring, which need no key."""

STATS_PATH = "/page/stats"
"""The page requests it every second: it is not counted among its key's requests, and not logged."""
MAX_DIGITS = 18


class Guard:
    """ASGI middleware.

    Args:
        app: the application to guard.
        settings: the keys and the limits.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._limit = app, settings.max_body_bytes
        self._keys = [key.encode() for key in settings.api_key]
        self._most, self._running = settings.max_concurrent_requests_per_key, Counter[int]()
        self._too_large = f"the body is longer than the limit of {settings.max_body_mib:g} MiB"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if not self._keys or scope["path"] in OPEN_PATHS | PAGE_PATHS:
            return await self._unless_too_large(scope, receive, send)
        headers, path = dict(scope["headers"]), scope["path"]
        given, bare = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")  # sent by Anthropic's clients
        key = _which(given, bare, self._keys)
        if key is None:
            wrong = "the API key is wrong"
            text = wrong if given or bare else "this server needs the header Authorization: Bearer <API key>"
            error = ApiError(text, status=401, code="invalid_api_key")
            return await JSONResponse(error.body(path), 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        if path == STATS_PATH:
            return await self._unless_too_large(scope, receive, send)
        if self._most and self._running[key] >= self._most:
            most = counted(self._most, "request")
            text = f"{most} with this API key may be at work (--max-concurrent-requests-per-key)"
            error = ApiError(f"{text}; try again later", status=429, code="rate_limit_exceeded")
            return await error_response(error, path)(scope, receive, send)
        self._running[key] += 1
        try:
            await self._unless_too_large(scope, receive, send)
        finally:
            self._running[key] -= 1

    async def _unless_too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or len(length) > MAX_DIGITS or int(length) > self._limit:
            return await too_large(self._too_large, scope["path"])(scope, receive, send)
        await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        left = self._limit

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                size, before = len(message.get("body", b"")), left
                left -= size
                if left < 0 <= before:  # once: the rest is discarded
                    raise BodyTooLarge(413, self._too_large)
            return message

        return limited


def _which(credentials: bytes, bare: bytes, keys: Sequence[bytes]) -> int | None:
    """Which key an Authorization header has, its scheme in any case (RFC 9110, 11.1), or an x-api-key, if any."""
    scheme, _, given = credentials.partition(b" ")
    given = given.lstrip(b" ") if scheme.lower() == b"bearer" else b""
    # A comparison takes the same time for any key of the same length, and all are made.
    found = [n for n, key in enumerate(keys) if hmac.compare_digest(given, key) | hmac.compare_digest(bare, key)]
    return found[0] if found else None
